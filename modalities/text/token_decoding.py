"""Says what each token contributes to a text, as the decoder of a checkpoint's tokenizer defines it.

There are two kinds of decoders. A byte-level decoder maps each letter of a token to one byte, and the text is the UTF-8
of all bytes. A piece decoder (SentencePiece's, in Llama-2, Vicuna, LLaVA-1.5 and Mistral) replaces "▁" by a blank,
takes tokens such as `<0x0A>` as single bytes, and removes a blank from the start of the text. `TokenDecoding` describes
a decoder of either kind; any other decoder is refused.

This module knows nothing of streams, which are in `detokenizer`, and nothing of how text becomes tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from fabric.contracts import ConfigError

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Matches a token that stands for one byte."""


@dataclass(frozen=True, slots=True)
class TokenDecoding:
    """A `TokenDecoding` describes how tokens become text. The fields other than `is_byte_level` are of piece decoders
    only, and stand in the order in which they are applied."""

    is_byte_level: bool = False
    dropped_at_start: str = ""
    """Holds a character that the first token of a text loses wherever it occurs in the token (Metaspace does this), or
    nothing."""
    replacements: tuple[tuple[str, str], ...] = ()
    """Holds what is replaced inside each token, and by what."""
    has_byte_fallback: bool = False
    """Is true if tokens that match `BYTE_TOKEN` stand for bytes."""
    stripped: str = ""
    """Holds the character that is removed from the start of the text, or nothing."""
    num_stripped: int = 0
    """Limits how many of these characters are removed."""

    def piece(self, token: str, is_first: bool = False) -> str | int:
        """Returns the text of a token, or its byte if it stands for one. `is_first` says that the text begins with this
        token. It is called for piece decoders only."""
        if is_first and self.dropped_at_start:
            token = token.replace(self.dropped_at_start, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = BYTE_TOKEN.fullmatch(token) if self.has_byte_fallback else None
        return token if match is None else int(match[1], 16)

    def token_bytes(self, token: str) -> bytes:
        """Returns the bytes of an ordinary token inside a text."""
        if not self.is_byte_level:
            piece = self.piece(token)
            return bytes((piece,)) if isinstance(piece, int) else piece.encode()
        try:
            return bytes(map(LETTER_TO_BYTE.__getitem__, token))
        except KeyError:
            # An added token may contain a character that stands for no byte; its bytes are then those of its own text.
            return token.encode()


def decoding_of(tokenizer: Tokenizer) -> TokenDecoding:
    """Returns the decoding of the tokenizer. Raises ConfigError, which names the part, for a decoder of another
    kind."""
    if tokenizer.decoder is None:
        raise ConfigError(f"the tokenizer has no decoder; Weft supports {SUPPORTED}")
    decoding, is_fused = TokenDecoding(), False
    for step in _steps(json.loads(tokenizer.decoder.__getstate__())):
        kind = step["type"]
        if decoding.is_byte_level and kind != "Fuse":
            raise _unsupported(kind, "after ByteLevel")
        if is_fused and kind != "Strip":
            raise _unsupported(kind, "after Fuse")
        if kind == "Fuse":
            is_fused = True
        elif kind == "Strip":
            decoding = _with_strip(decoding, step, is_fused)
        elif kind == "ByteLevel" and decoding == TokenDecoding():
            decoding = TokenDecoding(is_byte_level=True)
        elif kind == "ByteFallback" and not decoding.has_byte_fallback:
            decoding = replace(decoding, has_byte_fallback=True)
        elif kind in ("Replace", "Metaspace") and not decoding.has_byte_fallback:
            decoding = _with_replacement(decoding, step)
        else:
            raise _unsupported(kind, "there")
    return decoding


def _steps(decoder: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yields the parts of a decoder in their order, with sequences inside sequences taken apart."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for part in decoder["decoders"]:
        yield from _steps(part)


def _with_strip(decoding: TokenDecoding, step: Mapping[str, Any], is_fused: bool) -> TokenDecoding:
    if not is_fused:
        raise _unsupported("Strip", "before Fuse, where it strips each token")
    if step["stop"]:
        raise _unsupported("Strip", f"with stop={step['stop']}, because the end of a stream is not known")
    if decoding.num_stripped:
        raise _unsupported("Strip", "twice")
    return replace(decoding, stripped=step["content"], num_stripped=step["start"])


def _with_replacement(decoding: TokenDecoding, step: Mapping[str, Any]) -> TokenDecoding:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        if not pattern:
            raise _unsupported("Replace", f"with the pattern {step['pattern']}")
        return replace(decoding, replacements=(*decoding.replacements, (pattern, step["content"])))
    if decoding.replacements:
        raise _unsupported("Metaspace", "after another replacement")
    mark, scheme = step["replacement"], step.get("prepend_scheme", "always")
    return replace(decoding, dropped_at_start="" if scheme == "never" else mark, replacements=((mark, " "),))


SUPPORTED = (
    "byte-level decoders, and decoders of pieces that consist of Replace or Metaspace, ByteFallback, Fuse and Strip in "
    "this order"
)


def _unsupported(kind: str, where: str) -> ConfigError:
    return ConfigError(f"the decoder of the tokenizer has the part {kind} {where}; Weft supports {SUPPORTED}")


def _letter_to_byte() -> dict[str, int]:
    """Returns GPT-2's alphabet, from letter to byte. A printable byte has its own character as letter; the other bytes
    have letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


LETTER_TO_BYTE = _letter_to_byte()
"""Maps each letter of a byte-level vocabulary to the byte for which it stands."""
