"""Runs `weft bench memory`: measures whether memory stays flat while every request brings a picture that was never sent
before.

The requests go through a whole cluster in this process (2,000 requests take a few minutes on two cores), or with
`--replicas` through Ray, with a process per member. Resident memory is read repeatedly. The bench compares the median
after the warm-up with the median at the end, and also shows the highest value in between.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import numpy as np
from PIL import Image

from deploy.config import ClusterConfig
from deploy.config_file import load_config
from loadtest.bench_result import Bar, BenchResult

NUM_REQUESTS = 2000
NUM_WARM_UP = 400
CONCURRENCY = 8
SAMPLE_EVERY = 50
NUM_SAMPLES = 5
"""The bench takes the medians of this many samples, at the beginning and at the end; a short run uses fewer."""
MOST_GROWTH_MIB = 50.0
MIB = 2**20


@dataclass
class Samples:
    """Holds the resident bytes of each process, read after every `SAMPLE_EVERY` requests."""

    name_to_pid: dict[str, int]
    name_to_bytes: dict[str, list[int]] = field(default_factory=dict)

    def take(self) -> None:
        for name, pid in self.name_to_pid.items():
            self.name_to_bytes.setdefault(name, []).append(_resident_bytes(pid))


def run(options: Sequence[str] = ()) -> BenchResult:
    parser = argparse.ArgumentParser(prog="weft bench memory", allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="sends this many requests after the warm-up")
    parser.add_argument("--warm-up", type=int, default=NUM_WARM_UP)
    parser.add_argument("--replicas", action="store_true", help="runs each member in a process of its own, with Ray")
    asked = parser.parse_args(options)
    samples = (_by_ray if asked.replicas else _in_process)(_config(), asked.warm_up, asked.requests)
    rows = [["process", "after warm-up (MiB)", "at the end (MiB)", "highest (MiB)", "growth (MiB)"]]
    bars: list[Bar] = []
    for name, taken in samples.name_to_bytes.items():
        count = max(1, min(NUM_SAMPLES, len(taken) // 3))
        first, last = median(taken[:count]) / MIB, median(taken[-count:]) / MIB
        rows.append([name, f"{first:.1f}", f"{last:.1f}", f"{max(taken) / MIB:.1f}", f"{last - first:+.1f}"])
        bars.append(Bar(f"{name.split()[0]} {len(bars)}: growth", last - first, MOST_GROWTH_MIB, "MiB", is_max=True))
    note = f"{asked.requests} requests with as many different pictures, {CONCURRENCY} at once, after {asked.warm_up}."
    return BenchResult(rows, bars, [note], "replicas" if asked.replicas else "")


def _config() -> ClusterConfig:
    """Makes a config with small caches, so that they are full when the warm-up ends; later growth is then a leak. It
    serves pictures only, because the largest video would not fit into these caches."""
    data = load_config(None).model_dump()
    data["server"]["port"] = 0
    data["encoders"]["arena_bytes"] = data["workers"]["inbox_bytes"] = data["workers"]["kept_bytes"] = 4 * MIB
    data["encoders"]["decode_processes"] = 1
    data["workers"]["num_blocks"] = 256
    data["workers"]["replicas"] = 1
    data["encoders"]["modalities"] = ["image"]
    return ClusterConfig.model_validate(data)


# ---------------------------------------------------------------- the two clusters


def _in_process(config: ClusterConfig, num_warm_up: int, num_requests: int) -> Samples:
    """Runs router, encoder, worker and client in this process, so that the measurement covers the memory of all of
    them."""
    return asyncio.run(_serve_here(config, num_warm_up, num_requests))


async def _serve_here(config: ClusterConfig, num_warm_up: int, num_requests: int) -> Samples:
    from deploy.local import running

    samples = Samples({"whole cluster": os.getpid()})
    async with (
        running(config) as cluster,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(cluster.app), base_url="http://localhost", timeout=120
        ) as client,
    ):
        numbers = iter(range(num_warm_up + num_requests))

        async def ask_on() -> None:
            for number in numbers:
                answer = await client.post("/v1/chat/completions", json=_body(cluster.model.name, number))
                answer.raise_for_status()
                if number >= num_warm_up and number % SAMPLE_EVERY == 0:
                    samples.take()

        await asyncio.gather(*(ask_on() for _ in range(CONCURRENCY)))
    return samples


def _by_ray(config: ClusterConfig, num_warm_up: int, num_requests: int) -> Samples:
    from deploy.ray.runtime import run_cluster

    with (
        run_cluster(config) as cluster,
        httpx.Client(base_url=cluster.url, timeout=120) as client,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):

        def ask(number: int) -> None:
            client.post("/v1/chat/completions", json=_body(cluster.model_name, number)).raise_for_status()

        members = client.get("/weft/members").json()["members"]
        samples = Samples({f"{each['kind']} {each['member_id']}": each["pid"] for each in members})
        _in_parts(lambda numbers: list(pool.map(ask, numbers)), samples, num_warm_up, num_requests)
    return samples


def _in_parts(ask_all: Callable[[range], object], samples: Samples, num_warm_up: int, num_requests: int) -> None:
    ask_all(range(num_warm_up))
    samples.take()
    for first in range(num_warm_up, num_warm_up + num_requests, SAMPLE_EVERY):
        ask_all(range(first, min(first + SAMPLE_EVERY, num_warm_up + num_requests)))
        samples.take()


# ---------------------------------------------------------------- requests and processes


def _body(model: str, number: int) -> dict[str, object]:
    """Makes a request with a picture of noise; there are few sizes, so that each occurs often."""
    rng = np.random.default_rng(number)
    width, height = (int(side) for side in rng.choice((64, 96, 128), 2))
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "text", "text": f"Picture {number}:"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": model, "max_tokens": 4, "ignore_eos": True, "messages": [{"role": "user", "content": content}]}


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)
