"""Describes one unit (one separately encoded part of a media item) as the worker knows it: the states of its feature,
and the facts that belong to each state.

    GONE -> EXPECTED -> ANNOUNCED -> PULLING -> LANDED <-> READ        (`ALLOWED` lists every transition)
                                                 |  ^
                                                 v  |
                                                 KEPT

An attempt contains an EXPECTED unit, or the engine still reports a reader of it. An ANNOUNCED unit can be pulled from
an encoder. A LANDED feature lies in memory, and the engine holds no reference to it; to a READ feature it holds at
least one. A KEPT feature is a copy in host memory that no attempt uses. A unit that is GONE has no entry.

This module makes no decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from fabric.channel import LandedFeature
from fabric.ids import AttemptId, UnitKey
from fabric.messages import UnitReady
from llm_workers.features.read_order import UnitReaders
from llm_workers.scheduling.feature_references import FeatureReference


class UnitState(Enum):
    GONE = "gone"
    EXPECTED = "expected"
    ANNOUNCED = "announced"
    PULLING = "pulling"
    LANDED = "landed"
    READ = "read"
    KEPT = "kept"


# These are tuples because the hash of an enum's member is computed in Python, and events compare states often.
WITHOUT_BYTES = (UnitState.GONE, UnitState.EXPECTED, UnitState.ANNOUNCED)
IN_MEMORY = (UnitState.LANDED, UnitState.READ)
HELD = (UnitState.PULLING, UnitState.LANDED, UnitState.READ)
"""Lists the states in which a unit takes memory for an attempt."""
ALLOWED: Mapping[UnitState, tuple[UnitState, ...]] = {
    UnitState.GONE: (UnitState.EXPECTED, UnitState.ANNOUNCED),
    UnitState.EXPECTED: (UnitState.ANNOUNCED, UnitState.GONE),
    UnitState.ANNOUNCED: (UnitState.PULLING, UnitState.EXPECTED, UnitState.GONE),
    UnitState.PULLING: (UnitState.LANDED, *WITHOUT_BYTES),
    UnitState.LANDED: (UnitState.READ, UnitState.KEPT, *WITHOUT_BYTES),
    UnitState.READ: (UnitState.LANDED,),
    UnitState.KEPT: (UnitState.LANDED, *WITHOUT_BYTES),
}


@dataclass(slots=True, eq=False)
class Announced:
    """An `Announced` is an announcement with its attempt and the time of its arrival."""

    attempt: AttemptId
    ready: UnitReady
    at_s: float
    is_taken: bool = False


@dataclass(slots=True, eq=False)
class UnitEntry:
    """A `UnitEntry` holds everything that the worker knows of one unit."""

    unit: UnitKey
    state: UnitState = UnitState.GONE
    announced: dict[Announced, None] = field(default_factory=dict)
    """Holds the announcements that were neither pulled nor given back, in the order of their arrival."""
    readers: UnitReaders = field(default_factory=UnitReaders)
    feature: LandedFeature | None = None
    """Holds the feature while the unit is LANDED or READ."""
    references: set[FeatureReference] = field(default_factory=set)
    """Holds the references that the engine was handed and has not given back."""
    is_lent: bool = False
    """Says that the feature takes no room in the inbox, because the host cache has lent it."""
    is_evicting: bool = False
    """Says that the feature is freed as soon as every reference has come back, even if attempts need it."""
    is_distrusted: bool = False
    """Says that the bytes may be wrong, so that they are not kept."""

    @property
    def state_without_bytes(self) -> UnitState:
        """Returns the state of the unit if no pull is running and no feature is in memory or kept."""
        if self.announced:
            return UnitState.ANNOUNCED
        is_used = self.readers.attempts or self.readers.named
        return UnitState.EXPECTED if is_used else UnitState.GONE

    def check(self) -> None:
        """Asserts that the state agrees with the facts."""
        unit, state, readers = self.unit, self.state, self.readers
        assert state is not UnitState.GONE, f"{unit} is gone and has an entry"
        assert (self.feature is not None) == (state in IN_MEMORY), f"{unit} is {state.name}"
        assert bool(self.references) == (state is UnitState.READ), f"{unit} is {state.name}"
        assert all(one.unit == unit and one.feature is self.feature for one in self.references)
        assert state not in WITHOUT_BYTES or state is self.state_without_bytes, f"{unit} is {state.name}"
        assert state in IN_MEMORY or not (self.is_lent or self.is_evicting or self.is_distrusted)
        assert self.is_evicting or not self.is_distrusted, f"{unit} is distrusted and stays"
        assert readers.num_expecting == sum(not needs.is_admitted for needs in readers.attempts.values())
        for needs in readers.attempts.values():
            is_missed = needs.is_admitted and unit in needs.missing
            assert not is_missed or state not in IN_MEMORY or self.is_evicting, f"{unit} is here and missed"
