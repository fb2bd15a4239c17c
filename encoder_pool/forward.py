"""The forward thread: encoder inputs to feature bytes, in the arena. The only thread that touches the model.

A fused batch that fails is tried again unit by unit, so that a poisoned unit fails alone; one that runs out of device
memory is split in halves. What comes out is held against the plan before it may be announced. Knows nothing of
queues, leases or requests: it is given a batch, and says what became of each unit.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from encoder_pool.planning.features import FeatureSpec
from encoder_pool.planning.forward_job import ForwardResult, ForwardUnit
from fabric.errors import EncodeFailed, FeatureMismatch, WeftError
from modalities.family import EncoderModel

logger = logging.getLogger(__name__)


Job = tuple[Sequence[ForwardUnit], Callable[[ForwardResult], None]]


class ForwardThread:
    """Keeps `planning.forward_job.Forward`, one batch at a time. `done` is called in the thread itself; it must hand
    over, not work."""

    def __init__(self, model: EncoderModel, delay_s: float) -> None:
        self._model = model
        self._delay_s = delay_s
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="encoder-forward", daemon=True)
        self._spec: FeatureSpec | None = None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, spec: FeatureSpec) -> None:
        self._spec = spec
        self._thread.start()

    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        self._jobs.put((units, done))

    def close(self) -> None:
        """Ends the thread after its current batch."""
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            units, done = job
            started_s = time.perf_counter()
            if self._delay_s:
                time.sleep(self._delay_s)
            with torch.inference_mode():
                errors = self._encode(units)
            done(ForwardResult(errors, time.perf_counter() - started_s))

    def _encode(self, units: Sequence[ForwardUnit]) -> list[WeftError | None]:
        try:
            features = self._model.encode([unit.input for unit in units])
            if len(features) != len(units):
                raise FeatureMismatch(f"the encoder gave {len(features)} features for {len(units)} units")
            return [self._store(unit, feature) for unit, feature in zip(units, features, strict=True)]
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            if len(units) == 1:
                return [EncodeFailed(f"out of device memory on a unit of {units[0].input.num_patches} patches")]
            logger.warning("a batch of %d units ran out of memory, split: %s", len(units), error)
            half = len(units) // 2
            return self._encode(units[:half]) + self._encode(units[half:])
        except Exception as error:  # the loop of a process: what one unit breaks, the others must not pay for
            if len(units) == 1:
                logger.exception("a unit failed in the encoder")
                return [error if isinstance(error, WeftError) else EncodeFailed(f"encoder: {type(error).__name__}")]
            logger.warning("a batch of %d units failed, each is tried alone: %r", len(units), error)
            return [self._encode([unit])[0] for unit in units]

    def _store(self, unit: ForwardUnit, feature: torch.Tensor) -> WeftError | None:
        """Copies a feature's bytes into its slot, if it is what was planned."""
        spec = self._spec
        assert spec is not None
        expected = spec.shape(unit.num_tokens)
        if tuple(feature.shape) != expected or dtype_name(feature) != spec.dtype:
            given = f"{tuple(feature.shape)} {dtype_name(feature)}"
            return FeatureMismatch(f"the encoder gave {given} where {expected} {spec.dtype} was planned")
        payload = feature.contiguous().view(torch.uint8).reshape(-1)
        torch.from_numpy(unit.buffer).copy_(payload)
        return None


def dtype_name(tensor: torch.Tensor) -> str:
    """As in `FeatureTicket.dtype`."""
    return str(tensor.dtype).removeprefix("torch.")
