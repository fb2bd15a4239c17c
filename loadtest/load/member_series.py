"""Reads from a cluster's `/metrics` how busy its encoders and workers are while it is under load.

A `SeriesWatch` is given the text of the page at moments of its caller's choice. It keeps points of the shares in
`SERIES`, which are means over the members. The module opens no connection and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class BusyShare(NamedTuple):
    """A `BusyShare` is a series of seconds in which members did something, as a share of the time that has passed."""

    seconds: str


class UsedShare(NamedTuple):
    """A `UsedShare` is a series of what members use, as a share of what they have."""

    used: str
    capacity: str


SERIES: Mapping[str, BusyShare | UsedShare] = MappingProxyType(
    {
        "encoders busy": BusyShare("weft_encoder_forward_seconds_total"),
        "workers busy": BusyShare("weft_worker_step_seconds_total"),
        "KV blocks used": UsedShare("weft_worker_kv_used_blocks", "weft_worker_kv_capacity_blocks"),
        "encoder arenas used": UsedShare("weft_encoder_arena_used_bytes", "weft_encoder_arena_capacity_bytes"),
    }
)
"""Maps a name to what is read for it."""


class SeriesWatch:
    """Collects points (seconds, share) of each of `SERIES`."""

    def __init__(self) -> None:
        self.name_to_points: dict[str, list[tuple[float, float]]] = {name: [] for name in SERIES}
        self._before: dict[str, tuple[float, list[float]]] = {}

    def take(self, text: str, now_s: float) -> None:
        """Takes the page as it was at a moment. A series that the page does not have gets no point, and neither does a
        busy share whose members are others than before."""
        values: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name, []).append(sample.value)
        for name, share in SERIES.items():
            point = self._used(share, values) if isinstance(share, UsedShare) else self._busy(share, values, now_s)
            if point is not None:
                self.name_to_points[name].append((now_s, point))

    def _used(self, share: UsedShare, values: Mapping[str, list[float]]) -> float | None:
        capacity = sum(values.get(share.capacity, ()))
        return sum(values.get(share.used, ())) / capacity if capacity else None

    def _busy(self, share: BusyShare, values: Mapping[str, list[float]], now_s: float) -> float | None:
        seconds = values.get(share.seconds, [])
        before_s, before = self._before.get(share.seconds, (now_s, []))
        self._before[share.seconds] = (now_s, seconds)
        if not seconds or len(seconds) != len(before) or now_s <= before_s or sum(seconds) < sum(before):
            return None
        return (sum(seconds) - sum(before)) / (len(seconds) * (now_s - before_s))

    def mean(self, name: str) -> float:
        """Returns the mean of the points of one of `SERIES`; 0 without any."""
        points = self.name_to_points[name]
        return sum(value for _, value in points) / len(points) if points else 0.0
