"""Builds the answers of the API as JSON in OpenAI's shapes: whole completions, the chunks of a streamed one, their
log-probabilities, and the model list. A whole answer (`completion`) and a streamed one (`ChunkWriter`) stand together
because they consist of the same pieces: `Head`, `Usage`, the details of a choice, and the media that were degraded.

The module decides nothing, and knows nothing of requests or of how an answer is made. Errors have the shape that
`router.api.http_errors` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from fabric.contracts import TokenLogprobs, WeftError
from router.api.http_errors import error_object

DONE = b"data: [DONE]\n\n"
Degraded = Sequence[Mapping[str, object]]
"""Holds one object per medium that was reduced or removed."""
Explained = Mapping[str, object] | None
"""Holds the record of the request, if the client asked for it."""


class Head(NamedTuple):
    """Holds what every object of one answer repeats."""

    completion_id: str
    created: int
    """This is the Unix time in seconds."""
    model: str


class Usage(NamedTuple):
    """Holds the exact token counts of one request. `num_completion_tokens` is the sum over all choices, each up to its
    stop."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    modality_to_tokens: dict[str, int]
    """Counts, per modality, the prompt tokens that are placeholders of a medium."""

    def to_json(self) -> dict[str, object]:
        media_tokens = sum(self.modality_to_tokens.values())
        details = {"cached_tokens": self.num_cached_tokens, "text_tokens": self.num_prompt_tokens - media_tokens}
        details |= {"image_tokens": 0, "audio_tokens": 0}
        details |= {f"{modality}_tokens": count for modality, count in self.modality_to_tokens.items()}
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"text_tokens": self.num_completion_tokens, "audio_tokens": 0},
        }


class ChoiceText(NamedTuple):
    """A `ChoiceText` is one choice of a whole answer."""

    choice: int
    text: str
    finish_reason: str
    details: dict[str, object] | None = None
    """Holds further fields that the client asked for: `token_ids`, `logprobs`."""


def completion(
    head: Head,
    choices: Sequence[ChoiceText],
    usage: Usage,
    prompt_token_ids: Sequence[int] | None = None,
    degraded: Degraded = (),
    explained: Explained = None,
) -> bytes:
    """Returns the body of an answer that is not streamed. `prompt_token_ids` and `explained` are given only if the
    client asked for them."""
    listed = [
        {
            "index": each.choice,
            "message": {"role": "assistant", "content": each.text, "refusal": None},
            "logprobs": None,
            "finish_reason": each.finish_reason,
        }
        | (each.details or {})
        for each in choices
    ]
    whole = {"choices": listed, "usage": usage.to_json()} | _ids(prompt_token_ids) | _weft(degraded, explained)
    return msgspec.json.encode(_object(head, "chat.completion") | whole)


class ChunkWriter:
    """Builds the server-sent events of one answer. With `has_usage_chunk`, every chunk except the last says `usage:
    null`."""

    def __init__(self, head: Head, has_usage_chunk: bool) -> None:
        self.has_usage_chunk = has_usage_chunk
        self._head = head
        self._usage: dict[str, object] = {"usage": None} if has_usage_chunk else {}

    def role(self, choice: int, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, extra=_ids(prompt_token_ids))

    def text(self, choice: int, text: str, details: dict[str, object] | None = None) -> bytes:
        return self._chunk(choice, {"content": text}, None, details)

    def finish(
        self, choice: int, reason: str, details: dict[str, object] | None = None, degraded: Degraded = ()
    ) -> bytes:
        return self._chunk(choice, {}, reason, details, extra=_weft(degraded))

    def last(self, usage: Usage, degraded: Degraded = (), explained: Explained = None) -> bytes:
        """Returns the chunk after the last one of the choices, with what concerns the whole answer: the usage, and the
        record of the request. It returns nothing if the client asked for neither."""
        if not self.has_usage_chunk and explained is None:
            return b""
        counted = {"usage": usage.to_json()} if self.has_usage_chunk else {}
        whole = {"choices": []} | counted | _weft(degraded, explained)
        return _event(_object(self._head, "chat.completion.chunk") | whole)

    def _chunk(
        self,
        choice: int,
        delta: dict[str, str],
        finish_reason: str | None,
        details: dict[str, object] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> bytes:
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        whole = {"choices": [entry | (details or {})]} | self._usage | dict(extra or {})
        return _event(_object(self._head, "chat.completion.chunk") | whole)


def error_event(error: WeftError) -> bytes:
    """Returns the event for a failure in mid-stream; SDKs raise an exception on it."""
    return _event({"error": error_object(error)})


def model_object(name: str, created: int, max_model_len: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "weft", "max_model_len": max_model_len}


def _object(head: Head, kind: str) -> dict[str, object]:
    return {"id": head.completion_id, "object": kind, "created": head.created, "model": head.model}


def _ids(prompt_token_ids: Sequence[int] | None) -> dict[str, object]:
    return {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}


def _weft(degraded: Degraded, explained: Explained = None) -> dict[str, object]:
    """Returns Weft's own part of an answer: the media that the model did not get as they were sent, and the record of
    the request."""
    part: dict[str, object] = {"degraded": list(degraded)} if degraded else {}
    part |= {} if explained is None else {"explain": explained}
    return {"weft": part} if part else {}


def _event(payload: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


# ------------------------------------------------------------ log-probabilities

LEAST = -9999.0
"""This number replaces minus infinity, which JSON does not have (it is OpenAI's own number)."""
TokenBytes = Callable[[int], bytes]
"""A `TokenBytes` function returns the bytes of a token; for a control token it returns the bytes of the name."""


class ScoredToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs


def logprobs_object(tokens: Sequence[ScoredToken], bytes_of: TokenBytes) -> dict[str, object]:
    """Returns the `logprobs` object of a choice, or of a chunk of it: for each token its text, its bytes, and the most
    probable tokens at its position. There is one entry per token that counts, including the one that ended the choice
    (as in vLLM)."""
    return {
        "content": [
            _token_entry(token_id, logprobs.logprob, bytes_of)
            | {"top_logprobs": [_token_entry(top_id, logprob, bytes_of) for top_id, logprob in logprobs.top]}
            for token_id, logprobs in tokens
        ],
        "refusal": None,
    }


def _token_entry(token_id: int, logprob: float, bytes_of: TokenBytes) -> dict[str, object]:
    """Returns the entry of one token. A token that is a part of a character has no readable text; its bytes then
    identify it."""
    data = bytes_of(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(data)}
