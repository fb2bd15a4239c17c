"""Keeps features after prefill, as copies in plain host memory, and decides which ones are kept.

`HostCache` holds the copies within a byte budget; the least recently used feature is dropped first. A cached feature
that is used again is *lent*: it is read from its host memory without a slot in the inbox, and it is not dropped until
it is given back. `is_kept` says whether a feature is kept or discarded. This policy is a pure function of the following
table, which follows the OmniConnector article (docs/references.md):

    row                            action    why
    1 speculative decoding         keep      a draft that fails may have to be prefilled again
    2 beam search                  keep      new beams may have to be prefilled again
    3 several turns, same medium   keep      it was needed before and is needed again
    4 prefix caching               discard   the KV is found by the prefix's hash
    5 single pass                  discard   the KV has what decoding needs

`Scenario` names the rows and says why they have this order. A feature that is kept is moved to host memory and never
stays where features land. The feature store asks the policy and says when a feature is lent. A `FeatureLog` numbers
what the cache gains and loses, so that routers know what they need not have encoded again. This module knows nothing of
attempts and pulls.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from fabric.contracts import ConfigError, FeatureLog, FeatureStats, UnitKey
from fabric.transport import LandedFeature

NO_SLOT = -1
"""Serves as the slot id of a feature that lies in no arena."""


class HostCache:
    """Holds the cached and the lent features of units; a unit is one separately encoded part of a media item. It is not
    thread-safe and lives in the event loop, but the engine's thread reads lent buffers."""

    def __init__(self, budget_bytes: int, stats: FeatureStats, log: FeatureLog) -> None:
        """Creates an empty cache, which counts its hits in `stats` and notes in `log` what it gains and loses."""
        self._log = log
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._stats = stats
        self._features: OrderedDict[UnitKey, LandedFeature] = OrderedDict()
        """Holds the features that are not lent, the least recently used first."""
        self._lent: dict[UnitKey, LandedFeature] = {}
        self._lent_bytes = 0

    def __contains__(self, unit: UnitKey) -> bool:
        """Returns whether the unit can be lent."""
        return unit in self._features

    def __len__(self) -> int:
        """Returns the number of units that can be lent."""
        return len(self._features)

    def is_lent(self, unit: UnitKey) -> bool:
        return unit in self._lent

    def put(self, unit: UnitKey, feature: LandedFeature, num_units: int) -> list[UnitKey]:
        """Copies the feature of a unit that is not in the cache, and returns the units that were dropped for it. If the
        feature does not fit even without all features that are not lent, copies and drops nothing. `num_units` is the
        number of units of its item."""
        dropped: list[UnitKey] = []
        nbytes = feature.view.nbytes
        if nbytes > self.budget_bytes - self._lent_bytes:
            return dropped
        while self.used_bytes + nbytes > self.budget_bytes:
            dropped.append(next(iter(self._features)))
            self.drop(dropped[-1])
        self._features[unit] = feature._replace(slot_id=NO_SLOT, view=feature.view.copy(), seconds=0.0)
        self.used_bytes += nbytes
        self._log.unit_ready(unit, num_units)
        return dropped

    def lend(self, unit: UnitKey) -> LandedFeature:
        """Lends a cached feature and counts a hit. The feature stays in memory until it is given back."""
        feature = self._lent[unit] = self._features.pop(unit)
        self._lent_bytes += feature.view.nbytes
        self._stats.num_kept_hits += 1
        return feature

    def give_back(self, unit: UnitKey) -> None:
        """Takes a lent feature back, which then counts as the most recently used one."""
        feature = self._features[unit] = self._lent.pop(unit)
        self._lent_bytes -= feature.view.nbytes

    def drop(self, unit: UnitKey) -> None:
        """Drops a feature that is not lent. A unit that is not in the cache is ignored."""
        feature = self._features.pop(unit, None)
        if feature is not None:
            self.used_bytes -= feature.view.nbytes
            self._log.unit_gone(unit)

    def clear(self) -> None:
        for unit in [*self._features, *self._lent]:
            self._log.unit_gone(unit)
        self._features.clear()
        self._lent.clear()
        self.used_bytes = self._lent_bytes = 0

    def check_invariants(self) -> None:
        """Asserts that the bytes are counted right and stay within the budget."""
        assert not self._features.keys() & self._lent.keys(), "a feature is lent but can be lent again"
        lent_bytes = sum(feature.view.nbytes for feature in self._lent.values())
        free_bytes = sum(feature.view.nbytes for feature in self._features.values())
        assert (self._lent_bytes, self.used_bytes) == (lent_bytes, lent_bytes + free_bytes), "bytes are counted wrong"
        assert self.used_bytes <= self.budget_bytes, "the budget is exceeded"


# ---------------------------------------------------------------- what is kept


class Scenario(Enum):
    """Lists the rows of the table in the order of their precedence: the first row that applies decides.

    Rows 1 and 2 protect generations that run, so they come before any guess about the future. Row 3 comes before row 4
    because it rests on an observation: with the prefix cache on, a unit is fetched a second time only when the cache
    did not cover it (because the prompt around it differs, or because it was evicted), so the cache will not cover it
    the third time either. The order of rows 4 and 5 changes no action; it only names the reason.

    The engine's own drafts (prompt lookup) roll back generated positions alone, which read no feature. For them row 1
    is not needed; the table has it because the article has it, and it costs host memory within its budget. The API
    refuses beams (docs/adr/0019-beams-and-drafts.md), so no request reaches row 2."""

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


def is_kept(mode: str, use: FeatureUse) -> bool:
    """Returns whether the feature is kept. The mode `auto` follows the table; `always` and `never` are set by the
    operator and override it. Raises ConfigError for any other mode."""
    if mode not in MODES:
        raise ConfigError(f"worker: keep_features must be one of {', '.join(MODES)}, not {mode!r}")
    return mode == "always" or (mode == "auto" and scenario_of(use) in KEPT)


def scenario_of(use: FeatureUse) -> Scenario:
    """Returns the row that applies."""
    if use.has_drafts:
        return Scenario.SPECULATION
    if use.has_beams:
        return Scenario.BEAM_SEARCH
    if use.is_seen_before:
        return Scenario.SEVERAL_TURNS
    return Scenario.PREFIX_CACHE if use.is_prefix_cached else Scenario.SINGLE_PASS
