"""Caches features as copies in plain host memory, within a byte budget. The least recently used feature is dropped
first.

A cached feature that is used again is *lent*: it is read from its host memory without a slot in the inbox, and it is
not dropped until it is given back. The feature store decides what is cached and when it is lent. This module knows only
bytes and the order of use.
"""

from __future__ import annotations

from collections import OrderedDict

from fabric.channel import LandedFeature
from fabric.ids import UnitKey

NO_SLOT = -1
"""Serves as the slot id of a feature that lies in no arena."""


class HostCache:
    """Holds the cached and the lent features of units; a unit is one separately encoded part of a media item. It is not
    thread-safe and lives in the event loop, but the engine's thread reads lent buffers."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_hits = 0
        """Counts the features that did not have to be fetched again."""
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

    def put(self, unit: UnitKey, feature: LandedFeature) -> list[UnitKey]:
        """Copies the feature of a unit that is not in the cache, and returns the units that were dropped for it. If the
        feature does not fit even without all features that are not lent, copies and drops nothing."""
        dropped: list[UnitKey] = []
        nbytes = feature.buffer.nbytes
        if nbytes > self.budget_bytes - self._lent_bytes:
            return dropped
        while self.used_bytes + nbytes > self.budget_bytes:
            dropped.append(next(iter(self._features)))
            self.drop(dropped[-1])
        self._features[unit] = feature._replace(slot_id=NO_SLOT, buffer=feature.buffer.copy(), seconds=0.0)
        self.used_bytes += nbytes
        return dropped

    def lend(self, unit: UnitKey) -> LandedFeature:
        """Lends a cached feature and counts a hit. The feature stays in memory until it is given back."""
        feature = self._lent[unit] = self._features.pop(unit)
        self._lent_bytes += feature.buffer.nbytes
        self.num_hits += 1
        return feature

    def give_back(self, unit: UnitKey) -> None:
        """Takes a lent feature back, which then counts as the most recently used one."""
        feature = self._features[unit] = self._lent.pop(unit)
        self._lent_bytes -= feature.buffer.nbytes

    def drop(self, unit: UnitKey) -> None:
        """Drops a feature that is not lent. A unit that is not in the cache is ignored."""
        feature = self._features.pop(unit, None)
        if feature is not None:
            self.used_bytes -= feature.buffer.nbytes

    def clear(self) -> None:
        self._features.clear()
        self._lent.clear()
        self.used_bytes = self._lent_bytes = 0

    def check_invariants(self) -> None:
        """Asserts that the bytes are counted right and stay within the budget."""
        assert not self._features.keys() & self._lent.keys(), "a feature is lent and can be lent"
        lent_bytes = sum(feature.buffer.nbytes for feature in self._lent.values())
        free_bytes = sum(feature.buffer.nbytes for feature in self._features.values())
        assert (self._lent_bytes, self.used_bytes) == (lent_bytes, lent_bytes + free_bytes), "bytes are counted wrong"
        assert self.used_bytes <= self.budget_bytes, "the budget is exceeded"
