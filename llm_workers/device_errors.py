"""Whose fault a failed step is: the device's, which then fails everything, or a request's, which fails alone.

Pure: error kinds are told by name, so that no device's library is imported here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fabric.ids import RequestId, SequenceId
from fabric.messages import SamplingParams
from llm_workers.scheduling.plan import NO_BLOCK, Chunk, StepPlan

DEVICE_ERROR_NAMES = frozenset({"AcceleratorError", "OutOfMemoryError", "MemoryError"})
"""Classes of torch and of Python, by name: `torch.AcceleratorError` (an error of the CUDA runtime),
`torch.OutOfMemoryError`."""
DEVICE_ERROR_MARKS = (
    "CUDA error",
    "HIP error",
    "CUBLAS_STATUS",
    "CUDNN_STATUS",
    "NCCL error",
    "can't allocate memory",
)
"""In the text of a plain RuntimeError: libraries below torch report through it, and so does its CPU allocator."""
PROBE_ID = SequenceId(RequestId("probe"), 0, 0)


def is_device_error(error: BaseException) -> bool:
    """Whether an error speaks of the device or its memory. Such an error, met again by a sequence that runs alone, is
    not the sequence's: steps are no larger than those that were tried at boot."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & DEVICE_ERROR_NAMES) or any(mark in str(error) for mark in DEVICE_ERROR_MARKS)


def probe_plan(plan: StepPlan, chunk: Chunk, block: int) -> StepPlan:
    """A step that nothing of a request can spoil: one token of id 0 at position 0, without features, penalties or
    grammar. It writes to `block`, which must hold nothing that anyone reads: a block of `chunk` itself may be shared
    with others, when its whole prompt was found in the prefix cache."""
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
