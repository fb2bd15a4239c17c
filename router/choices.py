"""The text of one choice: tokens in order, detokenised, cut at the first stop. Synchronous and pure.

Token by token, so that the count is exact up to the token that completed a stop string, however the frames came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fabric.messages import TokenLogprobs
from modalities.text.stops import StopStrings
from router.api.logprobs import ScoredToken
from router.frames import TokenOrder


class Detokenizer(Protocol):
    """See modalities.text.detokenizer.IncrementalDetokenizer."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ChoiceOutput:
    """`stop_token_ids` are the ids that end a choice (end of sequence included): the one that did is counted but
    is no text."""

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str], stop_token_ids: frozenset[int]) -> None:
        self.order = TokenOrder()
        self.finish_reason: str | None = None
        self.num_tokens = 0
        """Tokens that count: up to the stop."""
        self.is_cut = False
        """Ended by a stop string: the worker doesn't know."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop_strings)
        self._stop_token_ids = stop_token_ids
        self._withheld: int | None = None

    def push(
        self,
        first_index: int,
        token_ids: Sequence[int],
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> str:
        """Takes a frame and returns the new text. A frame after the finish changes nothing."""
        if self.is_finished:
            return ""
        if finish_reason is not None and finish_reason != "abort":
            self.order.end(first_index + len(token_ids), finish_reason)
        return self._advance(self.order.push(first_index, token_ids, logprobs))

    def end(self, num_tokens: int, reason: str) -> str:
        """What the terminal event says; the rest of the text if every token is there."""
        if self.is_finished:
            return ""
        self.order.end(num_tokens, reason)
        return self._advance(())

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def emitted(self) -> tuple[int, ...]:
        """What a new attempt has to be told."""
        return self.emitted_from(0)

    def emitted_from(self, start: int) -> tuple[int, ...]:
        """Tokens from index `start` on, none behind a cut."""
        return tuple(self.order.token_ids[start : self.num_tokens if self.is_cut else None])

    def scored_from(self, start: int) -> list[ScoredToken]:
        """As `emitted_from`, with what the worker said of each. Only if it was asked to."""
        token_ids = self.emitted_from(start)
        logprobs = self.order.logprobs[start : start + len(token_ids)]
        return [ScoredToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]

    def _advance(self, fresh: Sequence[int]) -> str:
        text = ""
        for token_id in fresh:
            text += self._take(token_id)
            if self.is_cut:
                return text
        ending = self.order.reached
        if ending is None:
            return text
        text += self._finish(ending.reason)
        return text

    def _take(self, token_id: int) -> str:
        """A stop id is withheld: only what follows tells whether it was the end or (ignored, too early) a token."""
        text = self._release()
        if self.is_cut:
            return text
        self.num_tokens += 1
        if token_id in self._stop_token_ids:
            self._withheld = token_id
            return text
        return text + self._filtered(self._detokenizer.push((token_id,)))

    def _release(self) -> str:
        if self._withheld is None:
            return ""
        token_id, self._withheld = self._withheld, None
        return self._filtered(self._detokenizer.push((token_id,)))

    def _filtered(self, text: str) -> str:
        result = self._stops.push(text)
        if result.hit is not None:
            self.is_cut = True
            self.finish_reason = "stop"
        return result.text

    def _finish(self, reason: str) -> str:
        if reason == "stop":
            self._withheld = None
        text = self._release()
        if not self.is_cut:
            text += self._filtered(self._detokenizer.flush())
        if not self.is_cut:
            text += self._stops.flush()
            self.finish_reason = reason
        return text
