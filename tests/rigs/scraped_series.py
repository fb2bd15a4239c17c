"""Reads expositions in Prometheus' text format, so that tests can ask for values by name and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families


class Scraped:
    """A `Scraped` is one exposition. Fails if a series stands in it twice."""

    def __init__(self, text: str) -> None:
        self._series: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        for family in self.families.values():
            for sample in family.samples:
                self._series.setdefault(sample.name, []).append((sample.labels, sample.value))
        for name, found in self._series.items():
            assert len({tuple(sorted(labels.items())) for labels, _ in found}) == len(found), name

    def values(self, name: str, **labels: str) -> list[float]:
        """Returns the values of the series with these labels."""
        return [value for own, value in self._series.get(name, ()) if labels.items() <= own.items()]

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of these values. Raises AssertionError if there is no such series."""
        values = self.values(name, **labels)
        assert values, f"there is no {name} with {labels}"
        return sum(values)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Returns the sums of a metric by the values of a label."""
        found: dict[str, float] = {}
        for own, value in self._series.get(name, ()):
            if labels.items() <= own.items():
                found[own[label]] = found.get(own[label], 0.0) + value
        return found

    def active(self, label: str, name: str) -> dict[str, float]:
        """Returns the same without the sums that are 0: what was counted, and not what could be."""
        return {value: number for value, number in self.by(label, name).items() if number}

    def is_every(self, name: str, test: Callable[[float], bool]) -> bool:
        """Returns whether there are series of this name, and all of them pass."""
        values = self.values(name)
        return bool(values) and all(map(test, values))
