"""Computes the forward passes of a model that is shared among several ranks, on both sides of the group.

On rank 0, `ParallelLanguageModel` presents the text half of the model as one `LanguageModel`. In every other rank
process, `follow` joins the group, loads its share, and computes every step that rank 0 announces. The two stand
together because both must run the same forward pass with the same inputs, so that the sums after each layer agree. This
module knows nothing of requests and sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from fabric.contracts import ErrorInfo, ProtocolError
from llm_workers.compute import Backend, PagedKV, SequenceRows, copy_blocks
from llm_workers.tensor_parallel.process_group import (
    Invitation,
    RankFailed,
    Ready,
    StepHeader,
    StepTensors,
    Stop,
    process_group,
    receive_step,
    rows_of,
    send_step,
    step_header,
)
from llm_workers.tensor_parallel.rank_group import Link, LinkClosed, RankGroup, knock
from modalities.family import LanguageModel

_LOG = logging.getLogger(__name__)


# ---------------------------------------------------------------- rank 0


class ParallelLanguageModel:
    """Implements `modalities.family.LanguageModel`; rank 0 alone has the embeddings and the head. One forward pass runs
    at a time."""

    def __init__(self, share: LanguageModel, ranks: RankGroup) -> None:
        self._share, self._ranks = share, ranks
        self.dtype: torch.dtype = share.dtype
        self.device: torch.device = share.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps int64 token ids `(num_tokens,)` to embeddings `(num_tokens, hidden)`."""
        return self._share.embed(token_ids)

    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        feature_rows: torch.Tensor | None,
        feature_levels: torch.Tensor | None,
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the forward pass that the contract describes, on all ranks. `attention` must have `rows`. Raises
        WorkerLost when a rank is gone, too late or broken, and at every later call."""
        features = None
        if feature_rows is not None and feature_levels is not None:
            features = (feature_levels.shape[0], feature_levels.shape[1])
        header = step_header(attention.rows, (embeddings.shape[0], embeddings.shape[1]), positions.shape[0], features)
        with self._ranks.step(header):
            send_step(StepTensors(embeddings, positions, feature_rows, feature_levels))
            return self._share.forward(embeddings, positions, attention, feature_rows, feature_levels, wanted_rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states `(n, hidden)` to float32 logits `(n, vocab)`."""
        return self._share.logits(hidden)


# ---------------------------------------------------------------- the other ranks


class Share(NamedTuple):
    """Holds what one rank needs for a forward pass."""

    model: LanguageModel
    kv: PagedKV
    backend: Backend


def follow(invitation: Invitation, load: Callable[[], Share]) -> None:
    """Joins the group and computes its steps; returns when the group has ended. `load` is called inside the process
    group.

    A rank process keeps no state but weights and KV pages, and decides nothing. It ends when rank 0 says so, when rank
    0 is gone, or when a step fails: the group ends with the first member that ends."""
    link = knock(invitation.host, invitation.door_port, invitation.token, invitation.start_timeout_s)
    try:
        with process_group(invitation):
            share = load()
            link.send(Ready())
            _serve(link, share)
    except LinkClosed:
        _LOG.info("rank %d ends, because its connection to rank 0 has closed", invitation.rank)
    except Exception as error:
        # This is the loop of a rank process: it reports the error to rank 0, which ends the group and every request.
        _LOG.exception("rank %d ends after an error", invitation.rank)
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
            raise ProtocolError(f"a rank process accepts StepHeader and Stop, not {type(message).__name__}")
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
