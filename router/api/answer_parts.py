"""Holds the pieces of which the answers of all endpoints consist: their head, the token counts, log-probabilities,
Weft's own part, and the framing of server-sent events.

The module decides nothing, and knows nothing of requests or of how an answer is made. Errors have the shape that
`router.api.http_errors` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from fabric.contracts import PromptLogprobs, TokenLogprobs, WeftError
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
    fingerprint: str = ""
    """Names the version of the server and of the model (OpenAI's `system_fingerprint`)."""

    def to_json(self, kind: str) -> dict[str, object]:
        """Returns the fields of an object of the type `kind`, such as `chat.completion`."""
        fields: dict[str, object] = {"id": self.completion_id, "object": kind}
        fields |= {"created": self.created, "model": self.model}
        return fields | {"system_fingerprint": self.fingerprint} if self.fingerprint else fields


class Usage(NamedTuple):
    """Holds the exact token counts of one request. `num_completion_tokens` is the sum over all choices, each up to its
    stop."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    modality_to_tokens: dict[str, int]
    """Counts, per modality, the prompt tokens that are placeholders of a medium."""
    num_reasoning_tokens: int = 0
    """Counts the completion tokens with which the model reasoned before its answer."""

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
            "completion_tokens_details": {
                "text_tokens": self.num_completion_tokens,
                "audio_tokens": 0,
                "reasoning_tokens": self.num_reasoning_tokens,
            },
        }


def usage_sum(usages: Sequence[Usage]) -> Usage:
    """Returns the token counts of one answer that several requests made."""
    modalities = {name for each in usages for name in each.modality_to_tokens}
    return Usage(
        sum(each.num_prompt_tokens for each in usages),
        sum(each.num_completion_tokens for each in usages),
        sum(each.num_cached_tokens for each in usages),
        {name: sum(each.modality_to_tokens.get(name, 0) for each in usages) for name in sorted(modalities)},
    )


def sse_event(payload: Mapping[str, object], name: str = "") -> bytes:
    """Returns one server-sent event with `payload` as its data, and its type if it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(payload) + b"\n\n"


def error_event(error: WeftError) -> bytes:
    """Returns the event for a failure in mid-stream; SDKs raise an exception on it."""
    return sse_event({"error": error_object(error)})


def weft_part(degraded: Degraded, explained: Explained = None) -> dict[str, object]:
    """Returns Weft's own part of an answer: the media that the model did not get as they were sent, and the record of
    the request."""
    part: dict[str, object] = {"degraded": list(degraded)} if degraded else {}
    part |= {} if explained is None else {"explain": explained}
    return {"weft": part} if part else {}


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


def scores_list(tokens: Sequence[ScoredToken], bytes_of: TokenBytes) -> list[dict[str, object]]:
    """Returns the `logprobs` of a transcript, or of a piece of it: an entry per token, as in `logprobs_object`, without
    other tokens at its position."""
    return [_token_entry(token_id, logprobs.logprob, bytes_of) for token_id, logprobs in tokens]


def prompt_logprobs_list(scores: PromptLogprobs | None, bytes_of: TokenBytes) -> list[object] | None:
    """Returns vLLM's `prompt_logprobs`: one entry per token of the prompt, which maps token ids to their scores. The
    first entry is None, because nothing predicts the first token. Each entry is encoded by itself, because the objects
    of a long prompt would take many times the memory of its answer."""
    if scores is None:
        return None
    texts: dict[int, str] = {}
    entries: list[object] = [None]
    for token in scores.tokens():
        ranked = [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(token.logprobs.top, 1)]
        entry = {}
        for token_id, logprob, rank in [*ranked, (token.token_id, token.logprobs.logprob, token.rank)]:
            if token_id not in texts:
                texts[token_id] = bytes_of(token_id).decode(errors="replace")
            entry[str(token_id)] = {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": texts[token_id]}
        entries.append(msgspec.Raw(msgspec.json.encode(entry)))
    return entries


def _token_entry(token_id: int, logprob: float, bytes_of: TokenBytes) -> dict[str, object]:
    """Returns the entry of one token. A token that is a part of a character has no readable text; its bytes then
    identify it."""
    data = bytes_of(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(data)}
