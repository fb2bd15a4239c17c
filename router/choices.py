"""Builds the text of one choice: it takes tokens in order, detokenises them, and cuts the text at the first stop.

It works token by token, so that the count is exact up to the token that completed a stop string, however the tokens
were split into frames. It is synchronous and pure, and knows nothing of requests or attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fabric.messages import TokenLogprobs
from modalities.text.stops import StopStrings
from router.api.logprobs import ScoredToken
from router.frames import TokenOrder


class Detokenizer(Protocol):
    """A `Detokenizer` turns token ids into text piece by piece; modalities.text.detokenizer.IncrementalDetokenizer
    implements it."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ChoiceOutput:
    """A `ChoiceOutput` collects the tokens and the text of one choice. `stop_token_ids` are the ids that end a choice
    (end of sequence included); the id that ends it is counted but adds no text."""

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str], stop_token_ids: frozenset[int]) -> None:
        self.order = TokenOrder()
        self.finish_reason: str | None = None
        self.num_tokens = 0
        """Counts the tokens up to the stop."""
        self.is_cut = False
        """This is True if a stop string ended the choice; the worker does not know of this end."""
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
        """Takes a frame and returns the new text. A frame that comes after the finish changes nothing."""
        if self.is_finished:
            return ""
        if finish_reason is not None and finish_reason != "abort":
            self.order.end(first_index + len(token_ids), finish_reason)
        return self._advance(self.order.push(first_index, token_ids, logprobs))

    def end(self, num_tokens: int, reason: str) -> str:
        """Takes the end that the terminal event names. Returns the rest of the text if every token up to that end is
        there."""
        if self.is_finished:
            return ""
        self.order.end(num_tokens, reason)
        return self._advance(())

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def emitted(self) -> tuple[int, ...]:
        """Returns the tokens that a new attempt continues from."""
        return self.emitted_from(0)

    def emitted_from(self, start: int) -> tuple[int, ...]:
        """Returns the tokens from index `start` on, without those after a cut."""
        return tuple(self.order.token_ids[start : self.num_tokens if self.is_cut else None])

    def scored_from(self, start: int) -> list[ScoredToken]:
        """Returns the same tokens as `emitted_from`, each with its log-probabilities. It may be called only if the
        worker was asked for log-probabilities."""
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
        """Takes one token and returns its text. Withholds a stop id, because only what follows shows whether it was the
        end or a token of the text (an ignored stop id, or one that came too early)."""
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
