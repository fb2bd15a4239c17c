"""Formats log-probabilities as OpenAI does: the token's text, its bytes, and the most probable tokens at its position.

There is one entry per token that counts, including the one that ended the choice (as in vLLM). The module knows nothing
of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fabric.messages import TokenLogprobs

LEAST = -9999.0
"""This number replaces minus infinity, which JSON does not have (it is OpenAI's own number)."""

TokenBytes = Callable[[int], bytes]
"""A `TokenBytes` function returns the bytes of a token; for a control token it returns the bytes of the name."""


class ScoredToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs


def logprobs_object(tokens: Sequence[ScoredToken], bytes_of: TokenBytes) -> dict[str, object]:
    """Returns the `logprobs` object of a choice, or of a chunk of it."""
    return {
        "content": [
            _entry(token_id, logprobs.logprob, bytes_of)
            | {"top_logprobs": [_entry(top_id, logprob, bytes_of) for top_id, logprob in logprobs.top]}
            for token_id, logprobs in tokens
        ],
        "refusal": None,
    }


def _entry(token_id: int, logprob: float, bytes_of: TokenBytes) -> dict[str, object]:
    """Returns the entry of one token. A token that is a part of a character has no readable text; its bytes then
    identify it."""
    data = bytes_of(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(data)}
