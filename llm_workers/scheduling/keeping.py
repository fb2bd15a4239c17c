"""Decides whether a feature is kept after prefill or discarded. The policy is a pure function of this table, which
follows the OmniConnector article (docs/references.md):

    row                            action    why
    1 speculative decoding         keep      a draft that fails may have to be prefilled again
    2 beam search                  keep      new beams may have to be prefilled again
    3 several turns, same medium   keep      it was needed before and is needed again
    4 prefix caching               discard   the KV is found by the prefix's hash
    5 single pass                  discard   the KV has what decoding needs

The first row that applies decides. Rows 1 and 2 protect generations that run, so they come before any guess about the
future. Row 3 comes before row 4 because it rests on an observation: with the prefix cache on, a unit is fetched a
second time only when the cache did not cover it (because the prompt around it differs, or because it was evicted), so
the cache will not cover it the third time either. The order of rows 4 and 5 changes no action; it only names the
reason.

The engine's own drafts (prompt lookup) roll back generated positions alone, which read no feature. For them row 1
is not needed; the table has it because the article has it, and it costs host memory within its budget. The API refuses
beams (docs/adr/0019-beams-and-drafts.md), so no request reaches row 2. A feature that is kept is moved to host memory
and never stays where features land. This module knows nothing of bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fabric.errors import ConfigError


class Scenario(Enum):
    """Lists the rows of the table in the order of their precedence."""

    SPECULATION = "speculative decoding"
    BEAM_SEARCH = "beam search"
    SEVERAL_TURNS = "several turns"
    PREFIX_CACHE = "prefix caching"
    SINGLE_PASS = "single pass"


KEPT = frozenset({Scenario.SPECULATION, Scenario.BEAM_SEARCH, Scenario.SEVERAL_TURNS})
MODES = ("auto", "always", "never")


class FeatureUse(NamedTuple):
    """Holds what is known of a feature whose last position was computed."""

    is_seen_before: bool = False
    """Says whether the feature had been fetched before, for another request or for a request that lost it."""
    is_prefix_cached: bool = True
    """Says whether the prefix cache is on."""
    has_beams: bool = False
    has_drafts: bool = False


def scenario_of(use: FeatureUse) -> Scenario:
    """Returns the row that applies."""
    if use.has_drafts:
        return Scenario.SPECULATION
    if use.has_beams:
        return Scenario.BEAM_SEARCH
    if use.is_seen_before:
        return Scenario.SEVERAL_TURNS
    return Scenario.PREFIX_CACHE if use.is_prefix_cached else Scenario.SINGLE_PASS


def is_kept(mode: str, use: FeatureUse) -> bool:
    """Returns whether the feature is kept. The mode `auto` follows the table; `always` and `never` are set by the
    operator and override it. Raises ConfigError for any other mode."""
    if mode not in MODES:
        raise ConfigError(f"keep_features must be one of {', '.join(MODES)}, not {mode!r}")
    return mode == "always" or (mode == "auto" and scenario_of(use) in KEPT)
