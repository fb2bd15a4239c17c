"""Defines one row of `weft bench scale`: an event whose cost must not depend on how much is stored or waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaleCase:
    """A `ScaleCase` is a state that can be prepared at any size, and an event that is repeated on it."""

    name: str
    """Says what the event is and what the size counts, for example "evict one feature, slots stored"."""
    small: int
    """Sets the small size; the large one is ten times as large."""
    prepare: Callable[[int], Callable[[], int]]
    """Builds the state of a size, unmeasured, and returns a function that performs one round of events on it and
    returns the number of events. That function is called once per round, so a round must leave the size unchanged."""
