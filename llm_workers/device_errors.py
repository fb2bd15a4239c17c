"""Distinguishes the two causes of a failed step: a failed device, after which every step fails, and a single request,
which fails alone.

This module is pure. It identifies error classes by name, so that it imports no device library.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fabric.ids import RequestId, SequenceId
from fabric.messages import SamplingParams
from llm_workers.scheduling.plan import NO_BLOCK, Chunk, StepPlan

DEVICE_ERROR_NAMES = frozenset({"AcceleratorError", "OutOfMemoryError", "MemoryError"})
"""Lists classes of torch and of Python by name. Among them are `torch.AcceleratorError` (an error of the CUDA runtime)
and `torch.OutOfMemoryError`."""
DEVICE_ERROR_MARKS = (
    "CUDA error",
    "HIP error",
    "CUBLAS_STATUS",
    "CUDNN_STATUS",
    "NCCL error",
    "can't allocate memory",
)
"""Lists texts that mark a plain RuntimeError as a device error: libraries below torch report their errors in this way,
and so does torch's CPU allocator."""
PROBE_ID = SequenceId(RequestId("probe"), 0, 0)


def is_device_error(error: BaseException) -> bool:
    """Returns whether an error concerns the device or its memory. If a sequence that runs alone meets such an error
    again, the sequence is not the cause, because its step is no larger than the steps that were tried at boot."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & DEVICE_ERROR_NAMES) or any(mark in str(error) for mark in DEVICE_ERROR_MARKS)


def probe_plan(plan: StepPlan, chunk: Chunk, block: int) -> StepPlan:
    """Returns a step that no property of a request can spoil: one token of id 0 at position 0, without features,
    penalties or grammar. The step writes to `block`, which no sequence may read. A block of `chunk` itself is not safe,
    because other sequences may share it if the whole prompt was found in the prefix cache."""
    probe = replace(
        chunk,
        sequence_id=PROBE_ID,
        start=0,
        num_tokens=1,
        token_ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros_like(chunk.positions[:, :1]),
        block_ids=np.array([block], dtype=chunk.block_ids.dtype),
        splices=(),
        sampling=SamplingParams(temperature=0.0),
        draw_index=0,
        counts=None,
        barred=(),
        num_barred=0,
        guide=None,
        side_names=frozenset(),
        num_drafts=0,
        copied_from=NO_BLOCK,
    )
    return StepPlan(plan.step, (probe,))
