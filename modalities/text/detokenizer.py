"""Token ids to text as they come, never half a character.

Byte-level tokens are pieces of one UTF-8 byte stream, so the state is the few bytes of an unfinished character and
each token is looked at once. Does not know stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from modalities.text.codec import TextCodec


class IncrementalDetokenizer:
    """One choice's output. What was pushed and flushed, joined, is `codec.decode` of all its ids.

    Rebuilt elsewhere by pushing the ids again.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete; special tokens give nothing."""
        return self._decoder.decode(b"".join(map(self._bytes, token_ids)))

    def flush(self) -> str:
        """Of an unfinished character, U+FFFD; else nothing. The next push starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._codec.special_token_ids else token_bytes(self._codec, token_id)


def token_bytes(codec: TextCodec, token_id: int) -> bytes:
    """What a token stands for, a special one for its name; nothing for an id without a token."""
    text = codec.token_text(token_id)
    if text is None:
        return b""
    if token_id in codec.special_token_ids:
        return text.encode()
    try:
        return bytes(map(LETTER_TO_BYTE.__getitem__, text))
    except KeyError:
        # An added token may hold characters that are no byte's letter: then it is meant as it stands.
        return text.encode()


def _letter_to_byte() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


LETTER_TO_BYTE = _letter_to_byte()
