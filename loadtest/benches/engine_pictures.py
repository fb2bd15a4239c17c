"""Runs `weft bench engine --images N`: requests with a picture each, through router, encoder and worker in one process,
over HTTP. It runs the same requests on `transformers serve` (a LLaVA), or on vLLM's own server (a Qwen2.5-VL of that
size).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from deploy.config import ClusterConfig
from deploy.local import serving
from loadtest.bench_result import Bar, BenchResult, gpu_name
from loadtest.benches.chat_load import BenchLoad, picture_messages, run_chats, weft_body
from loadtest.benches.peer_process import Peer
from loadtest.benches.synthetic import IMAGE_SIDE, IMAGE_TOKENS

ENCODE_TIMEOUT_MS = 120_000
"""A slow machine takes longer to encode so many pictures at once than the default timeout of a cluster permits."""
NAME_TO_BAR = {"transformers-serve": 5.0, "vllm": 1.2, "vllm-float32": 1.2}
"""Holds the target ratio of Weft's rate to the peer's rate. `transformers serve` serves requests with a picture one
after the other; vLLM runs a Qwen2.5-VL."""


async def run_pictures(chosen: argparse.Namespace, model_dir: Path, peers: Sequence[Peer]) -> BenchResult:
    """Runs the rounds on Weft and on each peer, and closes the peers."""
    load = BenchLoad(chosen.images, IMAGE_TOKENS, chosen.output_tokens)
    config = _config(chosen, model_dir, load)
    ours: list[float] = []
    rates: dict[str, list[float]] = {peer.name: [] for peer in peers}
    try:
        async with serving(config) as (_, port):
            url = f"http://127.0.0.1:{port}"
            await _round(url, load._replace(output_tokens=4), 0)
            for peer in peers:
                await asyncio.to_thread(peer.run, load._replace(concurrency=1, output_tokens=4), 0)
            for number in range(1, chosen.rounds + 1):
                ours.append(await _round(url, load, number))
                for peer in peers:
                    rates[peer.name].append(await asyncio.to_thread(peer.run, load, number))
    finally:
        for peer in peers:
            peer.close()
    rate = statistics.median(ours)
    rows = [["server", "output tokens/s", "requests/s"], _row("weft", rate, load)]
    bars = []
    for name, taken in rates.items():
        median = statistics.median(taken)
        rows.append(_row(name, median, load))
        bars.append(Bar(f"weft over {name}", rate / median, NAME_TO_BAR[name], "x"))
    notes = [
        f"{load.concurrency} requests at once, each with a {IMAGE_SIDE}-pixel picture ({IMAGE_TOKENS} tokens) that "
        f"no server has received before, and {load.output_tokens} output tokens, over HTTP; medians."
    ]
    is_beside_vllm = any(name.startswith("vllm") for name in rates)
    names = [gpu_name(chosen.device), "images", "vllm" if is_beside_vllm else ""]
    return BenchResult(rows, bars, notes, variant="-".join(filter(None, names)))


def _config(chosen: argparse.Namespace, model_dir: Path, load: BenchLoad) -> ClusterConfig:
    device = {"device": chosen.device, "gpus_per_replica": int(chosen.device == "cuda")}
    return ClusterConfig.model_validate(
        {
            "model": {"path": model_dir, "dtype": chosen.dtype, "name": "bench"},
            "server": {"host": "127.0.0.1", "port": 0},
            "workers": {"replicas": 1, "num_blocks": 64 * load.concurrency, "max_step_tokens": 1024, **device},
            "encoders": {"replicas": 1, "decode_processes": 0, "modalities": ["image"], **device},
            "media": {"encode_timeout_ms": {"image": ENCODE_TIMEOUT_MS}},
            "threads_per_replica": chosen.threads,
        }
    )


async def _round(url: str, load: BenchLoad, seed: int) -> float:
    """Runs one round and returns the output tokens per second."""
    bodies = [weft_body("bench", messages, load.output_tokens) for messages in picture_messages(load, seed)]
    done = await run_chats(url, bodies)
    return done.tokens / done.seconds


def _row(name: str, tokens_per_s: float, load: BenchLoad) -> list[str]:
    return [name, f"{tokens_per_s:.1f}", f"{tokens_per_s / load.output_tokens:.2f}"]
