"""Says what one attempt puts on its worker and on encoders, by its plan. A router counts it for its own attempts, and
tells other routers of it. The module knows nothing of what members report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fabric.contracts import KvScheme, MmHash, weighted_tokens
from router.planning.plan_types import RoutePlan, RouteQuery

PRIORITY_KEY = 1e8
"""Larger keys stand for priorities, and not for moments."""


class WorkerShare(NamedTuple):
    """A `WorkerShare` is what an attempt puts on its worker."""

    weighted_tokens: float
    num_blocks: int
    """Counts the KV blocks of the whole prompt but those that open requests on the worker use already."""
    scheme: KvScheme | None = None
    hashes: bytes = b""
    """Holds the hashes of the prompt's full blocks in the worker's scheme."""
    marks: Sequence[bytes] = ()
    """Holds the hashes by which other requests find the prompt (`promised_prompts.marks_of`)."""
    awaited: Sequence[tuple[float, float]] = ()
    """Holds the part of the weighted tokens that waits for features: when the features should have landed, on the
    router's clock, and how many tokens can be computed then that could not before, in order of time."""


class EncoderShare(NamedTuple):
    """An `EncoderShare` is what an attempt puts on one encoder."""

    seconds: float
    """Sums the predicted forward passes."""
    key: float
    """Places this work in the encoder's queue (`fabric.contracts.key_of`)."""
    decode_s: float
    hash_to_done_s: Mapping[MmHash, float]
    """Maps each feature that the encoder makes to the time on the router's clock at which it should be complete."""
    key_at_s: float = 0.0
    """Holds the moment to which the key is relative."""
    num_units: int = 1
    """Counts the units that the encoder makes, one after the other."""

    def key_since(self, at_s: float) -> float:
        """Returns the key relative to another moment."""
        return self.key + (self.key_at_s - at_s if abs(self.key) < PRIORITY_KEY else 0.0)


def awaited_tokens(query: RouteQuery, plan: RoutePlan, scale_tokens: float, now: float) -> list[tuple[float, float]]:
    """Returns the `WorkerShare.awaited` of a plan that is carried out now. The units of an item land one after the
    other while it is encoded, and tokens wait for the features of all runs before them too."""
    winner = plan.explanation.winner
    index_to_terms = {terms.item_index: terms for terms in winner.items}
    index_to_num = {item.index: item.num_tokens for item in query.media}
    runs = [run for run in query.placeholders if run.item in index_to_terms and run.end > winner.covered_tokens]
    found: list[tuple[float, float]] = []
    due_s, num_landed = now, dict.fromkeys(index_to_terms, 0)
    for run, following in zip(runs, [*(each.offset for each in runs[1:]), query.token_count], strict=False):
        terms = index_to_terms[run.item]
        num_landed[run.item] += run.length
        left_s = terms.encode_s * max(1.0 - num_landed[run.item] / max(index_to_num[run.item], 1), 0.0)
        due_s = max(due_s, now + terms.landing_s - left_s)
        begin = max(run.offset, winner.covered_tokens)
        num_tokens = weighted_tokens(following - begin, begin, scale_tokens)
        if found and found[-1][0] == due_s:
            num_tokens += found.pop()[1]
        found.append((due_s, num_tokens))
    return found
