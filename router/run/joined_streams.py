"""Reads the streams of several requests as one: the choices of an answer with several prompts stand behind each other.

The module knows nothing of HTTP, or of how a request is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fabric.contracts import PromptLogprobs
from router.api import Usage, usage_sum
from router.prompt import AnswerPlan
from router.run.request_output import ChoiceOutput, Delta, RequestStream


class JoinedStreams:
    """A `JoinedStreams` has the reader's side of a `RequestStream` over several of them. Each of the streams must set
    the event `news`. The failure of one request ends all of them."""

    def __init__(self, streams: Sequence[RequestStream], news: asyncio.Event) -> None:
        assert streams, "an answer has at least one request"
        self.request_id = streams[0].request_id
        self.choices: tuple[ChoiceOutput, ...] = tuple(choice for stream in streams for choice in stream.choices)
        self._streams = tuple(streams)
        self._news = news

    @property
    def usage(self) -> Usage | None:
        """Returns the sum over all requests once each has ended well, otherwise None."""
        usages = [stream.usage for stream in self._streams if stream.usage is not None]
        return usage_sum(usages) if len(usages) == len(self._streams) else None

    @property
    def degraded(self) -> list[dict[str, object]]:
        """Lists the media that the model did not get as they were sent, as JSON objects."""
        return [step.to_json() for stream in self._streams for step in stream.degraded]

    @property
    def answer(self) -> AnswerPlan:
        """Says how the text of a choice is read; it is the same for all choices."""
        return self._streams[0].answer

    @property
    def sample_rate(self) -> int:
        """Returns the samples per second of the sound, or 0 if the answer is not spoken."""
        audio = self._streams[0].audio
        return 0 if audio is None else audio.sample_rate

    @property
    def media_s(self) -> float:
        """Returns the length of the videos and sounds of all requests, in seconds."""
        return sum(stream.media_s for stream in self._streams)

    def record(self) -> dict[str, object]:
        """Returns the record of the first request as JSON values."""
        return self._streams[0].record()

    def prompt_token_ids(self, choice: int) -> tuple[int, ...]:
        """Returns the ids of the prompt to which a choice belongs. They are final once the request is started; those of
        a request without media are from the beginning."""
        return self._stream_of(choice).prompt_token_ids

    def _stream_of(self, choice: int) -> RequestStream:
        for stream in self._streams:
            if choice < len(stream.choices):
                return stream
            choice -= len(stream.choices)
        raise IndexError("the answer has no such choice")

    def prompt_logprobs(self, choice: int) -> PromptLogprobs | None:
        """Returns the log-probabilities of the prompt to which a choice belongs, once the requests have ended; None if
        they were not asked for."""
        return self._stream_of(choice).prompt_logprobs

    @property
    def num_scores(self) -> int:
        """Counts the log-probabilities of the whole answer, once the requests have ended."""
        return sum(
            stream.num_prompt_scores + stream.scores_per_token * stream.usage.num_completion_tokens
            for stream in self._streams
            if stream.usage is not None
        )

    @property
    def embeddings(self) -> list[bytes]:
        """Returns the embedding of each request, once the requests have ended."""
        return [stream.embedding for stream in self._streams]

    async def started(self) -> None:
        """Waits until one of the requests has its first token. Raises the failure of a request that failed before
        that."""
        if len(self._streams) == 1:
            await self._streams[0].started()
            return
        waits = [asyncio.ensure_future(stream.started()) for stream in self._streams]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()

    async def ended(self) -> None:
        """Waits until the request has ended. With several requests it does not wait, because the first failure among
        them ends all."""
        if len(self._streams) == 1:
            await self._streams[0].ended()

    def __aiter__(self) -> JoinedStreams:
        return self

    async def __anext__(self) -> list[Delta]:
        """Returns everything new since the last call, at most one delta per choice. Raises the failure that ended a
        request, after what came before it was read."""
        while True:
            await self._news.wait()
            self._news.clear()
            deltas = self._take_new()
            errors = [stream.error for stream in self._streams if stream.error is not None]
            is_over = bool(errors) or self.usage is not None
            if is_over:
                self._news.set()
            if deltas:
                return deltas
            if errors:
                raise errors[0]
            if is_over:
                raise StopAsyncIteration

    def close(self) -> None:
        """Closes the reader's side; requests that still run end."""
        for stream in self._streams:
            stream.close()

    def _take_new(self) -> list[Delta]:
        deltas: list[Delta] = []
        offset = 0
        for stream in self._streams:
            taken = stream.take_new()
            deltas += [delta._replace(choice=delta.choice + offset) for delta in taken] if offset else taken
            offset += len(stream.choices)
        return deltas
