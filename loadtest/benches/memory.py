"""`weft bench memory`: does a replica's memory stay flat while every request brings a picture never seen before?

Through a real cluster: resident memory of router, encoder and worker after a warm-up and at the end.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from deploy.config import ClusterConfig, load_config
from loadtest.benches.report import Bar, BenchResult

NUM_REQUESTS = 2000
NUM_WARM_UP = 400
CONCURRENCY = 8
MIB = 2**20


def run(_: Sequence[str] = ()) -> BenchResult:
    import httpx

    from deploy.serving.runtime import run_cluster

    data = load_config(None).model_dump()
    data["server"]["port"] = 0
    # Small caches, so that they are full when the warm-up ends: what grows afterwards is a leak.
    data["encoders"]["arena_bytes"] = data["workers"]["inbox_bytes"] = 4 * MIB
    data["workers"]["num_blocks"] = 256
    with (
        run_cluster(ClusterConfig.model_validate(data)) as cluster,
        httpx.Client(base_url=cluster.url, timeout=120) as client,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):

        def ask(number: int) -> None:
            answer = client.post("/v1/chat/completions", json=_body(cluster.model_name, number))
            answer.raise_for_status()

        members = client.get("/weft/members").json()["members"]
        list(pool.map(ask, range(NUM_WARM_UP)))
        before = {member["member_id"]: _resident_bytes(member["pid"]) for member in members}
        list(pool.map(ask, range(NUM_WARM_UP, NUM_WARM_UP + NUM_REQUESTS)))
        after = {member["member_id"]: _resident_bytes(member["pid"]) for member in members}
    rows = [["member", "after warm-up (MiB)", "at the end (MiB)", "growth (MiB)"]]
    bars = []
    for member in members:
        first, last = before[member["member_id"]] / MIB, after[member["member_id"]] / MIB
        rows.append([f"{member['kind']} {member['member_id']}", f"{first:.1f}", f"{last:.1f}", f"{last - first:+.1f}"])
        bars.append(Bar(f"{member['kind']} {len(bars)}: growth", last - first, 50.0, "MiB", is_max=True))
    notes = [f"{NUM_REQUESTS} requests with as many different pictures, {CONCURRENCY} at once, after {NUM_WARM_UP}."]
    return BenchResult(rows, bars, notes)


def _body(model: str, number: int) -> dict[str, object]:
    pixels = np.random.default_rng(number).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "text", "text": f"Picture {number}:"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": model, "max_tokens": 4, "ignore_eos": True, "messages": [{"role": "user", "content": content}]}


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)
