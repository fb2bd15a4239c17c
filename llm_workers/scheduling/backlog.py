"""What is in front of a request that comes now: tokens that could be computed and are not yet.

Changes nothing. Knows neither steps nor what they cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fabric.flat_tokens import flat_tokens
from fabric.ids import SequenceId
from llm_workers.scheduling.residency import Residency
from llm_workers.scheduling.sequence import Sequence


class Backlog(NamedTuple):
    num_tokens: int
    flat_tokens: float
    """Weighed by their contexts."""


def backlog_of(
    live: Iterable[Sequence], held: frozenset[SequenceId], residency: Residency, context_scale_tokens: float
) -> Backlog:
    """Of sequences that do not decode, up to their doorsteps; none of those `held` for a sibling, whose blocks they
    take over."""
    num_tokens, num_flat = 0, 0.0
    for one in live:
        if one.is_decoding or one.sequence_id in held:
            continue
        num_open = residency.doorstep(one, one.num_tokens) - one.num_computed
        num_tokens += num_open
        num_flat += flat_tokens(num_open, one.num_computed, context_scale_tokens)
    return Backlog(num_tokens, num_flat)
