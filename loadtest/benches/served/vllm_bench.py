"""Runs `weft bench overlap --engine vllm` and `weft bench engine --engine vllm`: what Weft adds to vLLM, and what it
costs.

Both start a cluster on Ray whose worker runs vLLM (`make install-vllm`). The first compares a worker that computes the
text ahead of a picture while the picture is encoded with one that holds the request, as vLLM's own connectors do
(`workers.overlap: false`). The second sends the same chats to the cluster and to vLLM's own server, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deploy.config import ClusterConfig
from deploy.vllm_worker import BINDING, check_environment, worker_python
from loadtest.bench_result import Bar, BenchResult, gpu_name
from loadtest.benches.chat_load import BenchLoad, picture_messages, run_chats, weft_body, word_messages
from loadtest.benches.peer_process import vllm_serve
from loadtest.benches.served.timed_chats import ChatKind, ChatMaker, ChatTarget, TimedChat, send_at, send_each
from loadtest.benches.served.timed_cluster import cluster_config, on_ray
from loadtest.benches.synthetic import IMAGE_SIDE, IMAGE_TOKENS, qwen2_5_vl_180m, qwen2_5_vl_small

# ---------------------------------------------------------------- overlap

ENCODE_S = 1.5
"""Each picture takes this long, far longer than the text ahead of it."""
FRONT = ChatKind("3,500 tokens, then a picture", num_words=3500, num_pictures=1, max_tokens=1)
TEXT = ChatKind("a text of 12 tokens", num_words=12, max_tokens=1)
WAITING = ChatKind("a picture", num_pictures=1, max_tokens=1)
NUM_WAITING = 4
TEXT_MOMENTS_S = [0.5, 0.9]
"""Texts are sent at these moments, counted from the pictures that they stand beside, and texts alone just so: a machine
that has rested for half a second takes longer than one that has answered just now."""
MOST_OF_HELD, MOST_BESIDE = 0.2, 1.1
"""These are the targets: landing to first token over that of a held request, and a text beside waiting requests over
the same text alone."""


class OverlapTimes(NamedTuple):
    """Holds times in seconds, in the order of the runs."""

    landing_to_first_s: list[float]
    alone_s: list[float]
    beside_s: list[float]


def run_vllm_overlap(chosen: argparse.Namespace) -> BenchResult:
    """Starts the two clusters in turn, `chosen.rounds` times, with `chosen.runs` requests of each kind."""
    model_dir = qwen2_5_vl_small()
    found = {is_on: OverlapTimes([], [], []) for is_on in (True, False)}
    for number in range(chosen.rounds):
        for is_on in (True, False):
            config = _overlap_config(model_dir, is_on=is_on)
            maker = ChatMaker(config.model.name or model_dir.name, model_dir, seed=2 * number + is_on + 1)
            for kept, fresh in zip(
                found[is_on], on_ray(config, partial(_overlap_times, maker, chosen.runs)), strict=True
            ):
                kept.extend(fresh)
    on, held = (OverlapTimes(*found[is_on]) for is_on in (True, False))
    rows = [["worker", "landing to first token (ms)", "text alone (ms)", f"beside {NUM_WAITING} waiting (ms)"]]
    for name, times in (("text ahead is computed", on), ("request is held", held)):
        rows.append([name, *(f"{1000 * statistics.median(each):.1f}" for each in times)])
    over_held = statistics.median(on.landing_to_first_s) / statistics.median(held.landing_to_first_s)
    beside = statistics.median(on.beside_s) / statistics.median(on.alone_s)
    bars = [
        Bar("landing to first token, over a held request", over_held, MOST_OF_HELD, "x", is_max=True),
        Bar("text beside waiting requests, over alone", beside, MOST_BESIDE, "x", is_max=True),
    ]
    notes = [f"{FRONT.name}: {len(on.landing_to_first_s)} runs; encoding takes {ENCODE_S} s; medians."]
    return BenchResult(rows, bars, notes, variant="vllm")


def _overlap_config(model_dir: Path, *, is_on: bool) -> ClusterConfig:
    vllm = {"enforce_eager": True, "max_model_len": 4096}
    workers = {"engine": "vllm", "overlap": is_on, "block_size": 32, "num_blocks": 1024, "max_step_tokens": 4096}
    config = cluster_config(
        model_dir,
        None,
        encoders={"encode_delay_s": ENCODE_S},
        workers={**workers, "vllm": vllm},
        model={"dtype": "float32"},
    )
    check_environment(config)
    return config


async def _overlap_times(maker: ChatMaker, num_runs: int, target: ChatTarget) -> OverlapTimes:
    await send_each(target, maker, [FRONT, TEXT])
    fronts = await send_each(target, maker, [FRONT] * num_runs)
    alone: list[TimedChat] = []
    beside: list[TimedChat] = []
    for _ in range(num_runs):
        for waiting, chats in (([], alone), ([WAITING] * NUM_WAITING, beside)):
            sent = await send_at(target, maker, [*waiting, TEXT, TEXT], [0.0] * len(waiting) + TEXT_MOMENTS_S)
            chats += [chat for chat in sent if chat.kind == TEXT]
    return OverlapTimes(
        [chat.first_s("first_token", str(chat.plan["worker_id"])) - chat.first_s("unit_landed") for chat in fronts],
        [chat.ttft_s for chat in alone],
        [chat.ttft_s for chat in beside],
    )


# ---------------------------------------------------------------- tokens per second

LEAST_TEXT, LEAST_PICTURES = 0.97, 1.0
"""These are the targets: Weft's tokens per second over those of vLLM's own server."""
REST_S = 1.5
"""Each side begins this long after the other's end, because a rank of vLLM spins for a second after its last step."""


def run_vllm_engine(chosen: argparse.Namespace) -> BenchResult:
    """Sends texts, and with `chosen.images` also requests with a picture each, to the cluster and to vLLM's server."""
    model_dir = chosen.model or qwen2_5_vl_180m()
    dtype = "bfloat16" if chosen.dtype == "auto" else chosen.dtype
    text = BenchLoad(chosen.concurrency, chosen.prompt_tokens, chosen.output_tokens)
    loads = {"text": text}
    if chosen.images:
        loads["pictures"] = BenchLoad(chosen.images, IMAGE_TOKENS, chosen.output_tokens)
    config = _engine_config(chosen, model_dir, dtype)
    # Both ranks compute on the same cores, the one on which the peer's is bound.
    os.environ.setdefault(BINDING, f"0-{chosen.threads - 1}")
    peer = vllm_serve("vllm serve", str(worker_python(config)), model_dir, dtype, chosen.threads)
    try:
        ours, theirs = on_ray(config, partial(_rates, chosen.rounds, loads, model_dir, peer.url))
    finally:
        peer.close()
    rows, bars = [["load", "weft with vllm: tokens/s", "vllm serve: tokens/s", "adapter: us per token"]], []
    for name, target in (("text", LEAST_TEXT), ("pictures", LEAST_PICTURES)):
        if name in loads:
            mine, other = statistics.median(ours[name]), statistics.median(theirs[name])
            rows.append([name, f"{mine:.1f}", f"{other:.1f}", f"{1e6 * (1 / mine - 1 / other):.0f}"])
            bars.append(Bar(f"{name}: weft over vllm serve", mine / other, target, "x"))
    notes = [
        f"{text.concurrency} chats of {text.prompt_tokens} + {text.output_tokens} tokens at once; {chosen.images} "
        f"chats with a new picture of {IMAGE_SIDE} pixels each; over HTTP, {chosen.rounds} rounds in turn, medians. "
        f"Each rank computes with {chosen.threads} threads, and the encoder has a process of its own.",
        "The adapter's cost is the difference of the times per token, so it contains the router as well.",
    ]
    return BenchResult(rows, bars, notes, variant="-".join(filter(None, [gpu_name(chosen.device), "vllm-worker"])))


def _engine_config(chosen: argparse.Namespace, model_dir: Path, dtype: str) -> ClusterConfig:
    device = {"device": chosen.device, "gpus_per_replica": int(chosen.device == "cuda")}
    # Blocks, steps and sequences are those of vLLM's own server by default, which compiles its graphs for them.
    workers = {"engine": "vllm", "block_size": 128, "num_blocks": 512, "max_step_tokens": 2048, "max_sequences": 128}
    vllm = {"max_model_len": 1024}
    config = ClusterConfig.model_validate(
        {
            "model": {"path": model_dir, "dtype": dtype, "name": "bench"},
            "server": {"host": "127.0.0.1", "port": 0},
            "workers": {"replicas": 1, **workers, **device, "vllm": vllm},
            "encoders": {"replicas": 1, "decode_processes": 1, "modalities": ["image"], **device},
            "media": {"encode_timeout_ms": {"image": 120_000}},
            "threads_per_replica": chosen.threads,
        }
    )
    check_environment(config)
    return config


async def _rates(
    num_rounds: int, loads: dict[str, BenchLoad], model_dir: Path, peer_url: str, target: ChatTarget
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns the tokens per second of each round, by load: those of the cluster, and those of the peer."""
    urls = (str(target.client.base_url), peer_url)
    rates: tuple[dict[str, list[float]], ...] = tuple({name: [] for name in loads} for _ in urls)
    for number in range(num_rounds + 1):
        for name, load in loads.items():
            messages = picture_messages(load, number) if name == "pictures" else word_messages(load, number, model_dir)
            bodies = [weft_body("bench", each, load.output_tokens) for each in messages]
            for place in (0, 1) if number % 2 else (1, 0):
                await asyncio.sleep(REST_S)
                done = await run_chats(urls[place], bodies)
                if number:  # The first round is a warm-up.
                    rates[place][name].append(done.tokens / done.seconds)
    return rates[0], rates[1]
