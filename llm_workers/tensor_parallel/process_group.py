"""Manages torch's default process group for the ranks of one worker, and sends a step's tensors through it.

The backend is gloo on CPU and nccl on CUDA. A process can be in one group only, because it is torch's default group.
This module knows nothing of what a step computes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from fabric.errors import ConfigError
from llm_workers.tensor_parallel.invitation import Invitation
from llm_workers.tensor_parallel.wire import StepHeader


class StepTensors(NamedTuple):
    """Holds the tensors of one forward pass, as `LanguageModel.forward` takes them."""

    embeddings: torch.Tensor
    positions: torch.Tensor
    feature_rows: torch.Tensor | None
    feature_levels: torch.Tensor | None


def open_store(host: str, num_ranks: int, timeout_s: float) -> dist.TCPStore:
    """Opens rank 0's store, through which the ranks find each other. It listens on `host` alone (torch's own store
    would listen on every address)."""
    listener = socket.create_server((host, 0))
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
        raise ConfigError("this process is a rank of another worker already; one process holds one rank")
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
