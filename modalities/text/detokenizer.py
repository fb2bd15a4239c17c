"""Turns token ids into text as they arrive, without ever returning half a character.

Byte-level tokens are pieces of one UTF-8 byte stream, so the state is the few bytes of an unfinished character and each
token is read once. This module knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from modalities.text.codec import TextCodec


class IncrementalDetokenizer:
    """Decodes the output of one choice. The joined results of `push` and `flush` equal `codec.decode` of all its ids.

    Another process rebuilds its state by pushing the same ids again.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
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
        return b"" if token_id in self._codec.special_token_ids else token_bytes(self._codec, token_id)


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
