"""Joins the ranks of one worker to torch's process group, and defines everything that they send each other.

An `Invitation` says what a rank process must know to join. Each step begins with a message, `StepHeader`, which carries
the data from which the attention's metadata is built and the sizes of the tensors to expect; the tensors follow through
the process group (`send_step`, `receive_step`). The other messages say that a rank is ready, has failed or shall stop.
Header and tensors must agree, so they stand together.

The backend is gloo on CPU and nccl on CUDA. A process can be in one group only, because it is torch's default group.
This module knows nothing of weights, of what a step computes, and of the connections that carry the messages (`Link` in
`rank_group`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fabric.contracts import ConfigError, ErrorInfo, ProtocolError
from fabric.transport import PortRange, listen

# ---------------------------------------------------------------- the group


@dataclass(frozen=True, slots=True)
class Invitation:
    """Holds what a rank process must know to join its group, as plain values, so that it can be passed to another
    process."""

    rank: int
    num_ranks: int
    host: str
    """Names the host of rank 0."""
    door_port: int
    store_port: int
    token: bytes
    """A connection that sends this token belongs to the group."""
    device: str
    """Is `cpu` or `cuda`."""
    step_timeout_s: float
    """One rank waits this long for the others in a step before it gives the group up."""
    start_timeout_s: float


def open_store(host: str, num_ranks: int, timeout_s: float, ports: PortRange | None = None) -> dist.TCPStore:
    """Opens rank 0's store, through which the ranks find each other. It listens on `host` alone (torch's own store
    would listen on every address), on one of `ports` where a range is given."""
    listener = listen(host, ports)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        num_ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


@contextmanager
def process_group(invitation: Invitation, store: dist.TCPStore | None = None) -> Iterator[None]:
    """Makes this process a member of the group during the `with` block. Waits for all ranks to join. As a side effect,
    sets torch's default group. Raises ConfigError if this process is in a group already, and RuntimeError if the others
    do not come."""
    if dist.is_initialized():
        raise ConfigError("this process is already a rank of another worker; one process can hold only one rank")
    if store is None:
        store = dist.TCPStore(
            invitation.host,
            invitation.store_port,
            invitation.num_ranks,
            timeout=timedelta(seconds=invitation.start_timeout_s),
            wait_for_workers=False,
        )
    is_cuda = invitation.device == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=invitation.rank,
        world_size=invitation.num_ranks,
        timeout=timedelta(seconds=invitation.step_timeout_s),
        device_id=torch.device("cuda", torch.cuda.current_device()) if is_cuda else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


START_TIMEOUT_S = 600.0
"""All ranks of a worker together may take this many seconds to load their shares."""


def smallest_of_ranks(number: int, timeout_s: float) -> int:
    """Returns the smallest of the numbers that the ranks call this with; all of them must call it. It may take
    `timeout_s`, because some ranks are still loading when others ask. Raises RuntimeError if a rank does not come."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    try:
        found = torch.tensor([number])
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
        return int(found)
    finally:
        dist.destroy_process_group(group)


# ---------------------------------------------------------------- the tensors of a step


class StepTensors(NamedTuple):
    """Holds the tensors of one forward pass, as `LanguageModel.forward` takes them."""

    embeddings: torch.Tensor
    positions: torch.Tensor
    feature_rows: torch.Tensor | None
    feature_levels: torch.Tensor | None


def send_step(tensors: StepTensors) -> None:
    """Sends the tensors of a step from rank 0; the other ranks call `receive_step`. Raises RuntimeError if a rank is
    gone or too late."""
    dist.broadcast(tensors.embeddings.contiguous(), src=0)
    places = tensors.positions.reshape(-1)
    if tensors.feature_rows is not None:
        places = torch.cat([places, tensors.feature_rows])
    dist.broadcast(places.contiguous(), src=0)
    if tensors.feature_levels is not None and tensors.feature_levels.numel():
        dist.broadcast(tensors.feature_levels.contiguous(), src=0)


def receive_step(header: StepHeader, dtype: torch.dtype, device: torch.device) -> StepTensors:
    """Receives the tensors of a step from rank 0. Raises RuntimeError if rank 0 is gone or too late."""
    embeddings = torch.empty((header.num_tokens, header.hidden_size), dtype=dtype, device=device)
    dist.broadcast(embeddings, src=0)
    num_places = header.num_axes * header.num_tokens
    places = torch.empty(num_places + (header.num_feature_rows or 0), dtype=torch.int64, device=device)
    dist.broadcast(places, src=0)
    positions = places[:num_places].view(header.num_axes, header.num_tokens)
    if header.num_feature_rows is None:
        return StepTensors(embeddings, positions, None, None)
    shape = (header.num_levels, header.num_feature_rows, header.hidden_size)
    levels = torch.empty(shape, dtype=dtype, device=device)
    if levels.numel():
        dist.broadcast(levels, src=0)
    return StepTensors(embeddings, positions, places[num_places:], levels)


# ---------------------------------------------------------------- messages


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


class _Span(msgspec.Struct, frozen=True, array_like=True):
    at: int
    start: int
    num_tokens: int
    num_blocks: int
    copied_from: int


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
        raise ProtocolError(f"a rank sent data that is not a message: {error}") from error


class RowsLike(NamedTuple):
    """Describes one sequence's tokens of a step. `llm_workers.compute.paged_kv.SequenceRows` has the same fields."""

    at: int
    start: int
    num_tokens: int
    block_ids: npt.NDArray[np.int64]
    copied_from: int = -1


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
        raise ProtocolError("the block tables of a step do not fit its rows")
    ends = np.cumsum([span.num_blocks for span in header.spans])
    tables = [block_ids[end - span.num_blocks : end] for end, span in zip(ends, header.spans, strict=True)]
    return [
        RowsLike(s.at, s.start, s.num_tokens, table, s.copied_from)
        for s, table in zip(header.spans, tables, strict=True)
    ]
