"""Runs `weft bench path`: measures where the time of a request goes, on this machine, with the demo model.

The bench has three parts: the engine alone (steps and tokens per second by concurrency), one feature over NIXL between
two processes, and requests through a real cluster. The trace's events divide the time of a request into router, Ray and
engine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from deploy.config import ClusterConfig
from deploy.config_file import load_config
from fabric.contracts import FeatureTicket
from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.chat_load import BenchLoad, Measured, run_load, worker_of

CONCURRENCIES = (1, 8, 32)
ROUNDS = 3
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
VOCAB = 1500
FEATURE_BYTES = 8 * 2**20


def run() -> BenchResult:
    rows = [["part", "what", "value", "unit"]]
    engine = asyncio.run(_engine())
    for concurrency, measured in engine.items():
        rows.append([f"engine, {concurrency} at once", "steps", f"{measured.steps_per_s:.0f}", "1/s"])
        rows.append([f"engine, {concurrency} at once", "output tokens", f"{measured.tokens_per_s:.0f}", "1/s"])
    nixl_ms = _nixl()
    rows.append(["NIXL, two processes", "8 MiB, READ", f"{nixl_ms:.2f}", "ms"])
    path = _cluster_path()
    for name, value in path.items():
        rows.append(["request, 1 at once", name, f"{value:.2f}", "ms"])
    bars = [
        Bar("engine: tokens/s at 32 over 1", engine[32].tokens_per_s / engine[1].tokens_per_s, 8.0, "x"),
        Bar("NIXL READ of 8 MiB", nixl_ms, 2.0, "ms", is_max=True),
        Bar("router per request", path["router"], 5.0, "ms", is_max=True),
        Bar("Ray per request", path["Ray"], 5.0, "ms", is_max=True),
    ]
    notes = [
        f"{PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, demo model, float32; medians of {ROUNDS} rounds.",
        "router: receipt to dispatch; Ray: dispatch to receipt at the worker; engine: from there to the last token.",
        "NIXL's bar: 1.06 ms was seen on an idle machine of this class.",
    ]
    return BenchResult(rows, bars, notes)


async def _engine() -> dict[int, Measured]:
    """Returns, for each concurrency, the medians over the rounds of one worker service without router, Ray or HTTP."""
    loads = [BenchLoad(concurrency, PROMPT_TOKENS, OUTPUT_TOKENS) for concurrency in CONCURRENCIES]
    taken: dict[int, list[Measured]] = {load.concurrency: [] for load in loads}
    async with worker_of(load_config(None)) as worker:
        await run_load(worker, BenchLoad(1, PROMPT_TOKENS, OUTPUT_TOKENS), VOCAB, seed=0)
        for round_number in range(1, ROUNDS + 1):
            for load in loads:
                taken[load.concurrency].append(
                    await run_load(worker, load, VOCAB, seed=100 * round_number + load.concurrency)
                )
    return {
        concurrency: Measured(*map(statistics.median, zip(*rounds, strict=True)))
        for concurrency, rounds in taken.items()
    }


def _nixl(num_pulls: int = 30) -> float:
    """Returns the median milliseconds of one pull between two processes, generation check included."""
    from fabric.transport import NixlFeatureSink

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    source = context.Process(target=_publish, args=(there,), daemon=True)
    source.start()
    try:
        ticket: FeatureTicket = here.recv()
        sink = NixlFeatureSink("bench-sink", 2 * FEATURE_BYTES)
        seconds = []
        for _ in range(num_pulls):
            landed = sink.pull(ticket, timeout_s=30).result(timeout=60)
            seconds.append(landed.seconds)
            sink.free(landed.slot_id)
        sink.close()
    finally:
        here.send(None)
        source.join(timeout=10)
        source.kill()
    return statistics.median(seconds) * 1000


def _publish(pipe: Connection) -> None:
    from fabric.transport import NixlFeatureSource

    source = NixlFeatureSource("bench-source", 2 * FEATURE_BYTES)
    slot = source.allocate(FEATURE_BYTES)
    slot.buffer[:] = 7
    pipe.send(source.ticket(slot, (1, FEATURE_BYTES // 4096, 1024), "float32", 600.0))
    pipe.recv()
    source.close()


def _cluster_path(num_requests: int = 40) -> dict[str, float]:
    """Returns the median milliseconds per stage of short text requests, one at a time, through Ray Serve and HTTP."""
    import httpx

    from deploy.ray.runtime import run_cluster

    data = load_config(None).model_dump()
    data["server"]["port"] = 0
    data["workers"]["replicas"] = 1
    taken: list[dict[str, float]] = []
    with (
        run_cluster(ClusterConfig.model_validate(data)) as cluster,
        httpx.Client(base_url=cluster.url, timeout=60) as client,
    ):
        for index in range(num_requests + 5):
            body = {
                "model": cluster.model_name,
                "messages": [{"role": "user", "content": f"Number {index}"}],
                "max_tokens": 8,
                "ignore_eos": True,
            }
            begun = time.monotonic()
            answer = client.post("/v1/chat/completions", json=body)
            total = time.monotonic() - begun
            answer.raise_for_status()
            trace = client.get(f"/weft/requests/{answer.json()['id']}").json()
            if index >= 5:
                taken.append(_split(trace, total))
    return {name: statistics.median(sample[name] for sample in taken) for name in taken[0]}


def _split(trace: dict[str, Any], total_s: float) -> dict[str, float]:
    worker = trace["plans"][-1]["plan"]["worker_id"]
    first: dict[tuple[bool, str], float] = {}
    for event in trace["events"]:
        first.setdefault((event["member_id"] == worker, event["name"]), event["at_s"])
    router = first[False, "dispatched"] - first[False, "received"]
    ray = first[True, "received"] - first[False, "dispatched"]
    engine = first[True, "finished"] - first[True, "received"]
    rest = total_s - router - ray - engine
    return {
        name: value * 1000
        for name, value in {
            "router": router,
            "Ray": ray,
            "engine": engine,
            "HTTP and return": rest,
            "total": total_s,
        }.items()
    }
