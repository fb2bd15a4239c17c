"""Turns a request into the sequences that serve it, and refuses a request that can never run before it takes anything.

All work that costs time in proportion to the prompt (arrays of its tokens, hashes of its blocks) is done here, so that
it can run outside of the engine's thread: nothing here reads or changes what the engine owns. This module knows the
limits of one worker; it knows nothing of the pool's state or the inbox.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fabric.errors import ContextLengthExceeded, InvalidRequest, ProtocolError
from fabric.ids import AttemptId, SequenceId
from fabric.messages import GenerateRequest
from llm_workers.config import WorkerConfig
from llm_workers.scheduling.guidance import Guide
from llm_workers.scheduling.layout import PromptLayout
from llm_workers.scheduling.sequence import Sequence
from llm_workers.scheduling.timing import Stopwatch
from modalities.family import Positions


def max_total_tokens(config: WorkerConfig, max_model_len: int) -> int:
    """Returns the length of the longest possible sequence, prompt and output together. The last token is drawn and
    never computed, so it needs no block."""
    return min(max_model_len, config.num_blocks * config.block_size + 1)


class Arrival(NamedTuple):
    """An `Arrival` is a request that can run and that the scheduler has not added yet."""

    attempt_id: AttemptId
    layout: PromptLayout
    sequences: tuple[Sequence, ...]
    """Holds one sequence per choice."""


def prepare(
    request: GenerateRequest,
    positions: Positions,
    config: WorkerConfig,
    max_model_len: int,
    arrived_at_s: float,
    guide: Guide | None = None,
) -> Arrival:
    """Returns the request's sequences. Each choice gets a fork of `guide` and, if the prefix cache is on, the hashes
    of the prompt's full blocks. Raises ContextLengthExceeded (the request exceeds the model's context or the KV pool),
    InvalidRequest, ProtocolError or FeatureMismatch."""
    _check_numbers(request, positions)
    _check_lengths(request, config, max_model_len)
    if unknown := set(request.side_names) - {name for name, _ in config.side_layers}:
        raise ProtocolError(f"this worker keeps no side tensors {', '.join(sorted(unknown))}")
    layout = PromptLayout(request)
    limit = max_total_tokens(config, max_model_len)
    prompt = np.array(request.token_ids, dtype=np.int64)
    sequences = tuple(
        Sequence(
            SequenceId(request.request_id, request.attempt, choice),
            request,
            prompt,
            layout,
            positions,
            limit,
            Stopwatch(arrived_at_s),
            None if guide is None else guide.fork(),
        )
        for choice in range(request.num_choices)
    )
    if config.is_prefix_cache_enabled:
        sequences[0].extend_hashes(len(prompt) // config.block_size, config.block_size)
        for sequence in sequences[1:]:
            sequence.hashes = sequences[0].hashes.copy()
    return Arrival(AttemptId(request.request_id, request.attempt), layout, sequences)


def _check_numbers(request: GenerateRequest, positions: Positions) -> None:
    if not request.token_ids:
        raise InvalidRequest("the prompt is empty")
    if request.num_choices < 1:
        raise InvalidRequest(f"n must be at least 1, not {request.num_choices}", param="n")
    if request.stop.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {request.stop.max_tokens}", param="max_tokens")
    if request.emitted and len(request.emitted) != request.num_choices:
        raise ProtocolError(f"tokens of {len(request.emitted)} choices were sent for {request.num_choices}")
    if positions.ids.ndim != 2 or positions.ids.shape[1] != len(request.token_ids):
        raise ProtocolError(f"positions {positions.ids.shape} for a prompt of {len(request.token_ids)} tokens")


def _check_lengths(request: GenerateRequest, config: WorkerConfig, max_model_len: int) -> None:
    num_tokens = len(request.token_ids)
    if num_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, the context {max_model_len}", param="messages"
        )
    if num_tokens >= max_total_tokens(config, max_model_len):
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, a worker has room for {config.num_blocks * config.block_size}",
            param="messages",
        )
