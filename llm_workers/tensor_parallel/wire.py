"""Encodes the messages between rank 0 and the other ranks as bytes: one header per step, whose tensors follow in the
process group.

The header carries the data from which the attention's metadata is built, and the sizes of the tensors to expect. The
module is pure and knows nothing of connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fabric.errors import ErrorInfo, ProtocolError


class RowsLike(NamedTuple):
    """Describes one sequence's tokens of a step. `llm_workers.paged_kv.SequenceRows` has the same fields."""

    at: int
    start: int
    num_tokens: int
    block_ids: npt.NDArray[np.int64]
    copied_from: int = -1


class _Span(msgspec.Struct, frozen=True, array_like=True):
    at: int
    start: int
    num_tokens: int
    num_blocks: int
    copied_from: int


class StepHeader(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Announces one forward pass. The tensors are broadcast in this order: embeddings `(num_tokens, hidden_size)`;
    int64 positions `(num_axes, num_tokens)`, followed by the feature rows; feature levels `(num_levels,
    num_feature_rows, hidden_size)` where there are any."""

    num_tokens: int
    hidden_size: int
    num_axes: int
    num_feature_rows: int | None
    """None means that the step has no features at all."""
    num_levels: int
    spans: tuple[_Span, ...]
    block_ids: bytes
    """Holds the block ids of all spans one after the other, as int64, little endian."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Says that a rank process has its weights."""


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Says that a rank process ends, and why."""

    error: ErrorInfo


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Says that rank 0 ends."""


Message = StepHeader | Ready | RankFailed | Stop
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Decodes a message. Raises ProtocolError if `data` is not a message."""
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a rank sent what is no message: {error}") from error


def step_header(
    rows: Sequence[RowsLike], embeddings: tuple[int, int], num_axes: int, features: tuple[int, int] | None
) -> StepHeader:
    """Builds the header of a step. `embeddings` and `features` are shapes: (num_tokens, hidden_size) and (num_levels,
    num_feature_rows)."""
    tables = [np.ascontiguousarray(row.block_ids, dtype="<i8") for row in rows]
    spans = [
        _Span(int(r.at), int(r.start), int(r.num_tokens), len(t), r.copied_from)
        for r, t in zip(rows, tables, strict=True)
    ]
    num_levels, num_feature_rows = features or (0, None)
    block_ids = b"".join(table.tobytes() for table in tables)
    return StepHeader(*embeddings, num_axes, num_feature_rows, num_levels, tuple(spans), block_ids)


def rows_of(header: StepHeader) -> list[RowsLike]:
    """Returns the rows of a step as rank 0 has them. Raises ProtocolError if the block tables do not fit the spans."""
    block_ids = np.frombuffer(header.block_ids, dtype="<i8").astype(np.int64)
    if len(block_ids) != sum(span.num_blocks for span in header.spans):
        raise ProtocolError("a step's block tables do not fit its rows")
    ends = np.cumsum([span.num_blocks for span in header.spans])
    tables = [block_ids[end - span.num_blocks : end] for end, span in zip(ends, header.spans, strict=True)]
    return [
        RowsLike(s.at, s.start, s.num_tokens, table, s.copied_from)
        for s, table in zip(header.spans, tables, strict=True)
    ]
