"""Log-probabilities in OpenAI's format: the token's text, its bytes, and the most probable tokens beside it.

One entry per token that counts, the one that ended the choice included (as in vLLM). Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fabric.messages import TokenLogprobs

LEAST = -9999.0
"""What stands for minus infinity, which JSON has not (OpenAI's own number)."""

TokenBytes = Callable[[int], bytes]
"""The bytes of a token, a control token's name included."""


class ScoredToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs


def logprobs_object(tokens: Sequence[ScoredToken], bytes_of: TokenBytes) -> dict[str, object]:
    """The `logprobs` of a choice, or of a chunk of it."""
    return {
        "content": [
            _entry(token_id, logprobs.logprob, bytes_of)
            | {"top_logprobs": [_entry(top_id, logprob, bytes_of) for top_id, logprob in logprobs.top]}
            for token_id, logprobs in tokens
        ],
        "refusal": None,
    }


def _entry(token_id: int, logprob: float, bytes_of: TokenBytes) -> dict[str, object]:
    """A token that is a part of a character is not readable: then its bytes tell."""
    data = bytes_of(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(data)}
