"""Writes the answers of the endpoints that generate, whole or as server-sent events, from the deltas of their requests.

An `AnswerWriter` turns what an `AnswerSource` yields into OpenAI's formats: `ChatAnswer` for chat completions and
`CompletionAnswer` for completions. A `PieceReader` tells calls of tools and reasoning apart from the text, and
`FreshTokens` hands out what a client may ask for besides the text. The module knows nothing of HTTP connections, and
the formats themselves are those of `router.api`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from fabric.contracts import WeftError
from modalities.answers import AnswerPiece, JsonScanner, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallStart
from router.api import (
    DONE,
    ChatRequest,
    ChoiceText,
    ChunkWriter,
    CompletedCall,
    CompletionChunkWriter,
    CompletionRequest,
    CompletionText,
    Head,
    ScoredToken,
    TextOffset,
    TokenBytes,
    TokenDetailFields,
    Usage,
    completion,
    error_event,
    logprobs_object,
    prompt_logprobs_list,
    text_completion,
)
from router.prompt import new_call_id
from router.run import ChoiceOutput, Delta, JoinedStreams

Decode = Callable[[Sequence[int]], str]


class AnswerTools(NamedTuple):
    """Holds what writers need of the model."""

    bytes_of: TokenBytes
    decode: Decode
    """Returns the text of token ids."""


class AnswerWriter(Protocol):
    """Writes one answer. For a stream, `opening` comes first, then `events` for each batch of deltas, and `closing` or
    `failure` last. For a whole answer, `take` gets each batch, and `whole` comes last."""

    def opening(self) -> bytes: ...

    def events(self, deltas: Sequence[Delta]) -> bytes: ...

    def closing(self) -> bytes: ...

    def failure(self, error: WeftError) -> bytes | None:
        """Returns what tells a client of a failure in mid-stream, or None if the stream can't: it is then cut."""
        ...

    def take(self, deltas: Sequence[Delta]) -> None: ...

    def whole(self) -> bytes: ...


class FreshTokens:
    """A `FreshTokens` gives out the tokens of one answer, each once per choice, if the client asked for their ids or
    log-probabilities."""

    def __init__(self, source: JoinedStreams, request: TokenDetailFields) -> None:
        self.has_ids = bool(request.return_token_ids)
        self.has_logprobs = request.num_top_logprobs is not None
        self.is_wanted = self.has_ids or self.has_logprobs
        self._choices = source.choices
        self._num_taken = [0] * len(source.choices)

    def has_given(self, choice: int) -> bool:
        """Tells whether tokens of the choice were given out already."""
        return self._num_taken[choice] > 0

    def take(self, choice: int) -> tuple[tuple[int, ...], list[ScoredToken]]:
        """Returns the ids of the tokens that no earlier call has returned, and the tokens with their log-probabilities,
        of which there are none if the client did not ask for them."""
        output, start = self._choices[choice], self._num_taken[choice]
        token_ids = output.emitted_from(start)
        self._num_taken[choice] += len(token_ids)
        return token_ids, output.scored_from(start) if self.has_logprobs else []


class PieceReader:
    """A `PieceReader` reads the pieces of one answer (text, reasoning, calls of tools) out of its deltas."""

    def __init__(self, source: JoinedStreams) -> None:
        self._source, self._answer = source, source.answer
        num = len(source.choices)
        self._parsers = [] if self._answer.is_plain else [self._answer.parser() for _ in range(num)]
        self._latest_calls: list[JsonScanner | None] = [None] * num
        """Follows the arguments of each choice's latest call."""

    def pieces(self, delta: Delta) -> list[AnswerPiece]:
        """Returns the pieces that a delta completes. The order of deltas must be that of their choice's text."""
        pieces = self.push(delta.choice, delta.text)
        return pieces if delta.finish_reason is None else pieces + self.flush(delta.choice)

    def push(self, choice: int, text: str) -> list[AnswerPiece]:
        """Returns the pieces that the next text of a choice completes."""
        if not text:
            return []
        return self._noted(choice, self._parsers[choice].push(text)) if self._parsers else [TextPiece(text)]

    def num_held(self, choice: int) -> int:
        """Counts the characters at the end of a choice's text of which it is not certain yet what they are."""
        return self._parsers[choice].num_held if self._parsers else 0

    def flush(self, choice: int) -> list[AnswerPiece]:
        """Returns the pieces that the end of a choice completes. It is called once per choice."""
        return self._noted(choice, self._parsers[choice].flush()) if self._parsers else []

    def _noted(self, choice: int, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                self._latest_calls[choice] = JsonScanner()
            elif isinstance(piece, ToolCallArguments):
                call = self._latest_calls[choice]
                assert call is not None, "arguments belong to a call"
                call.feed(piece.text)
        return pieces

    def is_call_open(self, choice: int) -> bool:
        """Tells whether the arguments of the choice's latest call are no whole JSON."""
        call = self._latest_calls[choice]
        return call is not None and not call.can_end

    def finish_reason(self, choice: int, reason: str) -> str:
        """Returns the finish reason of a choice as clients see it: a choice that ended by itself after a call of a tool
        ended for the call. A call that a stop string or a stop token has cut must not be made."""
        has_calls = self._latest_calls[choice] is not None
        return "tool_calls" if reason == "stop" and has_calls and not self.is_call_open(choice) else reason

    def usage(self) -> Usage:
        """Returns the token counts of the whole answer, once it has ended."""
        usage = self._source.usage
        assert usage is not None
        if self._answer.reasoning is None:
            return usage
        ranges = [parser.reasoning_range for parser in self._parsers]
        counts = map(ChoiceOutput.num_tokens_in, self._source.choices, *zip(*ranges, strict=True))
        return usage._replace(num_reasoning_tokens=sum(counts))

    def new_call_id(self) -> str:
        return new_call_id(self._answer.tools)


class GatheredChoice:
    """A `GatheredChoice` collects the pieces of one choice of a whole answer."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CompletedCall] = []
        self._arguments: list[list[str]] = []
        self.finish_reason = ""

    def add(self, piece: AnswerPiece, new_call_id: Callable[[], str]) -> None:
        match piece:
            case TextPiece(text):
                self.texts.append(text)
            case ReasoningPiece(text):
                self.reasoning.append(text)
            case ToolCallStart(_, name):
                self.calls.append(CompletedCall(new_call_id(), name, ""))
                self._arguments.append([])
            case ToolCallArguments(index, text):
                self._arguments[index].append(text)

    @property
    def completed_calls(self) -> list[CompletedCall]:
        pairs = zip(self.calls, self._arguments, strict=True)
        return [call._replace(arguments="".join(texts)) for call, texts in pairs]


class ChatAnswer:
    """Writes a chat completion. With `echo`, each choice begins with the text of the last message."""

    def __init__(self, source: JoinedStreams, request: ChatRequest, head: Head, tools: AnswerTools) -> None:
        self._source, self._head, self._tools = source, head, tools
        self._wants_explanation = request.wants_explanation  # The request itself may hold megabytes of media.
        self._writer = ChunkWriter(head, request.wants_usage_chunk)
        self._fresh = FreshTokens(source, request)
        self._reader = PieceReader(source)
        self._gathered = [GatheredChoice() for _ in source.choices]
        self._echoed = request.echoed_text
        self._is_empty = [not self._echoed] * len(source.choices)
        self._shows_reasoning = request.include_reasoning is not False

    def opening(self) -> bytes:
        return b"".join(
            self._writer.role(choice, self._prompt_token_ids)
            + (self._writer.text(choice, self._echoed) if self._echoed else b"")
            for choice in range(len(self._source.choices))
        )

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(event for delta in deltas for event in self._events(delta))

    def closing(self) -> bytes:
        return self._writer.last(self._reader.usage(), self._source.degraded, self._explanation) + DONE

    def failure(self, error: WeftError) -> bytes:
        return error_event(error)

    def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            gathered = self._gathered[delta.choice]
            for piece in self._reader.pieces(delta):
                gathered.add(piece, self._reader.new_call_id)
            if delta.finish_reason is not None:
                gathered.finish_reason = self._reader.finish_reason(delta.choice, delta.finish_reason)

    def whole(self) -> bytes:
        return completion(
            self._head,
            [self._choice_text(at) for at in range(len(self._gathered))],
            self._reader.usage(),
            self._prompt_token_ids,
            self._source.degraded,
            self._explanation,
            prompt_logprobs_list(self._source.prompt_logprobs(0), self._tools.bytes_of),
        )

    def _choice_text(self, at: int) -> ChoiceText:
        """Returns a choice of the whole answer."""
        each = self._gathered[at]
        return ChoiceText(
            at,
            self._echoed + "".join(each.texts),
            each.finish_reason,
            self._details(at),
            "".join(each.reasoning) if self._shows_reasoning else "",
            each.completed_calls,
        )

    def _events(self, delta: Delta) -> Iterator[bytes]:
        """Yields the events of one delta. Details go with the first event, or alone if there is none. An answer without
        any text gets an event with an empty one: `vllm bench serve` counts a stream without text as failed."""
        choice = delta.choice
        pieces = self._reader.pieces(delta)
        details = self._details(choice) if pieces or self._fresh.is_wanted else {}
        for piece in pieces:
            event = self._event(choice, piece, details)
            if event:
                yield event
                details, self._is_empty[choice] = {}, False
        if delta.finish_reason is not None:
            if self._is_empty[choice]:
                yield self._writer.text(choice, "", details)
                details = {}
            reason = self._reader.finish_reason(choice, delta.finish_reason)
            yield self._writer.finish(choice, reason, details, self._source.degraded)
        elif details and details.get("token_ids", details.get("logprobs")):
            yield self._writer.details(choice, details)

    def _event(self, choice: int, piece: AnswerPiece, details: dict[str, object]) -> bytes:
        match piece:
            case TextPiece(text):
                return self._writer.text(choice, text, details)
            case ReasoningPiece(text):
                return self._writer.reasoning(choice, text, details) if self._shows_reasoning else b""
            case ToolCallStart(index, name):
                call = CompletedCall(self._reader.new_call_id(), name, "")
                return self._writer.call_start(choice, index, call, details)
            case ToolCallArguments(index, text):
                return self._writer.call_arguments(choice, index, text, details)

    def _details(self, choice: int) -> dict[str, object]:
        """Returns the fields of a choice for its fresh tokens. The first chunk of a choice has log-probabilities even
        if there are none yet."""
        if not self._fresh.is_wanted:
            return {}
        is_first = not self._fresh.has_given(choice)
        token_ids, scored = self._fresh.take(choice)
        fields: dict[str, object] = {"token_ids": token_ids} if self._fresh.has_ids else {}
        if self._fresh.has_logprobs and (token_ids or is_first):
            fields["logprobs"] = logprobs_object(scored, self._tools.bytes_of)
        return fields

    @property
    def _prompt_token_ids(self) -> tuple[int, ...] | None:
        return self._source.prompt_token_ids(0) if self._fresh.has_ids else None

    @property
    def _explanation(self) -> dict[str, object] | None:
        return self._source.record() if self._wants_explanation else None


class CompletionAnswer:
    """Writes a completion. With `echo`, each choice begins with its prompt."""

    def __init__(self, source: JoinedStreams, request: CompletionRequest, head: Head, tools: AnswerTools) -> None:
        self._source, self._request, self._head, self._tools = source, request, head, tools
        self._writer = CompletionChunkWriter(head, request.wants_usage_chunk)
        self._fresh = FreshTokens(source, request)
        self._texts = [[self._echo(choice)] for choice in range(len(source.choices))]
        self._offsets = [TextOffset(len(texts[0])) for texts in self._texts]
        self._reasons = [""] * len(self._texts)

    def opening(self) -> bytes:
        """Returns the echoed prompts, if the client asked for them."""
        if not self._request.echo:
            return b""
        return b"".join(self._writer.text(at, pieces[0], None, {}) for at, pieces in enumerate(self._texts))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(
            self._writer.text(delta.choice, delta.text, delta.finish_reason, self._details(delta.choice))
            for delta in deltas
        )

    def closing(self) -> bytes:
        assert self._source.usage is not None
        return self._writer.last(self._source.usage, self._explanation) + DONE

    def failure(self, error: WeftError) -> bytes:
        return error_event(error)

    def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._texts[delta.choice].append(delta.text)
            self._reasons[delta.choice] = delta.finish_reason or self._reasons[delta.choice]

    def whole(self) -> bytes:
        assert self._source.usage is not None
        choices = [
            CompletionText(at, "".join(pieces), self._reasons[at], self._scores(at) | self._details(at))
            for at, pieces in enumerate(self._texts)
        ]
        return text_completion(self._head, choices, self._source.usage, self._explanation)

    def _echo(self, choice: int) -> str:
        return self._tools.decode(self._source.prompt_token_ids(choice)) if self._request.echo else ""

    def _details(self, choice: int) -> dict[str, object]:
        if not self._fresh.is_wanted:
            return {}
        is_first = not self._fresh.has_given(choice)
        token_ids, scored = self._fresh.take(choice)
        fields: dict[str, object] = {"token_ids": token_ids} if self._fresh.has_ids else {}
        if self._fresh.has_ids and is_first:
            fields["prompt_token_ids"] = self._source.prompt_token_ids(choice)
        if self._fresh.has_logprobs:
            lists = self._echoed(choice)
            fresh = self._offsets[choice].logprobs(scored, self._tools.bytes_of, self._num_top)
            lists = {name: [*lists.get(name, ()), *values] for name, values in fresh.items()}
            fields["logprobs"] = lists if self._num_top else lists | {"top_logprobs": None}
        return fields

    def _echoed(self, choice: int) -> dict[str, list[object]]:
        """Returns the lists of log-probabilities of the echoed prompt; none if it is not echoed."""
        scores = self._source.prompt_logprobs(choice)
        if scores is None or not self._request.echo:
            return {}
        offset, token_ids = self._offsets[choice], self._source.prompt_token_ids(choice)
        offset.num_chars = 0
        return offset.prompt_logprobs(token_ids, scores, self._tools.bytes_of, self._num_top)

    def _scores(self, choice: int) -> dict[str, object]:
        """Returns the choice's `prompt_logprobs`, if the client asked for them."""
        if self._request.prompt_logprobs is None:
            return {}
        scores = self._source.prompt_logprobs(choice)
        return {"prompt_logprobs": prompt_logprobs_list(scores, self._tools.bytes_of)}

    @property
    def _num_top(self) -> int:
        return self._request.num_top_logprobs or 0

    @property
    def _explanation(self) -> dict[str, object] | None:
        return self._source.record() if self._request.wants_explanation else None
