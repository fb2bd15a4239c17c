"""Defines what an answer consists of (text, reasoning, calls of tools), and what a format of tool calls can do.

`PieceSink` collects the pieces that a parser finds. The module knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol


class ToolSpec(NamedTuple):
    """A `ToolSpec` is a function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, object]
    """Holds the JSON schema of the arguments, which are an object. An empty one means that there are no arguments."""


class ToolChoice(NamedTuple):
    """A `ToolChoice` says whether the model may call tools (`auto`), must call one (`required`), must call the tool of
    this name (`named`), or must not call any (`none`)."""

    kind: Literal["none", "auto", "required", "named"]
    name: str = ""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A `TextPiece` is the next part of the plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A `ReasoningPiece` is the next part of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A `ToolCallStart` begins a call; `index` counts the calls of the choice from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A `ToolCallArguments` is the next part of the JSON text of a call's arguments."""

    index: int
    text: str


AnswerPiece = TextPiece | ReasoningPiece | ToolCallStart | ToolCallArguments


class AnswerParser(Protocol):
    """Reads the text of one choice as it comes. The pieces do not depend on how the text is cut into pushes, up to the
    joining of pieces."""

    @property
    def num_held(self) -> int:
        """Counts the characters at the end of the text of which it is not certain yet what they are."""
        ...

    @property
    def reasoning_range(self) -> tuple[int, int]:
        """Returns where the reasoning between the marks begins and ends in the text, in characters; both are equal
        while there is none."""
        ...

    def push(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces that are certain after this text."""
        ...

    def flush(self) -> list[AnswerPiece]:
        """Returns what was held back. It is called once, at the end of the choice, and nothing is pushed after it."""
        ...


class ToolFormat(Protocol):
    """A `ToolFormat` says how a family of models writes calls of tools."""

    @property
    def name(self) -> str: ...

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names the control tokens whose text the parser must see, if the tokenizer has them as special tokens."""
        ...

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, are_parallel: bool, special_token_ids: Mapping[str, int]
    ) -> str:
        """Returns a grammar in llguidance's Lark notation, which is empty if any text is allowed.

        With `required` and `named`, the text is one call (several if `are_parallel`) whose arguments fit the schema of
        the tool. With `auto` it is free text in which every call that begins is completed in this way.
        `special_token_ids` has the ids of those `special_tokens` that the tokenizer has as special tokens; markers
        that are not in it are written as text. Raises InvalidRequest for a name that is none of the tools', and for
        parameters that the format can't be held to."""
        ...

    def parser(self, tools: Sequence[ToolSpec]) -> AnswerParser:
        """Returns a parser for text and calls. A call of any other tool than these is text."""
        ...

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """Returns a system text that tells a model of the tools, for chat templates that do not take them."""
        ...


class PieceSink:
    """A `PieceSink` collects pieces, joins neighbours of the same kind, and counts calls."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._pieces: list[AnswerPiece] = []

    def text(self, text: str) -> None:
        """Adds plain text, which may be empty."""
        if text:
            self._pieces.append(TextPiece(text))

    def reasoning(self, text: str) -> None:
        """Adds reasoning, which may be empty."""
        if text:
            self._pieces.append(ReasoningPiece(text))

    def start_call(self, name: str) -> None:
        """Begins the next call."""
        self._pieces.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the latest call; the text may be empty."""
        if text:
            self._pieces.append(ToolCallArguments(self.num_calls - 1, text))

    def take(self) -> list[AnswerPiece]:
        """Returns the joined pieces since the last call, and forgets them."""
        pieces, self._pieces = self._pieces, []
        return join_pieces(pieces)


def join_pieces(pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
    """Returns the pieces with neighbours of the same kind joined; takes linear time."""
    joined: list[AnswerPiece] = []
    first = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or _kind(pieces[end]) != _kind(pieces[first]):
            joined.append(_joined(pieces[first:end]))
            first = end
    return joined


def _kind(piece: AnswerPiece) -> tuple[object, ...]:
    match piece:
        case ToolCallArguments(index, _):
            return (ToolCallArguments, index)
        case ToolCallStart(index, _):
            return (ToolCallStart, index)
        case _:
            return (type(piece),)


def _joined(run: Sequence[AnswerPiece]) -> AnswerPiece:
    first = run[0]
    if isinstance(first, ToolCallStart):
        return first
    return replace(first, text="".join(piece.text for piece in run if not isinstance(piece, ToolCallStart)))
