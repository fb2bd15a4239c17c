"""Tells which tokens of an answer belong to its text, where the answer has calls of tools and reasoning too.

A `ScoredPieces` gives the answer to a parser token by token. The parser holds text back while it may still become a
call, so the tokens of that text wait with it. The module knows nothing of how pieces are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from modalities.answers import AnswerPiece, TextPiece, join_pieces
from router.api import ScoredToken
from router.edge.answers import PieceReader
from router.run import ChoiceOutput, Delta


class ScoredPiece(NamedTuple):
    """A `ScoredPiece` is a piece with the tokens of its text; other pieces than text have none."""

    piece: AnswerPiece
    tokens: Sequence[ScoredToken] = ()


class _Waiting(NamedTuple):
    token: ScoredToken
    start: int
    end: int

    def is_in(self, start: int, end: int) -> bool:
        """Tells whether a part of the token is in this range of characters. A token without text belongs to the
        character behind it, of which it may be the first bytes."""
        return self.start < end and (self.end > start or self.start == start)


class ScoredPieces:
    """A `ScoredPieces` reads one choice, whose tokens must have log-probabilities. It counts characters from the
    beginning of the choice."""

    def __init__(self, choice: ChoiceOutput, reader: PieceReader) -> None:
        self._choice, self._reader = choice, reader
        self._num_tokens = 0
        self._num_chars = 0
        self._num_certain = 0
        """Counts the characters of which the parser has said what they are."""
        self._waiting: list[_Waiting] = []
        """Holds the tokens behind those characters."""

    def read(self, delta: Delta) -> list[ScoredPiece]:
        """Returns the pieces that a delta of the choice completes, neighbours of one kind joined."""
        found: list[ScoredPiece] = []
        for text in self._texts_by_token(delta.text):
            pieces = self._reader.push(delta.choice, text)
            found += self._scored(pieces, self._num_chars - self._reader.num_held(delta.choice))
        if delta.finish_reason is not None:
            found += self._scored(self._reader.flush(delta.choice), self._num_chars)
        return list(_joined(found))

    def _texts_by_token(self, text: str) -> Iterator[str]:
        """Yields a text cut at the ends of its tokens. Before each part, the token to which it belongs is added to
        those that wait. A stop string may hold back a part of a token, which then comes with a later text."""
        begin, end, ends = self._num_chars, self._num_chars + len(text), self._choice.text_ends

        def part_to(stop: int) -> str:
            start, self._num_chars = self._num_chars, min(stop, end)
            return text[start - begin : self._num_chars - begin]

        if self._num_tokens and ends[self._num_tokens - 1] > begin:
            yield part_to(ends[self._num_tokens - 1])
        for token in self._choice.scored_from(self._num_tokens):
            token_end = ends[self._num_tokens]
            if self._num_chars >= end and token_end > end:
                break
            self._num_tokens += 1
            self._waiting.append(_Waiting(token, self._num_chars, min(token_end, end)))
            yield part_to(token_end)

    def _scored(self, pieces: Sequence[AnswerPiece], num_certain: int) -> Iterator[ScoredPiece]:
        """Yields pieces that the parser has returned at once, which say what the text up to `num_certain` is. Text
        among them stands at its beginning or at its end, because a token is shorter than a call."""
        for at, piece in enumerate(pieces):
            tokens: list[ScoredToken] = []
            if isinstance(piece, TextPiece) and at == len(pieces) - 1:
                tokens = self._take(num_certain - len(piece.text), num_certain)
            elif isinstance(piece, TextPiece) and at == 0:
                tokens = self._take(self._num_certain, self._num_certain + len(piece.text))
            yield ScoredPiece(piece, tokens)
        self._num_certain = num_certain
        self._waiting = [each for each in self._waiting if each.end > num_certain or each.start >= num_certain]

    def _take(self, start: int, end: int) -> list[ScoredToken]:
        """Returns the tokens in a range of characters. They no longer wait."""
        tokens = [each.token for each in self._waiting if each.is_in(start, end)]
        self._waiting = [each for each in self._waiting if not each.is_in(start, end)]
        return tokens


def _joined(found: Iterable[ScoredPiece]) -> Iterator[ScoredPiece]:
    for is_text, group in groupby(found, lambda each: isinstance(each.piece, TextPiece)):
        run = list(group)
        pieces = join_pieces([each.piece for each in run])
        if is_text:
            yield ScoredPiece(pieces[0], [token for each in run for token in each.tokens])
        else:
            yield from map(ScoredPiece, pieces)
