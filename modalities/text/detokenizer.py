"""Turns token ids into text as they arrive, without ever returning half a character, and ends the text at a stop
string.

The two classes work in a row: `IncrementalDetokenizer` turns the ids of one choice into text, and `StopStrings` takes
this text and holds back what may belong to a stop string. Each token is read once, and the state is small, for
byte-level tokens as well as for SentencePiece's. The detokenizer knows nothing of stop strings, and `StopStrings` knows
nothing of tokens. The module knows nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fabric.contracts import InvalidRequest
from modalities.text.codec import TextCodec


class IncrementalDetokenizer:
    """Decodes the output of one choice. The joined results of `push` and `flush` equal `codec.decode` of all its ids,
    wherever the ids are cut.

    Another process rebuilds its state by pushing the same ids again.
    """

    def __init__(self, codec: TextCodec, follows_text: bool = False, shown: Collection[int] = frozenset()) -> None:
        """Starts a text. `follows_text` says that the text continues the text of a prompt (a raw completion), so that
        a blank at its start is kept; see `TextCodec.decode`. `shown` holds the ids of special tokens whose names appear
        in the text."""
        stream = _ByteStream if codec.decoding.is_byte_level else _PieceStream
        self._stream: _ByteStream | _PieceStream = stream(codec, follows_text, shown)

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the characters that these tokens complete; special tokens give no text."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """Returns the text that was held back: U+FFFD for an unfinished character, and with byte fallback the text of
        the last bytes. The next push starts a new text."""
        return self._stream.flush()


class _ByteStream:
    """A `_ByteStream` decodes byte-level tokens. Its state is the few bytes of an unfinished character."""

    def __init__(self, codec: TextCodec, follows_text: bool, shown: Collection[int]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        id_to_name = {each: (codec.token_text(each) or "").encode() for each in shown}
        shown_bytes = codec.shown_bytes

        def named_bytes(token_id: int) -> bytes:
            name = id_to_name.get(token_id)
            return shown_bytes(token_id) if name is None else name

        self._bytes = named_bytes if id_to_name else shown_bytes

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes, token_ids)))

    def flush(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class _PieceStream:
    """A `_PieceStream` decodes SentencePiece tokens. Its state is what the start of the text still loses, and the
    current run of byte tokens.

    A run is shown when it has ended, because the library `tokenizers` decodes it as a whole: if one byte of it is not
    UTF-8, each of its bytes becomes U+FFFD. A new line is often a byte token (`<0x0A>`), so it appears one token
    later."""

    def __init__(self, codec: TextCodec, follows_text: bool, shown: Collection[int]) -> None:
        self._codec = codec
        self._shown = frozenset(shown)
        self._decoding = codec.decoding
        self._follows_text = follows_text
        self._restart()

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            piece = self._piece(token_id)
            if piece is None:
                continue
            self._is_first = False
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                parts.append(self._ended_run())
            parts.append(piece)
        return self._stripped("".join(parts))

    def flush(self) -> str:
        rest = self._stripped(self._ended_run())
        self._restart()
        return rest

    def _restart(self) -> None:
        self._run = bytearray()
        self._is_first = not self._follows_text
        self._num_to_strip = 0 if self._follows_text else self._decoding.num_stripped

    def _piece(self, token_id: int) -> str | int | None:
        if token_id in self._shown:
            return self._codec.token_text(token_id)
        if self._is_first and self._decoding.dropped_at_start:
            token = self._codec.token_text(token_id)
            if token is None or token_id in self._codec.special_token_ids:
                return None
            return self._decoding.piece(token, is_first=True)
        return self._codec.shown_piece(token_id)

    def _ended_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != self._decoding.stripped:
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


def token_bytes(codec: TextCodec, token_id: int) -> bytes:
    """Returns the bytes of a token inside a text: those of its name for a special token, and none for an id without a
    token."""
    text = codec.token_text(token_id)
    if text is None:
        return b""
    return text.encode() if token_id in codec.special_token_ids else codec.decoding.token_bytes(text)


class StopStrings:
    """Ends a text at the stop string that is complete first; if several end at the same place, the longest one counts.

    The result for a text does not depend on how it is cut into pushes: it is as if the text came letter by letter.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty stop string."""
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._prefixes = frozenset(stop[:end] for stop in self._stops for end in range(1, len(stop)))
        self._max_held = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> StopResult:
        """Returns the text before a stop string, but never the stop string or the text after it. After a hit every push
        returns that hit and no text."""
        if self._hit is not None:
            return StopResult("", self._hit)
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self._hit = min(found)
            self._held = ""
            return StopResult(text[:start], self._hit)
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return StopResult(text[:cut], None)

    def flush(self) -> str:
        """Returns the text that was held back; call it when the stream ends without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest suffix of the text that begins a stop string."""
        lengths = range(min(self._max_held, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)


class StopResult(NamedTuple):
    text: str
    """Holds the text that may be shown now, because it is part of no stop string."""
    hit: str | None
    """Names the stop string that ended the text, or is None."""
