"""Measures at boot, before the first request, what steps cost on this machine and how much memory the largest takes.

`calibrate` fits the costs of steps to a few steps on made-up tokens, and `record_decodes` runs one decode step of each
size that is recorded as a CUDA graph. `measure_workspace` runs the largest allowed step and reports how much device
memory it takes besides weights, KV pages and inbox. All of them run before the scheduler owns any block, so they may
write anywhere in the KV pages. `fit_blocks` runs earlier, when only the weights are loaded: it finds how many KV blocks
the device has room for. This module knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from fabric.contracts import (
    Clock,
    ConfigError,
    MmHash,
    RequestId,
    SamplingParams,
    SequenceId,
    UnitKey,
    context_scale_tokens,
)
from llm_workers.compute.attention import Backend, select_backend
from llm_workers.compute.device_memory import bytes_left, device_room, give_back_cached, peak_bytes
from llm_workers.compute.paged_kv import PagedKV
from llm_workers.compute.runner import Runner
from llm_workers.scheduling import (
    NOT_FINITE_TOKEN,
    Chunk,
    PromptReading,
    Splice,
    StepCosts,
    StepPlan,
    TokenCounts,
    block_bytes,
    fitting_blocks,
    kv_heads,
    most_blocks,
    reads_in_place,
    worker_bytes,
)
from llm_workers.worker_config import WorkerConfig
from modalities.family import Family, LanguageModel, ModelShape
from modalities.torch_dtypes import dtype_name

# ---------------------------------------------------------------- costs of steps

SIZES = (16, 128)
"""Lists the prompt lengths in tokens that are measured."""
DECODES = (1, 8)
"""Lists the numbers of decoding sequences that are measured; each sequence has one token."""
NUM_RUNS = 3


def calibrate(runner: Runner, family: Family, config: WorkerConfig, costs: StepCosts, clock: Clock) -> None:
    """Fits `costs` to a few steps of each kind that fits into the limits of the worker. The first run of each kind
    warms up, and the fastest of the later runs counts, because a pause is not a property of the step.

    Raises ConfigError if the logits of a made-up prompt are not finite. A worker with such weights would be lost with
    its first request, and its replacement would fail in the same way.
    """
    most = min(config.max_step_tokens, config.num_blocks * config.block_size, family.shape.max_model_len)
    sizes = sorted({min(size, most) for size in SIZES})
    # The decoded tokens stand at this position, after tokens of a prompt that an earlier plan has computed.
    at = min(config.block_size, most - 1)
    numbers = sorted({min(number, most, config.max_sequences) for number in DECODES}) if at else []
    plans = [StepPlan(0, (_calibration_chunk(family, config.block_size, 0, 0, size),)) for size in sizes]
    for plan in plans:
        result = runner.execute(plan)
        if result.not_finite or NOT_FINITE_TOKEN in chain.from_iterable(result.token_ids.values()):
            raise ConfigError(
                "the logits of a test prompt are not finite: the weights can't be used in this dtype; try another "
                "`model.dtype`"
            )
    plans += [
        StepPlan(0, tuple(_calibration_chunk(family, config.block_size, row, at, 1) for row in range(number)))
        for number in numbers
    ]
    scale = context_scale_tokens(family.shape.hidden_size)
    costs.fit([(plan.work(scale), _seconds(runner, plan, clock)) for plan in plans])


def record_decodes(runner: Runner, family: Family, config: WorkerConfig, sizes: Sequence[int]) -> None:
    """Runs a decode step of each of these numbers of rows, as far as the limits of the worker allow such a step, so
    that no request waits while it is recorded."""
    most = min(config.max_step_tokens, config.max_sequences)
    at = min(config.block_size, config.num_blocks * config.block_size - 1, family.shape.max_model_len - 1)
    for number in sorted({min(size, most) for size in sizes}):
        chunks = tuple(_calibration_chunk(family, config.block_size, row, at, 1) for row in range(number))
        runner.execute(StepPlan(0, chunks))


def _seconds(runner: Runner, plan: StepPlan, clock: Clock) -> float:
    runner.execute(plan)
    seconds = []
    for _ in range(NUM_RUNS):
        started_s = clock.now()
        runner.execute(plan)
        seconds.append(clock.now() - started_s)
    return min(seconds)


def _calibration_chunk(family: Family, block_size: int, row: int, start: int, num_tokens: int) -> Chunk:
    """Returns a chunk for row `row`. The chunks of all rows lie in the same blocks."""
    token_ids = np.zeros(start + num_tokens, dtype=np.int64)
    return Chunk(
        sequence_id=SequenceId(RequestId("calibration"), 0, row),
        start=start,
        num_tokens=num_tokens,
        token_ids=token_ids[start:],
        positions=family.positions(token_ids.tolist(), (), ()).ids[:, start:],
        block_ids=np.arange(-(-(start + num_tokens) // block_size), dtype=np.int64),
        splices=(),
        sampling=SamplingParams(temperature=0.0),
    )


# ---------------------------------------------------------------- memory of the largest step

DEAREST = SamplingParams(
    temperature=1.0, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, num_top_logprobs=20, seed=1
)
UNIT = UnitKey(MmHash("workspace"), 0)
_LOG = logging.getLogger(__name__)


class Workspace(NamedTuple):
    """Holds the peak memory of one step in bytes, and the bytes that the device had left when the peak was measured."""

    num_bytes: int
    num_bytes_left: int


def measure_workspace(
    model: LanguageModel, kv: PagedKV, backend: Backend, family: Family, config: WorkerConfig
) -> Workspace:
    """Runs the largest step once and returns the measured memory. Raises ConfigError if the device has no room for the
    step."""
    plan = largest_step(family, config)
    features = _MadeUpFeatures(family.shape, plan.chunks[0].num_tokens, model.dtype)
    runner = Runner(model, kv, features, backend)
    try:
        num_bytes = peak_bytes(lambda: runner.execute(plan), model.device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"workers: a step of {config.max_step_tokens} tokens and {config.max_sequences} sequences does not fit on "
            f"{model.device} in addition to the weights and the KV blocks; lower max_step_tokens, max_sequences or "
            "num_blocks"
        ) from error
    workspace = Workspace(num_bytes, bytes_left(model.device))
    estimated = _estimated_workspace(model, family, config)
    _LOG.info(
        "the largest step takes %.1f MiB (the estimate is %.1f MiB), and %s has %.0f MiB left",
        num_bytes / 2**20,
        estimated / 2**20,
        model.device,
        workspace.num_bytes_left / 2**20,
    )
    if workspace.num_bytes > workspace.num_bytes_left:
        raise ConfigError(
            f"workers: the largest step takes {workspace.num_bytes} bytes (measured), but {model.device} has only "
            f"{workspace.num_bytes_left} bytes left; lower max_step_tokens, max_sequences or num_blocks"
        )
    return workspace


def largest_step(family: Family, config: WorkerConfig) -> StepPlan:
    """Returns the largest step, which uses the whole budget of tokens. Its first chunk is one sequence at the end of
    the longest context, and it consists of placeholders if the model takes media at all; an embedding and the
    log-probabilities of all its tokens are wanted. All other sequences decode (with drafts), and their contexts
    together fill the pool. If the pool is too small for so many sequences, fewer sequences fill it. Every sequence
    requests the most expensive draw."""
    pool_tokens = config.num_blocks * config.block_size
    longest = min(family.shape.max_model_len, pool_tokens)
    num_others = min(config.max_sequences, config.max_step_tokens, pool_tokens) - 1
    num_drafts = min(config.speculation.max_tokens, max(0, config.max_step_tokens - 1) // max(1, num_others) - 1)
    num_drafts = max(0, min(num_drafts, pool_tokens // (num_others + 1) - 1))
    context = min(longest, pool_tokens // (num_others + 1))
    num_tokens = min(longest, config.max_step_tokens - num_others * (1 + num_drafts))
    chunks = [_largest_step_chunk(family, config, 0, longest, num_tokens)]
    reading = PromptReading("mean", chunks[0].token_ids, DEAREST.num_top_logprobs or 0)
    chunks[0] = replace(chunks[0], reading=reading)
    if family.max_items:
        chunks[0] = replace(chunks[0], splices=(Splice(0, num_tokens, UNIT, 0),))
    for number in range(1, num_others + 1):
        chunk = _largest_step_chunk(family, config, number, context, 1 + num_drafts)
        chunks.append(replace(chunk, num_drafts=num_drafts))
    return StepPlan(0, tuple(chunks))


def _largest_step_chunk(family: Family, config: WorkerConfig, number: int, end: int, num_tokens: int) -> Chunk:
    """Returns a chunk of the last `num_tokens` tokens of a sequence of `end` tokens, in blocks of its own as far as the
    pool allows. The tokens are all different as far as the size of the vocabulary allows."""
    token_ids = np.arange(end, dtype=np.int64) % family.shape.vocab_size
    num_axes = family.positions([0], (), ()).ids.shape[0]
    num_blocks = -(-end // config.block_size)
    return Chunk(
        sequence_id=SequenceId(RequestId("workspace"), 0, number),
        start=end - num_tokens,
        num_tokens=num_tokens,
        token_ids=token_ids[end - num_tokens :],
        positions=np.broadcast_to(np.arange(end - num_tokens, end, dtype=np.int64), (num_axes, num_tokens)).copy(),
        block_ids=(np.arange(num_blocks, dtype=np.int64) + number * num_blocks) % config.num_blocks,
        splices=(),
        sampling=DEAREST,
        counts=TokenCounts(token_ids, token_ids[:1]),
    )


class _MadeUpFeatures:
    """Provides one unit (a separately encoded part of a media item) with as many rows as a step may splice. It lies
    where the inbox lies, outside the measurement."""

    def __init__(self, shape: ModelShape, num_tokens: int, dtype: torch.dtype) -> None:
        self._rows = torch.zeros(shape.num_levels, num_tokens, shape.hidden_size, dtype=dtype)

    def feature(self, unit: UnitKey) -> torch.Tensor:
        return self._rows


# ---------------------------------------------------------------- the number of KV blocks


def fit_blocks(
    model: LanguageModel, family: Family, config: WorkerConfig, agree: Callable[[int], int] = int
) -> WorkerConfig:
    """Returns the config with the number of KV blocks that the device has room for, if the config asks for that, and
    else the config itself. Call it when the weights are loaded and no pages are allocated.

    One rank measures the workspace of the largest step. Several ranks estimate it, because a step needs the pages of
    all of them; each finds its own number and then calls `agree`, which returns the smallest. Raises ConfigError if
    there is no room for two blocks."""
    if not config.are_blocks_fitted:
        return config
    shape, dtype = family.shape, dtype_name(model.dtype)
    if config.num_ranks > 1:
        workspace_bytes = _estimated_workspace(model, family, replace(config, num_blocks=_probe_blocks(family, config)))
    else:
        workspace_bytes = _probed_workspace(model, family, config)
    give_back_cached(model.device)
    room = device_room(model.device)
    is_in_place = reads_in_place(model.device.type, dtype, config.block_size)
    per_block = block_bytes(shape, config, dtype, is_in_place=is_in_place)
    found = fitting_blocks(room, config.device_share, workspace_bytes, per_block)
    num_blocks = agree(min(found, most_blocks(shape, config)))
    said = (
        f"{model.device} has {room.free_bytes / 2**20:.0f} MiB left beside the weights, and the largest step takes "
        f"{workspace_bytes / 2**20:.0f} MiB"
    )
    if num_blocks < 2:
        raise ConfigError(
            f"workers: there is no room for KV blocks of {config.block_size} tokens: {said}; lower max_step_tokens or "
            "max_sequences, or use a larger device"
        )
    _LOG.info("%s, so there are %d KV blocks of %d tokens", said, num_blocks, config.block_size)
    return replace(config, num_blocks=num_blocks, are_blocks_fitted=False)


def _probed_workspace(model: LanguageModel, family: Family, config: WorkerConfig) -> int:
    """Returns the peak memory in bytes of the largest step, which runs on the pages of one layer. Raises ConfigError if
    it does not fit."""
    probe = replace(config, num_blocks=_probe_blocks(family, config))
    shape = family.shape
    heads = kv_heads(shape, 1)
    try:
        kv = PagedKV.of_one_layer(
            shape.num_layers, probe.num_blocks, probe.block_size, heads, model.dtype, model.device
        )
        plan = largest_step(family, probe)
        features = _MadeUpFeatures(shape, plan.chunks[0].num_tokens, model.dtype)
        runner = Runner(model, kv, features, select_backend("auto", kv))
        return peak_bytes(lambda: runner.execute(plan), model.device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"workers: a step of {config.max_step_tokens} tokens and {config.max_sequences} sequences does not fit on "
            f"{model.device} in addition to the weights; lower max_step_tokens or max_sequences"
        ) from error


def _probe_blocks(family: Family, config: WorkerConfig) -> int:
    """Returns the blocks of the longest context and one for each other sequence, but at most those that can be used."""
    longest = -(-family.shape.max_model_len // config.block_size)
    return min(longest + config.max_sequences, most_blocks(family.shape, config))


def _estimated_workspace(model: LanguageModel, family: Family, config: WorkerConfig) -> int:
    dtype = dtype_name(model.dtype)
    is_in_place = reads_in_place(model.device.type, dtype, config.block_size)
    return worker_bytes(family.shape, config, 0, dtype, is_in_place=is_in_place).workspace
