"""Implements a code2wav whose batches take a given time, whatever is in them, and whose sound is silence.

A processor core computes a batch in about the time of its requests one after the other, so it can't show what batches
are for. On a device that is not filled by one request, a batch takes little longer than one request alone. The time is
that of the documentation's timeline (`docs/references.md`). A config names `load_given_code2wav` as `model_stage`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deploy.stages_config import StageSection
from fabric.contracts import StageKey, StageRequest
from llm_workers.stages import Payload, StageChunk, StageOutput, StageSpan

BATCH_S = 1.0
SAMPLES_PER_FRAME = 1920


@dataclass(slots=True)
class _ReceivedFrames:
    num_received: int = 0
    num_computed: int = 0
    is_last: bool = False


class GivenCode2Wav:
    """Implements `StageModel`. It keeps counts alone."""

    def __init__(self, batch_s: float = BATCH_S) -> None:
        self._batch_s = batch_s
        self._key_to_frames: dict[StageKey, _ReceivedFrames] = {}

    def open(self, request: StageRequest) -> None:
        self._key_to_frames[request.key] = _ReceivedFrames()

    def receive(self, chunk: StageChunk) -> None:
        frames, codes = self._key_to_frames[chunk.key], chunk.payload.get("codes")
        frames.num_received += len(codes) if isinstance(codes, np.ndarray) else 0
        frames.is_last = chunk.is_last

    def num_units_ready(self, key: StageKey) -> int:
        return self._key_to_frames[key].num_received

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        """Waits for the time of a batch and returns silence."""
        time.sleep(self._batch_s)
        outputs = {}
        for span in spans:
            self._key_to_frames[span.key].num_computed = span.start + span.num_units
            samples = np.zeros(span.num_units * SAMPLES_PER_FRAME, dtype=np.float32)
            values: Payload = {"samples": samples, "first_sample": span.start * SAMPLES_PER_FRAME}
            outputs[span.key] = StageOutput(values, self.is_complete(span.key), len(samples))
        return outputs

    def is_complete(self, key: StageKey) -> bool:
        frames = self._key_to_frames[key]
        return frames.is_last and frames.num_computed == frames.num_received

    def close(self, key: StageKey) -> None:
        del self._key_to_frames[key]


def load_given_code2wav(model_dir: Path, stage: StageSection) -> GivenCode2Wav:
    """Returns the stage; it reads nothing."""
    return GivenCode2Wav()
