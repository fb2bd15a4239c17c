"""Puts load on a server that implements the OpenAI chat API, Weft's or another; it sends all requests of one round at
the same time.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image

from fabric.errors import ConfigError
from loadtest.benches.synthetic import IMAGE_SIDE
from loadtest.benches.worker_load import BenchLoad

Body = dict[str, Any]
TIMEOUT_S = 1800.0


class ChatRound(NamedTuple):
    """Holds the measurements of one round."""

    seconds: float
    tokens: int


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


async def run_chats(url: str, bodies: list[Body]) -> ChatRound:
    """Sends all requests at once. Raises ConfigError when an answer is an error or is shorter than requested."""
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        begun = time.monotonic()
        answers = await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for body in bodies])
        seconds = time.monotonic() - begun
    tokens = 0
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status_code != 200:
            raise ConfigError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
        made = int(answer.json()["usage"]["completion_tokens"])
        if made != body["max_tokens"]:
            raise ConfigError(f"{url} made {made} tokens instead of {body['max_tokens']}, not the same work")
        tokens += made
    return ChatRound(seconds, tokens)
