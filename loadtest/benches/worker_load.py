"""Puts load on one worker service without router, Ray or HTTP, to measure the engine alone."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deploy import compose
from deploy.config import ClusterConfig
from fabric.channel_local import LocalChannelHub, LocalFeatureSink
from fabric.ids import MemberId, RequestId
from fabric.messages import GenerateRequest, GenerateResult, RouterHeartbeat, SamplingParams, StopConditions
from fabric.plane_local import LocalHub, LocalPlane

if TYPE_CHECKING:
    from llm_workers.service import WorkerService


ROUTER, ROUTER_ADDRESS = MemberId("bench-router"), "local://bench-router"
LEASE_S = 24 * 3600.0
"""The lease of the simulated router is longer than any bench, because no heartbeat renews it, and a worker ends the
requests of a router when its lease ends."""


class BenchLoad(NamedTuple):
    """A `BenchLoad` is `concurrency` requests at once, each with `prompt_tokens` tokens in and `output_tokens` tokens
    out."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int


class Measured(NamedTuple):
    """Holds the measurements of one round."""

    steps_per_s: float
    tokens_per_s: float
    ttft_s: float
    tpot_s: float


@contextlib.asynccontextmanager
async def worker_of(config: ClusterConfig) -> AsyncIterator[WorkerService]:
    """Starts one worker of the configured model, without any other member, and stops it at the end."""
    compose.prepare_process(config)
    config, model = compose.open_model(config)
    hub = LocalHub()
    plane, router = LocalPlane(hub, "local://bench"), LocalPlane(hub, ROUTER_ADDRESS)
    sink = LocalFeatureSink(LocalChannelHub(), "bench", 2**20)
    worker = compose.build_worker(config, model, MemberId("bench"), plane, sink)
    await worker.start()
    router.start(lambda _: None)
    router.send("local://bench", RouterHeartbeat(ROUTER, ROUTER_ADDRESS, LEASE_S))
    try:
        yield worker
    finally:
        await worker.stop()
        plane.close()
        router.close()
        sink.close()


def prompts_of(load: BenchLoad, vocab_size: int, seed: int) -> np.ndarray:
    """Returns random token ids `(concurrency, prompt_tokens)`; no part of them is in a prefix cache."""
    return np.random.default_rng(seed).integers(1, vocab_size, (load.concurrency, load.prompt_tokens))


async def run_load(worker: WorkerService, load: BenchLoad, vocab_size: int, seed: int) -> Measured:
    """Runs one round with fresh random prompts, so that nothing is found in the prefix cache."""
    prompts = prompts_of(load, vocab_size, seed)
    steps, begun = worker.report().steps, time.monotonic()
    results = await asyncio.gather(
        *[_generate(worker, f"{seed}-{row}", prompts[row], load) for row in range(len(prompts))]
    )
    seconds = time.monotonic() - begun
    return Measured(
        steps_per_s=(worker.report().steps - steps) / seconds,
        tokens_per_s=load.concurrency * load.output_tokens / seconds,
        ttft_s=statistics.median(result.first_token_s for result in results),
        tpot_s=statistics.median(
            (seconds - result.first_token_s) / max(load.output_tokens - 1, 1) for result in results
        ),
    )


async def _generate(worker: WorkerService, name: str, prompt: np.ndarray, load: BenchLoad) -> GenerateResult:
    request = GenerateRequest(
        request_id=RequestId(name),
        attempt=0,
        router_id=ROUTER,
        router_address=ROUTER_ADDRESS,
        token_ids=tuple(int(token) for token in prompt),
        placeholders=(),
        media=(),
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=load.output_tokens, ignore_eos=True),
        age=(time.time(), name),
    )
    result = await worker.generate(request)
    assert result.error is None, result.error
    assert result.choices[0].num_tokens == load.output_tokens
    return result
