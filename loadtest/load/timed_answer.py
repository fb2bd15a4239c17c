"""Reads the server-sent events of a chat completion, and takes the times of its tokens.

A `TimedAnswer` is fed the bytes of an answer as they arrive, each with the moment of arrival, and returns the
`AnswerTimes` at the end. It works with every client that hands out bytes, and with every server that implements the
OpenAI API. The module knows nothing of how the bytes came, and reads no clock.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class AnswerTimes(NamedTuple):
    """Holds what was measured of one answer. Times are in seconds after the request was sent."""

    ttft_s: float
    """Holds the time of the first text; it is that of the end if there was no text."""
    total_s: float
    num_prompt: int
    num_output: int
    text: str
    error: str
    """Says what went wrong, and is empty for a whole answer."""

    @property
    def tpot_s(self) -> float:
        """Returns the mean time of a token after the first one; 0 if there is none."""
        return (self.total_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else 0.0


class TimedAnswer:
    """Collects one answer, from the moment when its request was sent."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._left = b""
        self._text: list[str] = []
        self._first_s: float | None = None
        self._usage: dict[str, Any] = {}
        self._error = ""
        self._is_done = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes the next bytes of the answer, which may end anywhere in an event."""
        self._left = (self._left + data).replace(b"\r\n", b"\n")
        *events, self._left = self._left.split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._take(b"\n".join(lines), now_s)

    def _take(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self._error = self._error or f"an event is not JSON: {data[:80]!r}"
            return
        if "error" in event:
            error = event["error"]
            self._error = str(error.get("code") or error.get("message")) if isinstance(error, dict) else str(error)
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            piece = choice.get("delta") or {}
            text = piece.get("content") or piece.get("reasoning_content") or ""
            if text or piece.get("tool_calls"):
                self._first_s = now_s if self._first_s is None else self._first_s
                self._text.append(text)

    def end(self, now_s: float) -> AnswerTimes:
        """Returns what was measured until now, the end of the answer. It has an error if its stream did not end as it
        should."""
        error = self._error or ("" if self._is_done else "the stream ended before [DONE]")
        num_output = int(self._usage.get("completion_tokens", 0)) or len(self._text)
        return AnswerTimes(
            ttft_s=(now_s if self._first_s is None else self._first_s) - self._sent_s,
            total_s=now_s - self._sent_s,
            num_prompt=int(self._usage.get("prompt_tokens", 0)),
            num_output=num_output,
            text="".join(self._text),
            error=error,
        )


def refusal(status: int, body: bytes) -> str:
    """Returns the status of an answer, with the code of the error if its body has one."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return str(status)
    return f"{status} {code}"
