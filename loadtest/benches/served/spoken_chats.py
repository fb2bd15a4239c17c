"""Asks for spoken answers over HTTP, and says when their text and their sound came.

`ask_spoken` sends one chat and keeps the bytes of its answer with the moments at which they came; `SpokenTimes` is made
of them once all answers of a load are there, so that reading JSON delays no other answer. The figures are those of the
documentation on async chunks (`docs/references.md`). The module knows nothing of configurations, of placement or of
targets.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fabric.contracts import ConfigError
from loadtest.benches.served.timed_chats import Body, ChatTarget

SAMPLE_RATE = 24_000
BYTES_PER_SAMPLE = 2


class ReceivedBytes(NamedTuple):
    """Holds a piece of an answer and the moment at which it came, on the clock of the machine."""

    at_s: float
    data: bytes


class SoundPiece(NamedTuple):
    """A `SoundPiece` is some of an answer's sound."""

    at_s: float
    """Holds the time from sending the request until the piece came."""
    seconds: float
    """Holds how long the piece plays."""


class SpokenTimes(NamedTuple):
    """Holds what was measured of one answer. Times are seconds after the request was sent."""

    text_s: tuple[float, ...]
    """Holds when each piece of text came."""
    sound: tuple[SoundPiece, ...]
    total_s: float
    num_tokens: int

    @classmethod
    def of(cls, sent_s: float, pieces: Sequence[ReceivedBytes]) -> SpokenTimes:
        """Reads an answer. Raises ConfigError if it has an error, no text, or no end."""
        text_s: list[float] = []
        sound: list[SoundPiece] = []
        usage: dict[str, Any] = {}
        for at_s, event in _events(pieces):
            if "error" in event:
                raise ConfigError(f"the answer ended with an error: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                audio = delta.get("audio") or {}
                if delta.get("content") or audio.get("transcript"):
                    text_s.append(at_s - sent_s)
                if audio.get("data"):
                    num_bytes = len(base64.b64decode(audio["data"]))
                    sound.append(SoundPiece(at_s - sent_s, num_bytes / BYTES_PER_SAMPLE / SAMPLE_RATE))
        if not text_s or "completion_tokens" not in usage:
            raise ConfigError("the answer has no text, or its stream ended before its usage")
        return cls(tuple(text_s), tuple(sound), pieces[-1].at_s - sent_s, int(usage["completion_tokens"]))

    @property
    def ttft_s(self) -> float:
        return self.text_s[0]

    @property
    def tpot_s(self) -> float:
        """Returns the mean time of a token of text after the first one."""
        return (self.text_s[-1] - self.text_s[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Returns the times between pieces of text, each of which may contain several tokens."""
        return [later - earlier for earlier, later in pairwise(self.text_s)]

    @property
    def ttfp_s(self) -> float:
        """Returns the time to the first sound. Only an answer with sound has one."""
        return self.sound[0].at_s

    @property
    def audio_s(self) -> float:
        return sum(piece.seconds for piece in self.sound)

    @property
    def rtf(self) -> float:
        """Returns the time of the whole answer over the length of its sound (real-time factor)."""
        return self.total_s / self.audio_s

    def underruns_s(self) -> list[float]:
        """Returns how long a player that starts with the first piece would have been silent each time."""
        waits: list[float] = []
        played_to_s = self.ttfp_s
        for piece in self.sound:
            if piece.at_s > played_to_s:
                waits.append(piece.at_s - played_to_s)
                played_to_s = piece.at_s
            played_to_s += piece.seconds
        return waits


def _events(pieces: Sequence[ReceivedBytes]) -> Iterator[tuple[float, Body]]:
    """Yields the events of a stream, each with the moment at which its last byte came."""
    left = b""
    for at_s, data in pieces:
        *whole, left = (left + data).split(b"\n\n")
        for event in whole:
            for line in event.splitlines():
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield at_s, json.loads(line[5:])


async def ask_spoken(target: ChatTarget, body: Body) -> tuple[float, list[ReceivedBytes]]:
    """Sends a chat and returns the moment of sending, and the answer's bytes. Raises ConfigError if it is refused."""
    sent_s = time.monotonic()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with target.client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            raise ConfigError(f"the cluster answered with status {answer.status_code}: {text[:300]}")
        pieces = [ReceivedBytes(time.monotonic(), data) async for data in answer.aiter_raw()]
    return sent_s, pieces
