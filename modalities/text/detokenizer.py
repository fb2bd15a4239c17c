"""Turns token ids into text as they arrive, without ever returning half a character, and ends the text at a stop
string.

The two classes work in a row: `IncrementalDetokenizer` turns the ids of one choice into text, and `StopStrings` takes
this text and holds back what may belong to a stop string. Byte-level tokens are pieces of one UTF-8 byte stream, so the
detokenizer's state is the few bytes of an unfinished character, and each token is read once. The detokenizer knows
nothing of stop strings, and `StopStrings` knows nothing of tokens. The module knows nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from fabric.contracts import InvalidRequest
from modalities.text.codec import TextCodec


class IncrementalDetokenizer:
    """Decodes the output of one choice. The joined results of `push` and `flush` equal `codec.decode` of all its ids.

    Another process rebuilds its state by pushing the same ids again.
    """

    def __init__(self, codec: TextCodec, shown: frozenset[int] = frozenset()) -> None:
        """Takes the ids of special tokens whose names appear in the text, in `shown`."""
        self._codec = codec
        self._hidden = codec.special_token_ids - shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the characters that these tokens complete; special tokens give no text."""
        return self._decoder.decode(b"".join(map(self._bytes, token_ids)))

    def flush(self) -> str:
        """Returns U+FFFD for an unfinished character, otherwise no text. The next push starts with an empty state."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else token_bytes(self._codec, token_id)


def token_bytes(codec: TextCodec, token_id: int) -> bytes:
    """Returns the bytes of a token: those of its name for a special token, and none for an id without a token."""
    text = codec.token_text(token_id)
    if text is None:
        return b""
    if token_id in codec.special_token_ids:
        return text.encode()
    try:
        return bytes(map(LETTER_TO_BYTE.__getitem__, text))
    except KeyError:
        # An added token may contain a character that stands for no byte; its bytes are then those of its own text.
        return text.encode()


def _letter_to_byte() -> dict[str, int]:
    """Returns GPT-2's alphabet, from letter to byte. A printable byte has its own character as letter; the other bytes
    have letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


LETTER_TO_BYTE = _letter_to_byte()
"""Maps each letter of a byte-level vocabulary to the byte for which it stands."""


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
