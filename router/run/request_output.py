"""Carries the output of one request from the attempts, which write as tokens come, to one reader, which takes text when
it can. Tokens pass through it in this order: a `TokenOrder` puts the tokens of one choice in order, a `ChoiceOutput`
makes the choice's text of them and cuts it at the first stop, and the `RequestStream` hands the text of all choices to
the reader.

A slow reader delays nothing else: text that it has not taken is joined, so the buffer is one text per choice, no longer
than the choice itself. The module knows nothing of HTTP, of members, or of how attempts are made; a request's attempts
appear here only as frames that may repeat, overlap or leave gaps.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol

from fabric.contracts import Aborted, PromptLogprobs, RequestId, TokenLogprobs, WeftError
from modalities.text import StopStrings
from router.api import ScoredToken, Usage
from router.prompt import PLAIN, AnswerPlan
from router.run.audio_track import AudioTrack
from router.run.failures import StepDown

# ------------------------------------------------------------ the stream of a request


class Delta(NamedTuple):
    """A `Delta` is the new text of one choice. `finish_reason` comes once, with the choice's last text or, if it is
    spoken, with its last sound."""

    choice: int
    text: str
    finish_reason: str | None
    samples: bytes = b""
    """Holds the new sound of a spoken choice: int16, little-endian, one channel."""


class RequestStream:
    """A `RequestStream` connects a request's attempts with one reader. It is read with `async for deltas in stream`,
    which ends after the terminal event; `usage` is set then. A failure is raised after everything that came before it
    was read. Exactly one call of `finish` or `fail` ends a stream."""

    def __init__(
        self,
        request_id: RequestId,
        choices: Sequence[ChoiceOutput],
        on_close: Callable[[], None],
        prompt_token_ids: tuple[int, ...] = (),
        news: asyncio.Event | None = None,
    ) -> None:
        """Takes `on_close`, which ends the request, and `news`, which is set when there is something to read."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.degraded: tuple[StepDown, ...] = ()
        """Lists the media that the model did not get as they were sent. It is fixed once the stream is started."""
        self.choices = tuple(choices)
        self.usage: Usage | None = None
        self.answer: AnswerPlan = PLAIN
        """Says how the text of a choice is read."""
        self.media_s = 0.0
        """Sums the lengths of the request's videos and sounds, in seconds."""
        self.audio: AudioTrack | None = None
        """Keeps the sound of the answer; None if it is text alone. Only a stream of one choice has one."""
        self.embedding = b""
        """Holds the embedding of the prompt as float32, little-endian, if the request wants one and has ended."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """Is set if the request wants the log-probabilities of its prompt and has ended."""
        self.num_prompt_scores = 0
        """Counts the log-probabilities of the prompt in the answer."""
        self.scores_per_token = 0
        """Counts the log-probabilities that the answer has of each generated token."""
        self.record: Callable[[], dict[str, object]] = dict
        """Returns the record of the request as JSON values; it is whole once the stream has ended."""
        self._error: WeftError | None = None
        self._pending: list[_Pending | None] = [_Pending() for _ in choices]
        """Holds None for a choice once its finish was read."""
        self._on_close = on_close
        self._news = asyncio.Event() if news is None else news
        self._started = asyncio.Event()
        self._ended = asyncio.Event()

    # ------------------------------------------------------------ the writer's side

    def write(self, choice: int, text: str) -> None:
        """Adds text of a choice, which may be empty, and takes the finish reason from the choice. The first write
        starts the stream."""
        pending = self._pending[choice]
        if pending is not None:
            if text:
                pending.texts.append(text)
            pending.finish_reason = self.choices[choice].finish_reason
        self._started.set()
        self._news.set()

    def write_audio(self) -> None:
        """Says that the sound has gone on, or has ended."""
        self._started.set()
        self._news.set()

    def restart(self, prompt_token_ids: tuple[int, ...], degraded: tuple[StepDown, ...]) -> None:
        """Continues the request with another prompt. It is allowed only before the first token."""
        assert not self.is_started, "an answer is about one prompt"
        self.prompt_token_ids, self.degraded = prompt_token_ids, degraded

    def finish(self, usage: Usage) -> None:
        """Ends the stream of a request that was served. Later calls of `finish` or `fail` change nothing."""
        if not self.is_ended:
            self.usage = usage
            self._end()

    def fail(self, error: WeftError) -> None:
        if not self.is_ended:
            self._error = error
            self._end()

    @property
    def is_ended(self) -> bool:
        return self.usage is not None or self._error is not None

    @property
    def is_started(self) -> bool:
        return self._started.is_set()

    @property
    def error(self) -> WeftError | None:
        return self._error

    @property
    def are_choices_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    def _end(self) -> None:
        self._ended.set()
        self._started.set()
        self._news.set()

    # ------------------------------------------------------------ the reader's side

    async def started(self) -> None:
        """Waits until the first token is there. Raises the failure if the stream failed before the first token."""
        await self._started.wait()
        if self._error is not None and not self._has_news():
            raise self._error

    async def ended(self) -> None:
        """Waits until the request has ended, well or not. A reader that wants the whole text waits here first, because
        it is then woken once and not at every token."""
        await self._ended.wait()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[Delta]:
        """Returns everything new since the last call, at most one delta per choice."""
        while True:
            await self._news.wait()
            self._news.clear()
            deltas = self.take_new()
            if self.is_ended:
                self._news.set()
            if deltas:
                return deltas
            if self._error is not None:
                raise self._error
            if self.usage is not None:
                raise StopAsyncIteration

    def close(self) -> None:
        """Closes the reader's side when the reader has left or is done. If the request still runs, it ends, and
        everything that it holds is freed."""
        if not self.is_ended:
            self._on_close()
            self.fail(Aborted("the client left"))

    def _has_news(self) -> bool:
        if self.audio is not None and self.audio.has_fresh:
            return True
        return any(pending is not None and (pending.texts or pending.finish_reason) for pending in self._pending)

    def take_new(self) -> list[Delta]:
        """Returns everything new since the last call, which may be nothing, at most one delta per choice. The finish of
        a spoken choice is held back until its sound has ended."""
        deltas: list[Delta] = []
        samples, is_speaking = b"", False
        if self.audio is not None:
            samples, is_speaking = self.audio.take(), not self.audio.is_ended
        for choice, pending in enumerate(self._pending):
            if pending is None:
                continue
            finish_reason = None if is_speaking else pending.finish_reason
            if not (pending.texts or finish_reason or samples):
                continue
            deltas.append(Delta(choice, "".join(pending.texts), finish_reason, samples))
            pending.texts.clear()
            if finish_reason is not None:
                self._pending[choice] = None
        return deltas


class _Pending:
    """Holds what the reader has not taken yet of one choice."""

    __slots__ = ("finish_reason", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.finish_reason: str | None = None


# ------------------------------------------------------------ one choice


class Detokenizer(Protocol):
    """A `Detokenizer` turns token ids into text piece by piece; modalities.text.detokenizer.IncrementalDetokenizer
    implements it."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ChoiceOutput:
    """A `ChoiceOutput` builds the text of one choice: it takes tokens in order, detokenises them, and cuts the text at
    the first stop. `stop_token_ids` are the ids that end a choice (end of sequence included); the id that ends it is
    counted but adds no text.

    It works token by token, so that the count is exact up to the token that completed a stop string, however the tokens
    were split into frames. It is synchronous and pure."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        stop_token_ids: frozenset[int],
        keeps_ends: bool = False,
    ) -> None:
        """Starts a choice. `keeps_ends` says whether `text_ends` is wanted."""
        self.order = TokenOrder()
        self.finish_reason: str | None = None
        self.num_tokens = 0
        """Counts the tokens up to the stop."""
        self.is_cut = False
        """This is True if a stop string ended the choice; the worker does not know of this end."""
        self.text_ends: list[int] = []
        """Holds the number of characters up to the end of each token, if they are kept. Characters behind a cut count
        too."""
        self._keeps_ends = keeps_ends
        self._num_chars = 0
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

    def num_tokens_in(self, start: int, end: int) -> int:
        """Counts the tokens that have a part in a range of characters. It needs `text_ends`."""
        if start >= end:
            return 0
        return bisect_left(self.text_ends, end) + 1 - bisect_right(self.text_ends, start)

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
        if self._keeps_ends:
            self.text_ends.append(self._num_chars)
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
        """Returns what of the detokenised text, which belongs to the latest token, is certainly no stop string."""
        if self.text_ends:
            self._num_chars += len(text)
            self.text_ends[-1] = self._num_chars
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


class TokenOrder:
    """A `TokenOrder` puts the tokens of one choice in order over all attempts: it drops duplicates and holds tokens
    behind a gap. The caller checks which attempt a frame belongs to.

    Indexes count generated tokens from 0 over all attempts: a migrated attempt continues where the former one stopped.
    Tokens of a former attempt are as good as those of the new one, because a draw depends on (seed, choice, index)
    alone."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """Holds the token ids that are contiguous from index 0."""
        self.logprobs: list[TokenLogprobs] = []
        """Holds one entry per token, if the worker sends log-probabilities."""
        self._held: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._ending: Ending | None = None

    def push(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[int]:
        """Takes a frame and returns the tokens that it made contiguous. Drops tokens after the ending."""
        for index, (token_id, scored) in enumerate(zip_longest(token_ids, logprobs), first_index):
            if index >= len(self.token_ids) and index not in self._held and not self._is_beyond(index):
                self._held[index] = token_id, scored
        fresh: list[int] = []
        while len(self.token_ids) in self._held:
            token_id, scored = self._held.pop(len(self.token_ids))
            self.token_ids.append(token_id)
            if scored is not None:
                self.logprobs.append(scored)
            fresh.append(token_id)
        return fresh

    def end(self, num_tokens: int, reason: str) -> None:
        """Sets the ending that a frame or the terminal event reports. Repeating it is harmless."""
        self._ending = Ending(num_tokens, reason)

    def restart(self) -> None:
        """Prepares for a new attempt: drops tokens that are held behind a gap, and an ending that was never reached."""
        self._held.clear()
        self._ending = None

    @property
    def reached(self) -> Ending | None:
        """Returns the ending once every token up to it is there, otherwise None."""
        ending = self._ending
        return ending if ending is not None and len(self.token_ids) >= ending.num_tokens else None

    @property
    def num_missing(self) -> int:
        """Counts the tokens that are known to exist but have not arrived; it is 0 without an ending or a gap."""
        last = max(self._held, default=-1) + 1
        if self._ending is not None:
            last = max(last, self._ending.num_tokens)
        return max(0, last - len(self.token_ids) - len(self._held))

    def _is_beyond(self, index: int) -> bool:
        return self._ending is not None and index >= self._ending.num_tokens


class Ending(NamedTuple):
    """An `Ending` is the point at which a choice ends, as the worker reports it."""

    num_tokens: int
    reason: str
