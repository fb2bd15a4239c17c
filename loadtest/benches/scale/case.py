"""One row of `weft bench scale`: an event whose cost must not depend on how much is stored or waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaleCase:
    """A state that can be prepared at any size, and an event that is repeated on it."""

    name: str
    """What the event is and what there is a lot of, for example "evict one feature, slots stored"."""
    small: int
    """The small size; the large one is ten times this."""
    prepare: Callable[[int], Callable[[], int]]
    """`prepare(size)` builds the state, unmeasured, and returns a function that performs one round of events on it and
    returns how many events those were. It is called once per round, so a round must leave the size as it found it."""
