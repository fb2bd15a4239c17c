"""Keep a feature after prefill, or discard it: the seed's decision table as a pure policy.

    row                            action    why
    1 speculative decoding         keep      a draft that fails may have to be prefilled again
    2 beam search                  keep      new beams may have to be prefilled again
    3 several turns, same medium   keep      it was needed before and is needed again
    4 prefix caching               discard   the KV is found by the prefix's hash
    5 single pass                  discard   the KV has what decoding needs

The first row that applies decides. Rows 1 and 2 protect generations that run, so they come before any guess about
the future. Row 3 comes before row 4 because it rests on what was seen: with the prefix cache on, a unit is fetched a
second time only when the cache did not cover it (another prompt around it, or evicted), so the cache will not cover
the third time either. Row 4 before row 5 changes no action; it names the reason.
The engine's own drafts (prompt lookup) roll back generated positions alone, which read no feature: for them row 1 is
the seed's word, not a need, and costs host memory within its budget.
What is kept is demoted to host memory, never left where features land. Knows no bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fabric.errors import ConfigError


class Scenario(Enum):
    """The rows, in the order of their precedence."""

    SPECULATION = "speculative decoding"
    BEAM_SEARCH = "beam search"
    SEVERAL_TURNS = "several turns"
    PREFIX_CACHE = "prefix caching"
    SINGLE_PASS = "single pass"


KEPT = frozenset({Scenario.SPECULATION, Scenario.BEAM_SEARCH, Scenario.SEVERAL_TURNS})
MODES = ("auto", "always", "never")


class FeatureUse(NamedTuple):
    """What is known of a feature whose last position was computed."""

    is_seen_before: bool = False
    """It had been fetched before: for another request, or for one that lost it."""
    is_prefix_cached: bool = True
    """The prefix cache is on."""
    has_beams: bool = False
    has_drafts: bool = False


def scenario_of(use: FeatureUse) -> Scenario:
    """The row that applies."""
    if use.has_drafts:
        return Scenario.SPECULATION
    if use.has_beams:
        return Scenario.BEAM_SEARCH
    if use.is_seen_before:
        return Scenario.SEVERAL_TURNS
    return Scenario.PREFIX_CACHE if use.is_prefix_cached else Scenario.SINGLE_PASS


def is_kept(mode: str, use: FeatureUse) -> bool:
    """`auto` goes by the table; `always` and `never` are the operator's word and stand above it."""
    if mode not in MODES:
        raise ConfigError(f"keep_features must be one of {', '.join(MODES)}, not {mode!r}")
    return mode == "always" or (mode == "auto" and scenario_of(use) in KEPT)
