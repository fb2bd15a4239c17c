"""Sends chats with fresh texts, pictures and videos to a cluster, and says how long each took.

A `ChatKind` says what a request consists of, and a `ChatMaker` makes requests of it that no cache has seen. `send_each`
sends one after the other, `send_from` keeps a number of them open, and `send_at` sends each at its own moment. Each
returns `TimedChat`s: the moment of sending and the trace that the router keeps of the request (`GET
/weft/requests/{id}`). Both are on the clock of the machine, so the time to first token needs no streaming.

The module knows nothing of configurations, of stage times or of targets.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image

from fabric.contracts import ConfigError
from loadtest.benches.synthetic import another, film
from modalities.text import TextCodec

Body = dict[str, Any]


class ChatTarget(NamedTuple):
    """A `ChatTarget` is a running cluster, as a client sees it."""

    client: httpx.AsyncClient
    model: str

    async def metrics(self) -> dict[str, float]:
        """Returns the values of all metrics by name, each summed over its labels except `stage`."""
        found: dict[str, float] = {}
        for line in (await self.client.get("/metrics")).text.splitlines():
            if line and not line.startswith("#"):
                sample, value = line.rsplit(" ", 1)
                name, _, labels = sample.partition("{")
                stage = [label for label in labels.rstrip("}").split(",") if label.startswith("stage=")]
                name = f"{name} {stage[0][7:-1]}" if stage else name
                found[name] = found.get(name, 0.0) + float(value)
        return found


class ChatKind(NamedTuple):
    """A `ChatKind` is what a request consists of: text, then pictures, then perhaps a video, then a short question."""

    name: str
    num_words: int = 0
    num_pictures: int = 0
    picture_side: int = 224
    num_frames: int = 0
    """Counts the frames of the video that the model sees; 0 means that there is no video."""
    max_tokens: int = 2

    @property
    def has_media(self) -> bool:
        return bool(self.num_pictures or self.num_frames)


class TimedChat:
    """A `TimedChat` is a chat that was answered. Its times are seconds."""

    def __init__(self, kind: ChatKind, sent_s: float, answer: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
        self.kind = kind
        self.sent_s = sent_s
        self.answer = answer
        self.trace = trace

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """Returns the plan of the last attempt."""
        plan: Mapping[str, Any] = self.trace["plans"][-1]["plan"]
        return plan

    def first_s(self, name: str, member_id: str | None = None) -> float:
        """Returns the moment of the first event with this name, of any member or of one."""
        return min(self._moments(name, member_id))

    def last_s(self, name: str, member_id: str | None = None) -> float:
        return max(self._moments(name, member_id))

    def _moments(self, name: str, member_id: str | None) -> list[float]:
        events = [each for each in self.trace["events"] if each["name"] == name]
        moments = [float(each["at_s"]) for each in events if member_id in (None, each["member_id"])]
        assert moments, f"the trace of {self.kind.name} has no event {name}"
        return moments

    @property
    def ttft_s(self) -> float:
        """Returns the time from sending the request to the moment when the router has its first token."""
        return self.last_s("first_token") - self.sent_s

    @property
    def dispatched_ttft_s(self) -> float:
        """Returns the time from the dispatch to the moment when the router has the first token, which the planner
        predicts."""
        return self.last_s("first_token") - self.first_s("dispatched")

    @property
    def tpot_s(self) -> float:
        """Returns the mean time of a token after the first one, at the worker."""
        worker_id = str(self.plan["worker_id"])
        num_tokens = int(self.answer["usage"]["completion_tokens"]) - 1
        return (self.last_s("finished", worker_id) - self.last_s("first_token", worker_id)) / max(num_tokens, 1)

    @property
    def num_tokens(self) -> int:
        return int(self.trace["num_prompt_tokens"])

    def landings_s(self) -> list[float]:
        """Returns when each unit has landed, in seconds after sending, in order of time."""
        events = (each for each in self.trace["events"] if each["name"] == "unit_landed")
        return sorted(each["at_s"] - self.sent_s for each in events)

    def encoded_s(self) -> list[float]:
        """Returns when each unit was encoded, in seconds after sending, in order of time."""
        events = (each for each in self.trace["events"] if each["name"] == "unit_encoded")
        return sorted(each["at_s"] - self.sent_s for each in events)


# ------------------------------------------------------------ making requests

QUESTION = " What is shown?"
FILM_FPS = 30
FILM_FRAMES = 120


def words_of_one_token(model_dir: Path) -> list[str]:
    """Returns the words that are one token of the model, each with the space ahead of it."""
    codec = TextCodec.load(model_dir)
    texts = (codec.decode([token]) for token in range(codec.vocab_size))
    return [text for text in texts if text.startswith(" ") and text[1:].isalpha() and text.isascii()]


class ChatMaker:
    """A `ChatMaker` makes the bodies of requests. Their texts begin with different words, and their media differ, so no
    cache helps."""

    def __init__(self, model: str, model_dir: Path, seed: int = 0) -> None:
        self._words = words_of_one_token(model_dir)
        self._model = model
        self._rng = np.random.default_rng(seed)
        self._numbers = count(1000 * seed)
        self._film = film()

    def body(self, kind: ChatKind) -> Body:
        """Makes another request of this kind."""
        words = self._rng.integers(0, len(self._words), kind.num_words)
        text = "".join(self._words[word] for word in words)
        parts: list[Body] = [{"type": "text", "text": text}] if text else []
        parts += [self._picture(kind.picture_side) for _ in range(kind.num_pictures)]
        if kind.num_frames:
            url = _data_url(another(self._film, next(self._numbers)), "video/mp4")
            parts.append({"type": "video_url", "video_url": {"url": url}})
        parts.append({"type": "text", "text": QUESTION})
        body: Body = {
            "model": self._model,
            "messages": [{"role": "user", "content": parts}],
            "temperature": 0,
            "max_tokens": kind.max_tokens,
            "ignore_eos": True,
        }
        if kind.num_frames:
            fps = kind.num_frames * FILM_FPS / FILM_FRAMES
            body["mm_processor_kwargs"] = {"fps": fps, "use_audio_in_video": False}
        return body

    def _picture(self, side: int) -> Body:
        """Makes a picture of large squares, which is a small file."""
        pixels = self._rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST).save(buffer, "PNG")
        return {"type": "image_url", "image_url": {"url": _data_url(buffer.getvalue(), "image/png")}}


def _data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# ------------------------------------------------------------ sending requests


async def send_each(target: ChatTarget, maker: ChatMaker, kinds: Sequence[ChatKind]) -> list[TimedChat]:
    """Sends a request of each kind, one after the other."""
    return await send_from(target, maker, kinds, concurrency=1)


async def send_from(
    target: ChatTarget, maker: ChatMaker, kinds: Sequence[ChatKind], concurrency: int
) -> list[TimedChat]:
    """Sends a request of each kind and keeps `concurrency` of them open. Returns them in the order of `kinds`."""
    made = [(kind, maker.body(kind)) for kind in kinds]
    left = iter(range(len(made)))
    answers: dict[int, tuple[float, Body]] = {}

    async def ask_on() -> None:
        for index in left:
            answers[index] = await _ask(target, made[index][1])

    await asyncio.gather(*(ask_on() for _ in range(concurrency)))
    return await _with_traces(target, [(kinds[index], *answers[index]) for index in range(len(kinds))])


async def send_at(
    target: ChatTarget, maker: ChatMaker, kinds: Sequence[ChatKind], moments_s: Sequence[float]
) -> list[TimedChat]:
    """Sends a request of each kind at its moment, in seconds from now, whatever has been answered by then."""
    made = [maker.body(kind) for kind in kinds]
    begun_s = time.monotonic()

    async def ask_later(index: int) -> tuple[ChatKind, float, Body]:
        await asyncio.sleep(begun_s + moments_s[index] - time.monotonic())
        return kinds[index], *await _ask(target, made[index])

    return await _with_traces(target, await asyncio.gather(*(ask_later(index) for index in range(len(kinds)))))


def poisson_moments_s(num: int, per_s: float, seed: int) -> list[float]:
    """Returns the moments of `num` arrivals at random, `per_s` of them each second in the mean."""
    gaps_s = np.random.default_rng(seed).exponential(1.0 / per_s, num)
    moments: list[float] = np.cumsum(gaps_s).tolist()
    return moments


async def _ask(target: ChatTarget, body: Body) -> tuple[float, Body]:
    sent_s = time.monotonic()
    answer = await target.client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise ConfigError(f"the cluster answered with status {answer.status_code}: {answer.text[:300]}")
    content: Body = answer.json()
    return sent_s, content


async def _with_traces(target: ChatTarget, asked: Sequence[tuple[ChatKind, float, Body]]) -> list[TimedChat]:
    """Reads the traces once all are answered, so that reading delays no request."""
    chats = []
    for kind, sent_s, answer in asked:
        trace = await target.client.get(f"/weft/requests/{answer['id']}")
        trace.raise_for_status()
        chats.append(TimedChat(kind, sent_s, answer, trace.json()))
    return chats


# ------------------------------------------------------------ how busy the machine is

SLEEP_S = 0.02


@contextlib.asynccontextmanager
async def oversleeping(found_s: list[float]) -> AsyncIterator[None]:
    """Adds to `found_s`, during the block, by how many seconds sleeps of this process end too late. On a machine with
    other work, this is what its members wait for a processor too."""

    async def sleep_on() -> None:
        while True:
            begun_s = time.monotonic()
            await asyncio.sleep(SLEEP_S)
            found_s.append(time.monotonic() - begun_s - SLEEP_S)

    sleeper = asyncio.create_task(sleep_on())
    try:
        yield
    finally:
        sleeper.cancel()
        await asyncio.gather(sleeper, return_exceptions=True)
