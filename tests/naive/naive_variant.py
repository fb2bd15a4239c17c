"""Defines what a naive variant is, and collects the variants that other modules of this folder declare by `naive`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from naive_plugin import Guards

Apply = Callable[[Guards], None]


@dataclass(frozen=True, slots=True)
class NaiveVariant:
    """A `NaiveVariant` is one guard, the attack that it stops, and the implementation without it."""

    attack: str
    known_from: str
    """Names the vulnerability of another server, or is empty."""
    guard: str
    """Is the module that has the guard."""
    test: str
    """Is the test that must fail without the guard, below `tests/`."""
    symptom: str
    """Is a regular expression of what the failed test shows, so that it does not fail for another reason."""
    apply: Apply

    @property
    def name(self) -> str:
        return self.apply.__name__

    @property
    def words(self) -> str:
        """Says what the naive implementation does."""
        return (self.apply.__doc__ or "").strip()

    @property
    def test_name(self) -> str:
        """Returns the test without its parameters."""
        return self.test.partition("[")[0]


DECLARED: list[NaiveVariant] = []
"""Collects the variants as their modules are imported."""
NOT_REFUSED = "DID NOT RAISE"


def naive(attack: str, known_from: str, guard: str, test: str, symptom: str = NOT_REFUSED) -> Callable[[Apply], Apply]:
    """Returns a decorator that adds a variant to the list."""

    def add(apply: Apply) -> Apply:
        DECLARED.append(NaiveVariant(attack, known_from, guard, test, symptom, apply))
        return apply

    return add
