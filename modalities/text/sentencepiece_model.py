"""Builds a tokenizer from tokenizer.model, the file of SentencePiece, for directories without tokenizer.json (Vicuna).

The file is a protocol buffer of a few fields. This module reads them itself, because the package `sentencepiece` is not
needed otherwise, and transformers' converters refuse to run without it. The tokenizer is the one from which the
tokenizer.json of such a checkpoint is made: the same vocabulary, the merges that follow from the scores, and byte
fallback as the file says.

Sources: `sentencepiece_model.proto` of SentencePiece, and `generate_merges` in transformers/convert_slow_tokenizer.py
of 5.23. This module knows nothing of the other files of a directory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE, Unigram

from fabric.contracts import ConfigError
from modalities.text.tokenizer_parts import MARK, SPACE

UNIGRAM, BYTE_PAIRS = 1, 2
"""These are the numbers of the types of models that are supported (`TrainerSpec.ModelType`)."""
CONTROL, USER_DEFINED = 3, 4
"""These are the numbers of the types of pieces that become added tokens (`ModelProto.SentencePiece.Type`)."""


@dataclass(slots=True)
class SentencePieces:
    """`SentencePieces` holds what a tokenizer.model says, with the defaults of SentencePiece."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    """Holds text, score and type of each token, in the order of their ids."""
    model_type: int = UNIGRAM
    unk_id: int = 0
    unk_piece: str = "<unk>"
    has_byte_fallback: bool = False
    charsmap: bytes = b""
    """Holds the compiled rules of the normaliser."""
    has_prefix: bool = True
    """Is true if a "▁" is put before a text."""
    is_squeezed: bool = True
    """Is true if several blanks count as one, and blanks at the end as none."""

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, with the control tokens as special tokens. Raises ConfigError for another type of
        model."""
        tokenizer = Tokenizer(self._model())
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.is_squeezed:
            steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), SPACE)]
        if self.has_prefix:
            steps.append(normalizers.Prepend(MARK))
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(SPACE, MARK)])
        tokenizer.decoder = piece_decoder(self.has_prefix)
        added = [
            AddedToken(text, normalized=False, special=kind == CONTROL)
            for text, _, kind in self.pieces
            if kind in (CONTROL, USER_DEFINED)
        ]
        tokenizer.add_tokens([AddedToken(self.unk_piece, normalized=False, special=True), *added])
        return tokenizer

    def _model(self) -> BPE | Unigram:
        if self.model_type == UNIGRAM:
            scores = [(text, score) for text, score, _ in self.pieces]
            return Unigram(scores, self.unk_id, self.has_byte_fallback)
        if self.model_type != BYTE_PAIRS:
            raise ConfigError(
                f"tokenizer.model has the model type {self.model_type}, but Weft supports only {UNIGRAM} (Unigram) and "
                f"{BYTE_PAIRS} (BPE)"
            )
        vocabulary = {text: index for index, (text, _, _) in enumerate(self.pieces)}
        ordinary = [(text, score) for text, score, kind in self.pieces if kind not in (CONTROL, USER_DEFINED)]
        return BPE(
            vocabulary,
            _merges(vocabulary, ordinary),
            unk_token=self.unk_piece,
            fuse_unk=True,
            byte_fallback=self.has_byte_fallback,
        )


def piece_decoder(has_prefix: bool) -> decoders.Decoder:
    """Returns the decoder of SentencePiece's tokens; with `has_prefix`, a text loses the blank at its start."""
    steps = [decoders.Replace(MARK, SPACE), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(SPACE, 1, 0)] if has_prefix else steps)


def _merges(vocabulary: Mapping[str, int], ordinary: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """Returns the merges that make each ordinary piece out of two pieces, the best score first.

    SentencePiece joins the two leftmost neighbours whose joined piece has the best score. The ids are not always in
    this order: in Llama's file, all pieces of blanks have the lowest score. Among equal scores, the longest left part
    comes first, so that a row of blanks grows from its left end, as with SentencePiece."""
    merges = []
    for text, score in ordinary:
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [(score, left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


# ------------------------------------------------------------ the file


def read_sentencepiece(file: Path) -> SentencePieces:
    """Reads a tokenizer.model. Raises ConfigError for a file of another format."""
    found = SentencePieces()
    try:
        for number, value in _fields(file.read_bytes()):
            if number == 1:
                piece = dict(_fields(_bytes(value)))
                score = struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0]
                found.pieces.append((_bytes(piece[1]).decode(), score, _int(piece.get(3, 1))))
            elif number == 2:
                trainer = dict(_fields(_bytes(value)))
                found.model_type = _int(trainer.get(3, found.model_type))
                found.has_byte_fallback = bool(trainer.get(35, found.has_byte_fallback))
                found.unk_id = _int(trainer.get(40, found.unk_id))
                found.unk_piece = _bytes(trainer.get(45, found.unk_piece.encode())).decode()
            elif number == 3:
                normalizer = dict(_fields(_bytes(value)))
                found.charsmap = _bytes(normalizer.get(2, b""))
                found.has_prefix = bool(normalizer.get(3, found.has_prefix))
                found.is_squeezed = bool(normalizer.get(4, found.is_squeezed))
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise ConfigError(f"{file.name} is no file of SentencePiece: {error}") from error
    if not found.pieces:
        raise ConfigError(f"{file.name} is no file of SentencePiece: it has no pieces")
    return found


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields number and value of each field of a protocol buffer: an int of a variable length, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == 0:
            value: int | bytes
            value, position = _varint(data, position)
        else:
            if wire_type == 2:
                size, position = _varint(data, position)
            else:
                size = {1: 8, 5: 4}[wire_type]
            if position + size > len(data):
                raise ValueError(f"a field at byte {position} ends after the file")
            value, position = data[position : position + size], position + size
        yield key >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number at this position, of seven bits a byte, and the position after it."""
    value = shift = 0
    while data[position] & 0x80:
        value |= (data[position] & 0x7F) << shift
        shift += 7
        position += 1
    return value | data[position] << shift, position + 1


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError("a number has the form of a text")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a text has the form of a number")
    return value
