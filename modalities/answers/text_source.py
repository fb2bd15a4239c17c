"""Lets a parser be written as a function that reads a text from left to right, although the text comes in parts.

Such a function is a generator: it reads from a `TextSource`, writes to a `PieceSink`, and yields where it needs the
next part. `StreamedParser` runs it as an `AnswerParser`, and `CallsAloneParser` does so where nothing but calls can be
read. `read_text_until` and `read_calls_in_text` are the two loops that the formats share. The module knows no marker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from modalities.answers.json_scanner import WHITESPACE
from modalities.answers.pieces import AnswerParser, AnswerPiece, PieceSink, TextPiece

Result = TypeVar("Result")
Reading = Generator[None, None, Result]


class TextSource:
    """A `TextSource` holds the part of a text that is being read, and keeps what was read since `keep`.

    Each character is copied a fixed number of times, however short the parts are."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_ended = False
        self._num_earlier = 0
        self._kept: list[str] | None = None
        self._kept_from = 0
        self._num_kept = 0

    def refill(self, text: str) -> None:
        """Replaces the part, all of which has been read, by the next one."""
        if self._kept is not None:
            self._kept.append(self.text[self._kept_from :])
            self._num_kept += len(self.text) - self._kept_from
            self._kept_from = 0
        self._num_earlier += len(self.text)
        self.text, self.position = text, 0

    @property
    def num_read(self) -> int:
        """Counts the characters that were read of the whole text."""
        return self._num_earlier + self.position

    def more(self) -> Reading[bool]:
        """Returns whether there is a next character; waits for it, and returns False at the end of the text."""
        while self.position == len(self.text):
            if self.is_ended:
                return False
            yield
        return True

    @property
    def is_at_end(self) -> bool:
        return self.is_ended and self.position == len(self.text)

    def keep(self) -> None:
        """Keeps what is read from here on, until `forget` or `take_kept`."""
        self._kept, self._kept_from, self._num_kept = [], self.position, 0

    @property
    def num_kept(self) -> int:
        """Counts the characters that are kept."""
        return 0 if self._kept is None else self._num_kept + self.position - self._kept_from

    def forget(self) -> None:
        """Drops what was kept."""
        self._kept = None

    def take_kept(self) -> str:
        """Returns what was read since `keep`, and drops it. Returns an empty text if nothing is kept."""
        if self._kept is None:
            return ""
        kept = "".join(self._kept) + self.text[self._kept_from : self.position]
        self._kept = None
        return kept

    def take(self, end: int) -> str:
        """Reads up to the index `end` of the part, and returns this text."""
        text = self.text[self.position : end]
        self.position = end
        return text

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it, or an empty text at the end."""
        return self.text[self.position] if (yield from self.more()) else ""

    def skip(self, literal: str) -> Reading[bool]:
        """Reads `literal`, or as much of it as is there. Returns whether all of it was."""
        return bool((yield from self.skip_one_of((literal,))))

    def skip_one_of(self, literals: Sequence[str]) -> Reading[str]:
        """Reads one of these texts, or as much of one as is there. Returns which one it was, or an empty text. None may
        be the beginning of another."""
        num_read = 0
        while literals:
            char = yield from self.peek()
            literals = [literal for literal in literals if literal[num_read] == char]
            if literals:
                self.position += 1
                num_read += 1
                if num_read == len(literals[0]):
                    return literals[0]
        return ""

    def skip_all(self, chars: str) -> Reading[None]:
        """Reads all characters up to the first that is not in `chars`."""
        while (yield from self.more()) and self.text[self.position] in chars:
            self.position += 1


class StreamedParser:
    """Runs a reading function as an `AnswerParser`."""

    def __init__(self, read: Callable[[TextSource, PieceSink], Reading[None]]) -> None:
        self._source, self._sink = TextSource(), PieceSink()
        self._reading = read(self._source, self._sink)

    @property
    def num_held(self) -> int:
        return self._source.num_kept

    @property
    def reasoning_range(self) -> tuple[int, int]:
        return 0, 0

    def push(self, text: str) -> list[AnswerPiece]:
        self._source.refill(text)
        next(self._reading)
        return self._sink.take()

    def flush(self) -> list[AnswerPiece]:
        self._source.is_ended = True
        next(self._reading, None)
        return self._sink.take()


class CallsAloneParser:
    """Reads an answer that can consist of calls alone, because its grammar allows nothing else. An answer that ends
    before the name and the arguments of a call are known shows nothing of this call: its markup is no text."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    @property
    def num_held(self) -> int:
        return self._parser.num_held

    @property
    def reasoning_range(self) -> tuple[int, int]:
        return self._parser.reasoning_range

    def push(self, text: str) -> list[AnswerPiece]:
        return self._parser.push(text)

    def flush(self) -> list[AnswerPiece]:
        return [piece for piece in self._parser.flush() if not isinstance(piece, TextPiece)]


def read_plain_text(source: TextSource, sink: PieceSink) -> Reading[None]:
    """Reads a text in which nothing has a meaning."""
    while (yield from source.more()):
        sink.text(source.take(len(source.text)))


def read_text_until(source: TextSource, sink: PieceSink, marker: str) -> Reading[bool]:
    """Reads text up to and including `marker`, and keeps the marker. Returns False at the end of the text.

    The marker's first character must occur in it only once, because no character is looked at twice."""
    assert marker.find(marker[0], 1) < 0
    while (yield from source.more()):
        at = source.text.find(marker[0], source.position)
        sink.text(source.take(len(source.text) if at < 0 else at))
        if at >= 0:
            source.keep()
            if (yield from source.skip(marker)):
                return True
            sink.text(source.take_kept())
    return False


def read_calls_in_text(
    source: TextSource,
    sink: PieceSink,
    marker: str,
    read_opening: Callable[[], Reading[bool]],
    read_call: Callable[[], Reading[bool]],
) -> Reading[None]:
    """Reads an answer in which calls stand in text.

    `read_opening` reads what begins a call at the beginning of the answer and behind another call, after whitespace;
    anywhere else `marker` begins one. `read_call` reads the rest of a call and returns whether it ended as it should.
    It calls `source.forget` as soon as it is sure that there is a call. What is kept when it returns becomes text, so
    a broken call costs nothing of the text. Whitespace is dropped where nothing but calls and the ends of the answer
    are beside it."""
    is_beside_call = True
    while True:
        is_open = False
        if is_beside_call:
            source.keep()
            yield from source.skip_all(WHITESPACE)
            is_open = yield from read_opening()
        if not is_open:
            _emit_kept(source, sink)
            if not (yield from read_text_until(source, sink, marker)):
                return
        is_beside_call = yield from read_call()
        if not is_beside_call:
            _emit_kept(source, sink)


def _emit_kept(source: TextSource, sink: PieceSink) -> None:
    kept = source.take_kept()
    if kept.strip(WHITESPACE) or not (source.is_at_end and sink.num_calls):
        sink.text(kept)
