"""Runs `weft bench http`: what HTTP requests and streamed tokens cost a router, in CPU time of its process.

The router is a real one behind its real server; the engine is simulated in the same process, so its steps are part of
every number. CPU time is measured instead of the time on the clock, because other processes lengthen it less.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from deploy.testing import TINY_MODEL
from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.front_end.blank_collector import blank_collector
from loadtest.benches.front_end.simulated_router import SimulatedRouter, simulated_router
from loadtest.benches.front_end.stream_clients import HttpCounts, HttpLoad, StreamClients
from router.observe import TracingSettings

NUM_STREAMS, TOKENS_PER_STREAM = 16, 2000
NUM_REQUESTS, NUM_PICTURE_REQUESTS = 200, 16
NUM_MANY, TOKENS_OF_MANY = 1000, 40
SIZE = (1280, 720)
SETTLED_S = 2.6
"""The spans of a request are sent within this time after its end."""
LEAST_SHARE = 0.03
"""Is the smallest share of the CPU time that gets a row."""
QUESTION = "What is the colour of the circle, and how many squares are there?"


class StreamCost(NamedTuple):
    """Holds what streaming has cost."""

    us_per_token: float
    events_per_token: float


def run(options: Sequence[str] = ()) -> BenchResult:
    """Measures all parts; each number is the median of the rounds."""
    parser = argparse.ArgumentParser(prog="weft bench http", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="takes the median of this many rounds")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="names the router's event loop")
    parts = ("streams", "requests", "pictures", "many", "tracing")
    parser.add_argument("--part", choices=parts, help="measures one part alone")
    args = parser.parse_args(options)
    rows, bars = [["what", "value", "unit"]], list[Bar]()
    with simulated_router(args.loop) as router, StreamClients() as clients:
        bench = HttpBench(router, clients, args.rounds)
        bench.warm_up()
        name_to_part: dict[str, Callable[[list[list[str]], list[Bar]], None]] = {
            "streams": bench.streams,
            "requests": bench.requests,
            "pictures": bench.pictures,
            "many": bench.many,
            "tracing": bench.tracing,
        }
        for name, part in name_to_part.items():
            if args.part in (None, name):
                part(rows, bars)
    notes = [
        f"The event loop is {args.loop}'s. Times are CPU time of the router's process, which holds the simulated "
        "engine too. The simulated engine is in `loadtest/benches`, and the HTTP server in `deploy`.",
        f"Streams: {NUM_STREAMS} at once, {TOKENS_PER_STREAM} tokens each. Tokens/s are those of one core.",
    ]
    rows += bench.shares()
    variant = "tracing" if args.part == "tracing" else ""
    return BenchResult(rows, bars, notes, variant, bench.part_to_shares)


class HttpBench:
    """Holds the parts of the bench, each of which adds its rows and bars."""

    def __init__(self, router: SimulatedRouter, clients: StreamClients, num_rounds: int) -> None:
        self._router, self._clients, self._num_rounds = router, clients, num_rounds
        self.part_to_shares: dict[str, dict[str, float]] = {}
        """Says for some parts which share of the CPU time each folder of the project takes, with the libraries that it
        calls. They come from further rounds, whose times do not count."""

    def shares(self) -> list[list[str]]:
        """Returns rows that say where the time goes."""
        return [
            [f"{part}: share of {folder}", f"{100 * share:.0f}", "%"]
            for part, shares in self.part_to_shares.items()
            for folder, share in shares.items()
            if share >= LEAST_SHARE
        ]

    def warm_up(self) -> None:
        self._clients.run(self._load([chat(8, is_streamed) for is_streamed in (False, True)] * 50))

    def streams(self, rows: list[list[str]], bars: list[Bar]) -> None:
        """Measures streamed tokens: with one event per token, and with eight steps of the engine per turn."""
        single = self._stream_cost(num_turns=4, num_steps_at_once=1)
        self._sample("one event per token", self._stream_load())
        joined = self._stream_cost(num_turns=4, num_steps_at_once=8)
        for name, cost in (("one event per token", single), ("joined tokens", joined)):
            rows.append([f"{name}: events per token", f"{cost.events_per_token:.3f}", ""])
            rows.append([f"{name}: CPU per token", f"{cost.us_per_token:.1f}", "us"])
            rows.append([f"{name}: tokens", f"{1e6 / cost.us_per_token:,.0f}", "1/s"])
        bars.append(Bar("events per token", single.events_per_token, 0.99, ""))
        bars.append(Bar("tokens/s, one event per token", 1e6 / single.us_per_token, 20_000, "1/s"))
        bars.append(Bar("tokens/s, joined", 1e6 / joined.us_per_token, 52_900, "1/s"))

    def requests(self, rows: list[list[str]], bars: list[Bar]) -> None:
        """Measures short text requests, one at a time."""
        for is_streamed in (False, True):
            for keeps in (True, False):
                bodies = [chat(1, is_streamed)] * NUM_REQUESTS
                cost_ms = self._request_ms(bodies, keeps)
                name = f"{'streamed' if is_streamed else 'whole'}, {'kept' if keeps else 'new'} connection"
                rows.append([f"text request, {name}", f"{cost_ms:.2f}", "ms"])
                bars.append(Bar(f"text request, {name}", cost_ms, 1.5, "ms", is_max=True))
                if keeps:
                    self._sample(f"text request, {name}", self._load(bodies))

    def pictures(self, rows: list[list[str]], bars: list[Bar]) -> None:
        """Measures requests with four pictures, and what an encoder takes for these."""
        files = [jpeg(seed) for seed in range(4 * NUM_PICTURE_REQUESTS)]
        bodies = [chat(1, False, files[at : at + 4]) for at in range(0, len(files), 4)]
        cost_ms = self._request_ms(bodies, True)
        self._sample("request with four 720p JPEGs", self._load(bodies))
        encode_ms = statistics.median(self._router.encode_ms() for _ in range(self._num_rounds))
        kib = sum(map(len, bodies)) / len(bodies) / 1024
        rows.append([f"request with four 720p JPEGs ({kib:,.0f} KiB)", f"{cost_ms:.2f}", "ms"])
        rows.append(["decoding and preprocessing of the four, at the encoder", f"{encode_ms:.1f}", "ms"])
        bars.append(Bar("request with four 720p JPEGs", cost_ms, 8.0, "ms", is_max=True))

    def many(self, rows: list[list[str]], bars: list[Bar]) -> None:
        """Measures many streams at once."""
        self._router.set_pace(4)
        before = self._router.use()
        load = self._load([chat(TOKENS_OF_MANY, True)] * NUM_MANY, num_clients=NUM_MANY)
        self._clients.begin(load)
        peak_bytes, counts = before.memory_bytes, None
        while counts is None:
            peak_bytes = max(peak_bytes, self._router.use().memory_bytes)
            counts = self._clients.poll(0.1)
        grown_mib = (peak_bytes - before.memory_bytes) / 2**20
        rows.append([f"{NUM_MANY} streams at once: memory grown by", f"{grown_mib:.0f}", "MiB"])
        bars.append(Bar(f"{NUM_MANY} streams at once: errors", counts.num_errors, 0, "", is_max=True))
        bars.append(Bar(f"{NUM_MANY} streams at once: memory", grown_mib, 256, "MiB", is_max=True))

    def tracing(self, rows: list[list[str]], bars: list[Bar]) -> None:
        """Measures what the spans of requests cost: answers of few tokens, without tracing, with a tenth of the
        requests sampled, and with all of them, in turn. The collector is another process. Each time is the lower
        quartile of the rounds, and the bar is the median of what the rounds gave."""
        self._router.set_pace(4)
        num_requests, num_tokens = 960, 64
        load = self._load([chat(num_tokens, True)] * num_requests, num_clients=NUM_STREAMS)
        first = self._load([chat(1, True)] * 100, num_clients=NUM_STREAMS)
        ratios = (None, 0.1, 1.0)
        ratio_to_costs: dict[float | None, list[float]] = {ratio: [] for ratio in ratios}
        ratio_to_shares: dict[float | None, list[float]] = {ratio: [] for ratio in ratios}
        with blank_collector() as url:
            for number in range(3 * self._num_rounds):
                # The order changes, so that none of the three always follows the same one.
                for ratio in ratios if number % 2 else ratios[::-1]:
                    endpoint = None if ratio is None else url
                    self._router.trace_with(TracingSettings(endpoint, ratio or 0.0, max_requests_per_s=1e6))
                    self._clients.run(first)  # The router connects to the collector.
                    time.sleep(SETTLED_S)
                    before = self._router.use()
                    counts = self._clients.run(load)
                    assert counts.num_errors == 0, f"{counts.num_errors} requests have failed"
                    time.sleep(SETTLED_S)  # Spans are sent a moment after the end of their request.
                    after = self._router.use()
                    cpu_s = after.cpu_s - before.cpu_s
                    ratio_to_costs[ratio].append(cpu_s)
                    ratio_to_shares[ratio].append((after.spans_cpu_s - before.spans_cpu_s) / cpu_s)
        # Other processes make a round dearer, never cheaper, and a mean would count what they do.
        cost_s = {ratio: statistics.quantiles(costs, n=4)[0] for ratio, costs in ratio_to_costs.items()}
        for ratio, name in ((None, "no tracing"), (0.1, "a tenth sampled"), (1.0, "all sampled")):
            rows.append(
                [f"{name}: CPU per request of {num_tokens} tokens", f"{1e3 * cost_s[ratio] / num_requests:.2f}", "ms"]
            )
        # Both times of this share were taken at once, so it is sure on a busy machine too.
        for ratio, name in ((0.1, "a tenth sampled"), (1.0, "all sampled")):
            percent = 100 * statistics.median(ratio_to_shares[ratio])
            rows.append([f"{name}: share of the thread that sends spans", f"{percent:.2f}", "%"])
        # The pace of a shared machine drifts, so each round is compared within itself.
        pairs = zip(ratio_to_costs[None], ratio_to_costs[0.1], strict=True)
        share = statistics.median(without / sampled for without, sampled in pairs)
        bars.append(Bar("tokens/s with a tenth of the requests sampled, over those without tracing", share, 0.98, "x"))

    # ------------------------------------------------------------ measuring

    def _stream_cost(self, num_turns: int, num_steps_at_once: int) -> StreamCost:
        self._router.set_pace(num_turns, num_steps_at_once)
        num_tokens, load = NUM_STREAMS * TOKENS_PER_STREAM, self._stream_load()
        costs = []
        for _ in range(self._num_rounds):
            cpu_s, counts = self._measured(load)
            costs.append(StreamCost(1e6 * cpu_s / num_tokens, counts.num_content_events / num_tokens))
        return StreamCost(*map(statistics.median, zip(*costs, strict=True)))

    def _request_ms(self, bodies: Sequence[bytes], keeps_connection: bool) -> float:
        self._router.set_pace(4)
        load = self._load(bodies)._replace(keeps_connection=keeps_connection)
        return statistics.median(1000 * self._measured(load)[0] / len(bodies) for _ in range(self._num_rounds))

    def _sample(self, part: str, load: HttpLoad) -> None:
        """Runs a load for further rounds, and records where the time goes."""
        self._router.start_sampling()
        for _ in range(self._num_rounds):
            self._measured(load)
        samples = self._router.samples()
        ordered = sorted(samples.items(), key=lambda item: -item[1])
        self.part_to_shares[part] = {folder: round(count / sum(samples.values()), 3) for folder, count in ordered}

    def _stream_load(self) -> HttpLoad:
        return self._load([chat(TOKENS_PER_STREAM, True)] * NUM_STREAMS, num_clients=NUM_STREAMS)

    def _measured(self, load: HttpLoad) -> tuple[float, HttpCounts]:
        """Runs a load. Returns the router's CPU seconds, and what the clients have read."""
        began = self._router.use()
        counts = self._clients.run(load)
        ended = self._router.use()
        assert counts.num_errors == 0, f"{counts.num_errors} requests have failed"
        return ended.cpu_s - began.cpu_s, counts

    def _load(self, bodies: Sequence[bytes], num_clients: int = 1) -> HttpLoad:
        return HttpLoad(self._router.port, bodies, num_clients)


# ------------------------------------------------------------ requests


def chat(num_tokens: int, is_streamed: bool, files: Sequence[bytes] = ()) -> bytes:
    """Returns the body of a chat request for an answer of `num_tokens` tokens, with the JPEG files as data URLs."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    content = [*parts, {"type": "text", "text": QUESTION}] if parts else QUESTION
    body = {
        "model": TINY_MODEL,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": content},
        ],
        "max_tokens": num_tokens,
        "temperature": 0.7,
        "ignore_eos": True,
        "stream": is_streamed,
    }
    return json.dumps(body).encode()


def data_url(file: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(file).decode()}"


def jpeg(seed: int) -> bytes:
    """Returns a picture of 1280 x 720 pixels that compresses as a photograph does, to about 200 KiB."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (45, 80, 3), dtype=np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
    noise = rng.normal(0, 5, (SIZE[1], SIZE[0], 1))
    pixels = np.clip(np.asarray(coarse, np.float32) + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
