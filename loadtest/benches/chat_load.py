"""Puts load on one worker, or on a server that implements the OpenAI chat API, Weft's or another.

A `BenchLoad` describes one round, whose requests are all sent at the same time. `run_load` calls a worker service
without router, Ray or HTTP, to measure the engine alone. `run_chats` sends chats over HTTP, so the same requests
measure different servers. Prompts and pictures are random, so no cache holds them.

The module knows nothing of which server it measures, except that the bodies of requests differ (`weft_body`,
`transformers_body`), and nothing of targets.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import json
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import numpy as np
from PIL import Image

from deploy import compose
from deploy.config import ClusterConfig
from fabric.contracts import (
    ConfigError,
    GenerateRequest,
    GenerateResult,
    MemberId,
    RequestId,
    RouterHeartbeat,
    SamplingParams,
    StopConditions,
)
from fabric.transport import LocalChannelHub, LocalFeatureSink, LocalHub, LocalPlane
from loadtest.benches.synthetic import IMAGE_SIDE

if TYPE_CHECKING:
    from llm_workers.worker_service import WorkerService


class BenchLoad(NamedTuple):
    """A `BenchLoad` is `concurrency` requests at once, each with `prompt_tokens` tokens in and `output_tokens` tokens
    out."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int


# ------------------------------------------------------------ load on a server

Body = dict[str, Any]
TIMEOUT_S = 1800.0


class ChatRound(NamedTuple):
    """Holds the measurements of one round on a server."""

    seconds: float
    tokens: int


async def run_chats(url: str, bodies: list[Body]) -> ChatRound:
    """Sends all requests at once. Raises ConfigError when an answer is an error or is shorter than requested."""
    limits = httpx.Limits(max_connections=len(bodies))
    gc.collect()  # With torch and Ray in this process it takes 0.2 s, and would fall into the time of some rounds.
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        begun = time.monotonic()
        answers = await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for body in bodies])
        seconds = time.monotonic() - begun
    tokens = 0
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status_code != 200:
            raise ConfigError(f"{url} answered with status {answer.status_code}: {answer.text[:300]}")
        made = int(answer.json()["usage"]["completion_tokens"])
        if made != body["max_tokens"]:
            raise ConfigError(
                f"{url} made {made} tokens instead of {body['max_tokens']}, so its time can't be compared"
            )
        tokens += made
    return ChatRound(seconds, tokens)


def picture_messages(load: BenchLoad, seed: int) -> list[list[Body]]:
    """Makes, for each request, a picture of noise that no server has received before, and a short question."""
    rng = np.random.default_rng(seed)
    conversations = []
    for _ in range(load.concurrency):
        file = io.BytesIO()
        pixels = rng.integers(0, 256, (IMAGE_SIDE // 8, IMAGE_SIDE // 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((IMAGE_SIDE, IMAGE_SIDE)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        conversations.append([{"role": "user", "content": parts}])
    return conversations


def word_messages(load: BenchLoad, seed: int, model_dir: Path) -> list[list[Body]]:
    """Makes, for each request, as many random words as the prompt should have tokens; each word is one token of the
    model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    words = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    words = [word for word in words if word.startswith(" ") and word[1:].isalpha() and word.isascii()]
    drawn = np.random.default_rng(seed).integers(0, len(words), (load.concurrency, load.prompt_tokens))
    return [[{"role": "user", "content": "".join(words[place] for place in row)}] for row in drawn]


def weft_body(model: str, messages: list[Body], output_tokens: int) -> Body:
    length = {"max_tokens": output_tokens, "min_tokens": output_tokens, "ignore_eos": True}
    return {"model": model, "messages": messages, "temperature": 0, **length}


def transformers_body(model: str, messages: list[Body], output_tokens: int) -> Body:
    options = {"min_new_tokens": output_tokens, "do_sample": False}
    return {
        "model": model,
        "messages": messages,
        "max_tokens": output_tokens,
        "stream": False,
        "generation_config": json.dumps(options),
    }


# ------------------------------------------------------------ load on a worker

ROUTER, ROUTER_ADDRESS = MemberId("bench-router"), "local://bench-router"
LEASE_S = 24 * 3600.0
"""The lease of the simulated router is longer than any bench, because no heartbeat renews it, and a worker ends the
requests of a router when its lease ends."""


class Measured(NamedTuple):
    """Holds the measurements of one round on a worker."""

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


async def run_load(worker: WorkerService, load: BenchLoad, vocab_size: int, seed: int) -> Measured:
    """Runs one round with fresh random prompts, so that nothing is found in the prefix cache."""
    prompts = prompts_of(load, vocab_size, seed)
    steps, begun = worker.report().engine.steps, time.monotonic()
    results = await asyncio.gather(
        *[_generate(worker, f"{seed}-{row}", prompts[row], load) for row in range(len(prompts))]
    )
    seconds = time.monotonic() - begun
    return Measured(
        steps_per_s=(worker.report().engine.steps - steps) / seconds,
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


def prompts_of(load: BenchLoad, vocab_size: int, seed: int) -> np.ndarray:
    """Returns random token ids `(concurrency, prompt_tokens)`; no part of them is in a prefix cache."""
    return np.random.default_rng(seed).integers(1, vocab_size, (load.concurrency, load.prompt_tokens))
