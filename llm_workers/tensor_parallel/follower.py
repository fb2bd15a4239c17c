"""Runs a rank that is not the first: it joins the group, loads its share, and computes every step that rank 0
announces.

A rank process keeps no state but weights and KV pages, and decides nothing. It ends when rank 0 says so, when rank 0 is
gone, or when a step fails: the group ends with the first member that ends. It knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch

from fabric.errors import ErrorInfo, ProtocolError
from llm_workers.attention import Backend
from llm_workers.paged_kv import PagedKV, SequenceRows, copy_blocks
from llm_workers.tensor_parallel.invitation import Invitation
from llm_workers.tensor_parallel.link import Link, LinkClosed, knock
from llm_workers.tensor_parallel.process_group import process_group, receive_step
from llm_workers.tensor_parallel.wire import RankFailed, Ready, StepHeader, Stop, rows_of
from modalities.family import LanguageModel

_LOG = logging.getLogger(__name__)


class Share(NamedTuple):
    """Holds what one rank needs for a forward pass."""

    model: LanguageModel
    kv: PagedKV
    backend: Backend


def follow(invitation: Invitation, load: Callable[[], Share]) -> None:
    """Joins the group and computes its steps; returns when the group has ended. `load` is called inside the process
    group."""
    link = knock(invitation.host, invitation.door_port, invitation.token, invitation.start_timeout_s)
    try:
        with process_group(invitation):
            share = load()
            link.send(Ready())
            _serve(link, share)
    except LinkClosed:
        _LOG.info("rank %d: rank 0 is gone", invitation.rank)
    except Exception as error:  # This is the loop of a process: it reports the error to rank 0, which ends the group.
        _LOG.exception("rank %d ends", invitation.rank)
        with suppress(LinkClosed):
            link.send(RankFailed(ErrorInfo.of(error)))
    finally:
        link.close()


def _serve(link: Link, share: Share) -> None:
    while True:
        message = link.receive()
        if isinstance(message, Stop):
            return
        if not isinstance(message, StepHeader):
            raise ProtocolError(f"a rank process takes no {type(message).__name__}")
        _compute(message, share)


@torch.inference_mode()
def _compute(header: StepHeader, share: Share) -> None:
    """Runs the same forward pass as rank 0. Of the result, only the sums after each layer are used, in which this rank
    took part."""
    model, kv, backend = share
    rows = [SequenceRows(*row) for row in rows_of(header)]
    copy_blocks(kv, rows)
    step = backend(kv, rows)
    embeddings, positions, feature_rows, feature_levels = receive_step(header, model.dtype, model.device)
    model.forward(embeddings, positions, step, feature_rows, feature_levels)
