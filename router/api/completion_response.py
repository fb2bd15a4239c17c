"""Builds the answers of `/v1/completions` as JSON in OpenAI's shapes: whole completions, and the chunks of a streamed
one.

The module decides nothing, and knows nothing of requests or of how an answer is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from fabric.contracts import PromptLogprobs
from router.api.answer_parts import LEAST, Explained, Head, ScoredToken, TokenBytes, Usage, sse_event, weft_part

OBJECT = "text_completion"


class CompletionText(NamedTuple):
    """A `CompletionText` is one choice of a whole answer."""

    choice: int
    text: str
    finish_reason: str
    details: dict[str, object]
    """Holds further fields that the client asked for: `token_ids`, `prompt_token_ids`, `logprobs`."""


def text_completion(head: Head, choices: Sequence[CompletionText], usage: Usage, explained: Explained = None) -> bytes:
    """Returns the body of an answer that is not streamed."""
    listed = [_choice(each.choice, each.text, each.finish_reason, each.details) for each in choices]
    whole = {"choices": listed, "usage": usage.to_json()} | weft_part((), explained)
    return msgspec.json.encode(head.to_json(OBJECT) | whole)


class CompletionChunkWriter:
    """Builds the server-sent events of one answer. With `has_usage_chunk`, every chunk except the last says `usage:
    null`."""

    def __init__(self, head: Head, has_usage_chunk: bool) -> None:
        self._has_usage_chunk = has_usage_chunk
        self._head = head.to_json(OBJECT)
        self._usage: dict[str, object] = {"usage": None} if has_usage_chunk else {}

    def text(self, choice: int, text: str, finish_reason: str | None, details: dict[str, object]) -> bytes:
        return sse_event(self._head | {"choices": [_choice(choice, text, finish_reason, details)]} | self._usage)

    def last(self, usage: Usage, explained: Explained = None) -> bytes:
        """Returns the chunk after the last one of the choices, or nothing if the client did not ask for it."""
        if not self._has_usage_chunk and explained is None:
            return b""
        counted = {"usage": usage.to_json()} if self._has_usage_chunk else {}
        return sse_event(self._head | {"choices": []} | counted | weft_part((), explained))


def _choice(choice: int, text: str, finish_reason: str | None, details: dict[str, object]) -> dict[str, object]:
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": finish_reason} | details


class TextOffset:
    """A `TextOffset` counts the characters of a choice's tokens, because each entry says where its token begins."""

    def __init__(self, start: int = 0) -> None:
        self.num_chars = start

    def prompt_logprobs(
        self, token_ids: Sequence[int], scores: PromptLogprobs, bytes_of: TokenBytes, num_top: int
    ) -> dict[str, list[object]]:
        """Returns the lists of the `logprobs` object for an echoed prompt. Nothing predicts its first token."""
        first = bytes_of(token_ids[0]).decode(errors="replace")
        self.num_chars += len(first)
        scored = [ScoredToken(token.token_id, token.logprobs) for token in scores.tokens()]
        rest = self.logprobs(scored, bytes_of, num_top)
        return {
            "tokens": [first, *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": [0, *rest["text_offset"]],
        }

    def logprobs(self, tokens: Sequence[ScoredToken], bytes_of: TokenBytes, num_top: int) -> dict[str, list[object]]:
        """Returns the lists of the `logprobs` object for the next tokens of a choice, with the `num_top` most probable
        tokens at each position."""
        names = [bytes_of(token.token_id).decode(errors="replace") for token in tokens]
        offsets: list[int] = []
        for name in names:
            offsets.append(self.num_chars)
            self.num_chars += len(name)
        tops = [
            {
                bytes_of(top_id).decode(errors="replace"): max(logprob, LEAST)
                for top_id, logprob in token.logprobs.top[:num_top]
            }
            for token in tokens
        ]
        return {
            "tokens": [*names],
            "token_logprobs": [max(token.logprobs.logprob, LEAST) for token in tokens],
            "top_logprobs": [*tops],
            "text_offset": [*offsets],
        }
