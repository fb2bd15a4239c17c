"""Reads traces of production clusters: Azure's multimodal trace, and the clients of ServeGen.

Both say when a request came, how many tokens it had and how many pictures, and neither says which pictures or texts
were equal. So contents are synthesised: every text is new, and a picture is one of a few shared ones with a probability
that the caller gives. The files in `samples/` are examples of the two formats and were written for this project; the
traces themselves are not shipped. The module knows nothing of clusters.
"""

from __future__ import annotations

import ast
import csv
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from math import gamma
from pathlib import Path
from typing import NamedTuple

from fabric.contracts import ConfigError
from loadtest.simulator.cost_tables import CostTable
from loadtest.simulator.sim_requests import Part, SimRequest
from loadtest.simulator.workloads import QUESTION

SAMPLES = Path(__file__).with_name("samples")
AZURE_COLUMNS = ("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens")
SERVEGEN_WINDOW_S = 600.0
"""ServeGen states the rate of a client for windows of this length."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Says how a trace becomes requests."""

    picture: str = "image"
    """Names the medium of the cost table that stands for every picture of the trace."""
    shared_pictures: float = 0.0
    """Holds the share of pictures that are one of `num_shared` popular ones; no trace says what it is."""
    num_shared: int = 64
    speed_up: float = 1.0
    """Divides all times, so that a trace of another cluster loads this one."""
    max_requests: int = 0
    """Limits the number of requests; 0 means all."""


class TraceRow(NamedTuple):
    at_s: float
    num_images: int
    num_context: int
    """Counts the tokens of the prompt, those of its pictures included."""
    num_output: int


def read_trace(path: Path, table: CostTable, options: TraceOptions, seed: int) -> Iterator[SimRequest]:
    """Yields the requests of a trace: a CSV file in the format of Azure's trace, or a folder of ServeGen's clients.
    Raises ConfigError if the trace can't be read."""
    rng = random.Random(seed)
    rows = servegen_rows(path, rng) if path.is_dir() else azure_rows(path)
    num_picture = table.kind(options.picture).num_tokens
    begin_s: float | None = None
    for number, row in enumerate(rows):
        if options.max_requests and number >= options.max_requests:
            return
        begin_s = row.at_s if begin_s is None else begin_s
        num_text = max(1, row.num_context - row.num_images * num_picture)
        parts: list[Part] = [(rng.randrange(1 << 30), num_text)]
        parts += [(options.picture, _picture(options, rng)) for _ in range(row.num_images)]
        if row.num_images:
            parts.append(QUESTION)
        kind = f"{options.picture}*{row.num_images}" if row.num_images > 1 else options.picture
        at_s = (row.at_s - begin_s) / options.speed_up
        first_output = rng.randrange(1 << 30)
        yield SimRequest(
            number, at_s, kind if row.num_images else "text", tuple(parts), max(1, row.num_output), first_output
        )


def _picture(options: TraceOptions, rng: random.Random) -> str:
    if options.shared_pictures and rng.random() < options.shared_pictures:
        ranks = range(1, options.num_shared + 1)
        return f"shared{rng.choices(ranks, [1.0 / rank for rank in ranks])[0]}"
    return f"{rng.getrandbits(64):016x}"


def azure_rows(path: Path) -> Iterator[TraceRow]:
    """Yields the rows of a file with the columns of `AZURE_COLUMNS`; a trace without `NumImages` is text only."""
    try:
        file = path.open(newline="")
    except OSError as error:
        raise ConfigError(f"the trace {path} can't be read: {error}") from error
    with file:
        reader = csv.DictReader(file)
        missing = set(AZURE_COLUMNS) - {"NumImages"} - set(reader.fieldnames or ())
        if missing:
            raise ConfigError(f"the trace {path} lacks the columns {', '.join(sorted(missing))}")
        for number, row in enumerate(reader, start=2):
            try:
                at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                num_images = int(row.get("NumImages") or 0)
                yield TraceRow(at_s, num_images, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"line {number} of the trace {path} is no request: {error}") from error


# ---------------------------------------------------------------- ServeGen


class ServeGenWindow(NamedTuple):
    """A `ServeGenWindow` says how one client behaves from `begin_s` on."""

    begin_s: float
    rate: float
    pattern: str
    """Names the distribution of the times between requests: `Gamma`, `Weibull` or `Poisson`."""
    shape: float


def servegen_rows(folder: Path, rng: random.Random) -> Iterator[TraceRow]:
    """Yields what the clients of the folder ask, in order of time. A client consists of `chunk-N-trace.csv` (begin,
    rate, coefficient of variation, pattern and its parameters, a line per window) and `chunk-N-dataset.json` (for each
    window the distributions of `input_tokens`, `output_tokens` and, with pictures, `image_num` or `image_tokens`)."""
    traces = sorted(folder.glob("chunk-*-trace.csv"))
    if not traces:
        raise ConfigError(f"the folder {folder} has no chunk-N-trace.csv of ServeGen")
    clients = [_client_rows(trace, random.Random(rng.getrandbits(64))) for trace in traces]
    return merge(*clients, key=lambda row: row.at_s)


def _client_rows(trace: Path, rng: random.Random) -> Iterator[TraceRow]:
    dataset = trace.with_name(trace.name.replace("-trace.csv", "-dataset.json"))
    try:
        windows = [_window(line) for line in trace.read_text().splitlines() if line.strip()]
        begin_to_data: dict[float, Mapping[str, object]] = {
            float(begin): data for begin, data in json.loads(dataset.read_text()).items()
        }
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"ServeGen's client {trace} can't be read: {error}") from error
    for window in windows:
        known = [begin for begin in begin_to_data if begin <= window.begin_s]
        if not known or window.rate <= 0.0:
            continue
        data = begin_to_data[max(known)]
        inputs, outputs = _distribution(data, "input_tokens", trace), _distribution(data, "output_tokens", trace)
        images = _distribution(data, "image_num", trace) if "image_num" in data else None
        at_s = window.begin_s + _gap_s(window, rng) * rng.random()
        while at_s < window.begin_s + SERVEGEN_WINDOW_S:
            num_images = 0 if images is None else _drawn(images, rng)
            yield TraceRow(at_s, num_images, _drawn(inputs, rng), _drawn(outputs, rng))
            at_s += _gap_s(window, rng)


def _window(line: str) -> ServeGenWindow:
    begin, rate, _, pattern, shape = line.split(",")[:5]
    return ServeGenWindow(float(begin), float(rate), pattern.strip(), float(shape or 1.0))


def _gap_s(window: ServeGenWindow, rng: random.Random) -> float:
    mean_s = 1.0 / window.rate
    if window.pattern == "Weibull":
        return rng.weibullvariate(mean_s / gamma(1.0 + 1.0 / window.shape), window.shape)
    if window.pattern == "Gamma":
        return rng.gammavariate(window.shape, mean_s / window.shape)
    return rng.expovariate(window.rate)


def _distribution(data: Mapping[str, object], name: str, trace: Path) -> tuple[Sequence[int], Sequence[float]]:
    """Returns values and probabilities; ServeGen writes them as a Python dict in a string."""
    try:
        value = data[name]
        pairs = ast.literal_eval(value) if isinstance(value, str) else value
        found = {int(float(key)): float(share) for key, share in pairs.items()}  # type: ignore[union-attr]
    except (KeyError, ValueError, SyntaxError, AttributeError) as error:
        raise ConfigError(f"the dataset of {trace} has no distribution {name!r}: {error}") from error
    return list(found), list(found.values())


def _drawn(distribution: tuple[Sequence[int], Sequence[float]], rng: random.Random) -> int:
    return rng.choices(*distribution)[0]
