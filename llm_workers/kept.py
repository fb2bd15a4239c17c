"""Keeps features after prefill as copies in plain host memory, within a byte budget. The least recently used feature is
dropped first.

A kept feature that is used again is *lent*: it is read from its host memory without a slot in the inbox, and it is not
dropped until it is given back. This module knows nothing of requests, slots or torch.
"""

from __future__ import annotations

from collections import OrderedDict

from fabric.channel import LandedFeature
from fabric.ids import UnitKey
from llm_workers.scheduling.keeping import FeatureUse, is_kept

HISTORY = 65_536
"""Limits how many units (separately encoded parts of media items) are remembered as seen; a key takes about 100
bytes."""
NO_SLOT = -1
"""Serves as the slot id of a feature that lies in no arena."""


class KeptFeatures:
    """Holds the kept and the lent features. It is not thread-safe and lives in the event loop, but the engine's thread
    reads lent buffers."""

    def __init__(self, mode: str, budget_bytes: int, is_prefix_cached: bool, has_drafts: bool = False) -> None:
        """Creates an empty store. `has_drafts` says whether sequences speculate; `scheduling.keeping` explains the
        effect. Raises ConfigError for an unknown `mode`."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_hits = 0
        """Counts the features that did not have to be fetched again."""
        self._mode, self._is_prefix_cached, self._has_drafts = mode, is_prefix_cached, has_drafts
        self._features: OrderedDict[UnitKey, LandedFeature] = OrderedDict()
        """Holds the features that are not lent, the least recently used first."""
        self._lent: dict[UnitKey, LandedFeature] = {}
        self._lent_bytes = 0
        self._seen: OrderedDict[UnitKey, None] = OrderedDict()
        self._distrusted: set[UnitKey] = set()
        """Holds distrusted units that are lent or in the inbox. They are not kept when they come back."""
        is_kept(mode, FeatureUse())  # This call raises ConfigError for an unknown mode at the start.

    def __contains__(self, unit: UnitKey) -> bool:
        """Returns whether the unit can be lent."""
        return unit in self._features

    def is_lent(self, unit: UnitKey) -> bool:
        return unit in self._lent

    def offer(self, unit: UnitKey, feature: LandedFeature) -> bool:
        """Copies a feature that is about to leave the inbox, if the policy keeps it and the budget allows it. Returns
        True if it was copied."""
        if unit in self._distrusted and unit not in self._lent:
            self._distrusted.remove(unit)
            return False
        use = FeatureUse(unit in self._seen, self._is_prefix_cached, has_drafts=self._has_drafts)
        self._remember(unit)
        if not is_kept(self._mode, use) or unit in self._lent:
            return False
        self._drop(unit)
        if not self._make_room(feature.buffer.nbytes):
            return False
        self._features[unit] = feature._replace(slot_id=NO_SLOT, buffer=feature.buffer.copy(), seconds=0.0)
        self.used_bytes += feature.buffer.nbytes
        return True

    def lend(self, unit: UnitKey) -> LandedFeature:
        """Lends a kept feature and counts a hit. The feature stays in memory until it is given back."""
        feature = self._lent[unit] = self._features.pop(unit)
        self._lent_bytes += feature.buffer.nbytes
        self.num_hits += 1
        return feature

    def give_back(self, unit: UnitKey) -> None:
        """Takes a lent feature back, which then counts as the most recently used one."""
        feature = self._features[unit] = self._lent.pop(unit)
        self._lent_bytes -= feature.buffer.nbytes
        if unit in self._distrusted:
            self._distrusted.remove(unit)
            self._drop(unit)

    def distrust(self, unit: UnitKey, is_in_use: bool) -> None:
        """Drops a unit whose bytes may be wrong, so that it is not lent any more. If it is lent or in the inbox
        (`is_in_use`), it is also not kept when it comes back."""
        self._drop(unit)
        if is_in_use:
            self._distrusted.add(unit)

    def clear(self) -> None:
        self._features.clear()
        self._lent.clear()
        self._distrusted.clear()
        self.used_bytes = self._lent_bytes = 0

    def _make_room(self, nbytes: int) -> bool:
        """Drops the least recently used features until `nbytes` fit into the budget. Drops nothing and returns False if
        dropping all of them would not be enough."""
        if nbytes > self.budget_bytes - self._lent_bytes:
            return False
        while self.used_bytes + nbytes > self.budget_bytes:
            self._drop(next(iter(self._features)))
        return True

    def _drop(self, unit: UnitKey) -> None:
        feature = self._features.pop(unit, None)
        if feature is not None:
            self.used_bytes -= feature.buffer.nbytes

    def _remember(self, unit: UnitKey) -> None:
        self._seen[unit] = None
        self._seen.move_to_end(unit)
        if len(self._seen) > HISTORY:
            self._seen.popitem(last=False)
