"""Reads from a cluster's `/metrics` how busy its encoders and workers are while it is under load.

A `SeriesWatch` is given the text of the page at moments of its caller's choice. It keeps points of the shares in
`SERIES`, which are means over the members. The module opens no connection and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

SERIES: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "encoders busy": ("weft_encoder_busy_fraction", None),
        "KV blocks used": ("weft_worker_kv_blocks_used", "weft_worker_kv_blocks_total"),
        "encoder arenas used": ("weft_encoder_arena_bytes_used", "weft_encoder_arena_bytes_total"),
    }
)
"""Maps a name to a series, and to the series that it is a share of; without the latter, the series is a share itself,
and its mean over the members counts."""


class SeriesWatch:
    """Collects points (seconds, share) of each of `SERIES`."""

    def __init__(self) -> None:
        self.name_to_points: dict[str, list[tuple[float, float]]] = {name: [] for name in SERIES}

    def take(self, text: str, now_s: float) -> None:
        """Takes the page as it was at a moment. A series that the page does not have gets no point."""
        values: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name, []).append(sample.value)
        for name, (part, whole) in SERIES.items():
            found = values.get(part)
            if not found:
                continue
            total = float(len(found)) if whole is None else sum(values.get(whole, ()))
            if total:
                self.name_to_points[name].append((now_s, sum(found) / total))

    def mean(self, name: str) -> float:
        """Returns the mean of the points of one of `SERIES`; 0 without any."""
        points = self.name_to_points[name]
        return sum(value for _, value in points) / len(points) if points else 0.0
