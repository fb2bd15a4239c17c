"""Reads cost tables: what steps, forward passes, preparation and transfers take in a simulation.

A table is a JSON file in `tables/` or anywhere else. It names its source, what was assumed where the source is silent,
and the media that it knows. `measured_table` makes one of the results of `weft bench`. The module knows nothing of
clocks, or of the components that spend the time.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec

from fabric.contracts import ConfigError, MediaItem, MmHash, context_scale_tokens, weighted_tokens
from llm_workers.scheduling import StepWork

TABLES = Path(__file__).with_name("tables")
RESULTS = Path(__file__).parents[1] / "results"


class WorkerCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what a step of a worker takes: `step_overhead_s + s_per_decode * decoding sequences + s_per_token * weighted
    tokens of the rest`."""

    step_overhead_s: float
    s_per_decode: float
    s_per_token: float
    hidden_size: int
    kv_bytes_per_token: int

    def step_s(self, work: StepWork) -> float:
        return self.step_overhead_s + self.s_per_decode * work.num_decodes + self.s_per_token * work.weighted_tokens

    @property
    def scale_tokens(self) -> float:
        """Returns the context at which a token's attention costs as much as the rest of it."""
        return context_scale_tokens(self.hidden_size)

    def prefill_s(self, num_tokens: int, context: int = 0) -> float:
        """Returns the time of one step that computes only these tokens."""
        return self.step_s(StepWork(0, weighted_tokens(num_tokens, context, self.scale_tokens)))


class EncodingCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what media of one modality take on an encoder. `forward` is a curve of (cost of the batch, seconds), linear
    between its points and beyond them; preparation is decoding and preprocessing on a CPU core."""

    forward: tuple[tuple[int, float], ...]
    prepare_s: float = 0.0
    prepare_s_per_cost: float = 0.0

    def forward_s(self, cost: int) -> float:
        """Returns the time of a forward pass over a batch of this cost."""
        points = self.forward
        if cost <= points[0][0] or len(points) == 1:
            # Below the first point, the line through the first two goes on, but not below the share of the cost.
            if len(points) == 1:
                return points[0][1] * cost / points[0][0]
            (x0, y0), (x1, y1) = points[:2]
            slope = (y1 - y0) / (x1 - x0)
            return max(y0 - slope * (x0 - cost), y0 * cost / x0)
        at = min(bisect_right(points, cost, key=lambda point: point[0]), len(points) - 1)
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        return y0 + (y1 - y0) * (cost - x0) / (x1 - x0)


class LinkCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    latency_s: float
    bytes_per_s: float


class MediaKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `MediaKind` is a medium that a workload can contain, as the router plans it."""

    modality: str
    unit_tokens: tuple[int, ...]
    """Counts the rows of each unit; a video of several units is encoded and lands in parts."""
    cost: int

    @property
    def num_tokens(self) -> int:
        return sum(self.unit_tokens)

    def item(self, index: int, mm_hash: str) -> MediaItem:
        grid = (1, 1, self.cost)
        return MediaItem(index, self.modality, MmHash(mm_hash), grid, self.unit_tokens, self.cost, f"media.{index}")


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    source: str
    """Says what the figures were taken from."""
    assumed: tuple[str, ...]
    """Lists what the source does not say, or says in two ways, and what stands here instead."""
    worker: WorkerCosts
    modality_to_encoding: Mapping[str, EncodingCosts]
    media: Mapping[str, MediaKind]
    links: Mapping[str, LinkCosts]
    """Maps `same_process`, `same_host` and `network` to the costs of a transfer."""
    message_s: float = 0.0005
    """Holds the time that a message or a call takes between two members."""

    def link(self, host_a: str, host_b: str) -> LinkCosts:
        """Returns the costs between two hosts, which are `machine` or `machine/process` as in `Member.host`."""
        if host_a == host_b:
            return self.links["same_process" if "/" in host_a else "same_host"]
        is_near = host_a.partition("/")[0] == host_b.partition("/")[0]
        return self.links["same_host" if is_near else "network"]

    def kind(self, name: str) -> MediaKind:
        """Returns a medium. Raises ConfigError for an unknown one."""
        if name not in self.media:
            raise ConfigError(f"cost table {self.name} has no medium {name!r}; it has {', '.join(self.media)}")
        return self.media[name]


def table_names() -> list[str]:
    return sorted(path.stem for path in TABLES.glob("*.json"))


def load_table(name: str) -> CostTable:
    """Returns the shipped table of that name, `measured`, or the table of a file. Raises ConfigError."""
    if name == "measured":
        return measured_table()
    path = Path(name) if name.endswith(".json") else TABLES / f"{name}.json"
    try:
        table = msgspec.json.decode(path.read_bytes(), type=CostTable)
    except OSError as error:
        raise ConfigError(
            f"there is no cost table {name!r}; the tables are {', '.join(table_names())} and measured, or name a file"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"cost table {path}: {error}") from error
    for modality, costs in table.modality_to_encoding.items():
        is_rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(costs.forward))
        if not costs.forward or costs.forward[0][0] <= 0 or not is_rising:
            raise ConfigError(f"cost table {path}: the curve of {modality} must rise from a positive cost")
    return table


# ---------------------------------------------------------------- a table that was measured


def measured_table(results: Path = RESULTS) -> CostTable:
    """Returns a table of the newest results of `weft bench path` and `weft bench encoder` (the demo model's engine and
    full-size encoder towers on a CPU). Raises ConfigError if they do not have the rows that it needs."""
    path, encoder = _bench_rows(results / "path.json"), _bench_rows(results / "encoder.json")
    try:
        step_s = {n: 1.0 / float(path["engine, " + str(n) + " at once", "steps"][2]) for n in (1, 8, 32)}
        s_per_decode = (step_s[32] - step_s[1]) / 31
        transfer_s = float(path["NIXL, two processes", "8 MiB, READ"][2]) / 1e3
        batches = [(n, encoder["image", f"batch of {n}, 448x448"]) for n in (1, 2, 4, 8, 16, 32)]
        pictures = tuple((1024 * n, float(row[5]) / 1e3) for n, row in batches)
        video_s = float(encoder["video", "30 of 256x256"][5]) / 1e3
        audio_s = float(encoder["audio", "30 s"][5]) / 1e3
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"the results in {results} lack a row for a measured cost table: {error}") from error
    link = LinkCosts(latency_s=5e-5, bytes_per_s=2**23 / transfer_s)
    return CostTable(
        name="measured",
        source="the results of `weft bench path` and `weft bench encoder` in loadtest/results, on CPUs of two kinds",
        assumed=(
            "a prompt token takes as long as one more decoding sequence adds to a step",
            "decoding of files takes 2 ms and 0.5 us per unit of cost",
            "a transfer between machines has the speed measured between two processes of one",
        ),
        worker=WorkerCosts(step_s[1] - s_per_decode, s_per_decode, s_per_decode, 256, 4096),
        modality_to_encoding={
            "image": EncodingCosts(pictures, 0.002, 5e-7),
            "video": EncodingCosts(((7680, video_s),), 0.002, 5e-7),
            "audio": EncodingCosts(((3000, audio_s),), 0.002, 5e-7),
        },
        media={
            "image": MediaKind("image", (1024,), 1024),
            "video": MediaKind("video", (256,) * 15, 7680),
            "audio": MediaKind("audio", (750,), 3000),
        },
        links={"same_process": link, "same_host": link, "network": link},
    )


def _bench_rows(path: Path) -> dict[tuple[str, str], list[str]]:
    try:
        rows = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the result {path} can't be read: {error}") from error
    return {(row[0], row[1]): row for row in rows}
