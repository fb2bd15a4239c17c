"""Runs the forward thread, which turns encoder inputs into feature bytes in the arena, and sounds into encoder inputs.
It is the only thread that uses the device.

When a batch fails, each of its units or sounds is tried alone, so that one bad input fails alone. A batch that runs out
of device memory is split in halves. After an input has failed alone, a pass over a known harmless input follows. If
that fails too, the device is broken: the encoder is lost, and so is everything that it receives from then on. Outputs
are checked against the plan before they may be announced. A feature with numbers that are not finite is a failure,
because it would stay in the arena and spoil every request that reads it. The module knows nothing of queues, leases or
requests: it receives a batch and returns the outcome of each input.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from encoder_pool.decode_process import check_inputs
from encoder_pool.device_streams import DeviceStreams, HostStreams
from encoder_pool.planning import FeatureSpec, ForwardResult, ForwardUnit, SoundJob, SoundResult
from fabric.contracts import EncodeFailed, EncoderLost, FeatureMismatch, WeftError
from fabric.transport import DeviceView, begin_copy
from modalities.device_copies import to_host
from modalities.family import EncoderInput, EncoderModel, Spectrograms
from modalities.slot_tensors import slot_tensor, write_slot
from modalities.torch_dtypes import dtype_name, torch_dtype

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

Job = Callable[[], None]


class ForwardThread:
    """Implements `planning.Forward` in one thread, one batch at a time. It calls `done` in that thread, so `done`
    must only pass the result on and not work. Without `spectrograms` the thread takes no sounds. Without `streams` its
    device is a CPU."""

    def __init__(
        self, model: EncoderModel, spectrograms: Spectrograms | None = None, streams: DeviceStreams | None = None
    ) -> None:
        self._model = model
        self._streams = HostStreams() if streams is None else streams
        self._spectrograms = spectrograms
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="encoder-forward", daemon=True)
        self._spec: FeatureSpec | None = None
        self._probe_inputs: Sequence[EncoderInput] = ()
        self.loss: EncoderLost | None = None
        """This is set once the device was found to fail on every input, and stays set."""

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, spec: FeatureSpec, probe_inputs: Sequence[EncoderInput] = ()) -> None:
        """Starts the thread. `probe_inputs` are inputs that a working device can always encode; without them the device
        always counts as working."""
        self._spec, self._probe_inputs = spec, probe_inputs
        self._thread.start()

    def submit(self, units: Sequence[ForwardUnit], done: Callable[[ForwardResult], None]) -> None:
        self._jobs.put(lambda: done(self._forward(units)))

    def submit_sounds(self, sounds: Sequence[SoundJob], done: Callable[[SoundResult], None]) -> None:
        self._jobs.put(lambda: done(self._run_sounds(sounds)))

    def close(self) -> None:
        """Ends the thread after its current batch."""
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            with torch.inference_mode():
                job()

    def _forward(self, units: Sequence[ForwardUnit]) -> ForwardResult:
        started_s = time.perf_counter()
        outcomes = self._try(self._encode, units, lambda unit: f"a unit of {unit.input.num_patches} patches")
        return ForwardResult(outcomes, time.perf_counter() - started_s)

    def _run_sounds(self, sounds: Sequence[SoundJob]) -> SoundResult:
        started_s = time.perf_counter()
        outcomes = self._try(self._units, sounds, lambda sound: f"a sound of {sound.waveform.num_samples} samples")
        return SoundResult(outcomes, time.perf_counter() - started_s)

    def _try(
        self, work: Callable[[Sequence[T]], list[R]], batch: Sequence[T], name: Callable[[T], str]
    ) -> list[R | WeftError]:
        """Runs `fail_alone` with `_probe`. If the device is lost, the whole batch gets the loss as
        its outcome."""
        if self.loss is None:
            try:
                return fail_alone(work, batch, name, self._probe, self._streams.release_memory)
            except EncoderLost as error:
                self.loss = error
        return [self.loss for _ in batch]

    def _probe(self) -> None:
        """Raises EncoderLost if the device can't encode the inputs that it could encode at the start. They contain
        nothing of a request."""
        if not self._probe_inputs:
            return
        batch = [self._probe_inputs]
        (outcome,) = fail_alone(
            lambda samples: [*map(self._features, samples)],
            batch,
            lambda _: "a harmless sample",
            lambda: None,
            self._streams.release_memory,
        )
        if isinstance(outcome, WeftError):
            raise EncoderLost(f"the encoder's device fails every forward pass ({outcome.message})") from outcome

    def _encode(self, units: Sequence[ForwardUnit]) -> list[WeftError | None]:
        if units[0].input.features is not None:
            return [self._store_given(unit) for unit in units]
        # A feature whose slot lies on a device is written there from the device, without the host between them.
        stays = any(isinstance(unit.buffer, DeviceView) for unit in units)
        features = self._features([unit.input for unit in units], stays_on_device=stays)
        if len(features) != len(units):
            raise FeatureMismatch(
                f"the encoder must give {len(units)} features, one for each unit, not {len(features)}"
            )
        return [self._store(unit, feature) for unit, feature in zip(units, features, strict=True)]

    def _features(self, inputs: Sequence[EncoderInput], *, stays_on_device: bool = False) -> Sequence[torch.Tensor]:
        """Returns the features of `inputs`, complete and in host memory unless they are to stay on the device. Computes
        them a second time if they are not finite, because a fault of the device may be transient. Raises
        FloatingPointError if they are not finite again."""
        features, are_finite = self._computed(inputs, stays_on_device=stays_on_device)
        if not are_finite:
            logger.warning("the features of a batch of %d are not finite; the batch is computed again", len(inputs))
            features, are_finite = self._computed(inputs, stays_on_device=stays_on_device)
        if not are_finite:
            raise FloatingPointError("the features of the encoder are not finite")
        return features

    def _computed(
        self, inputs: Sequence[EncoderInput], *, stays_on_device: bool
    ) -> tuple[Sequence[torch.Tensor], bool]:
        """Returns the features of `inputs`, and whether all their numbers are finite. Waits for the device once."""
        with self._streams.entered(inputs[0].modality):
            features = self._model.encode(inputs)
            if not features:
                return features, True
            sums, *copies = to_host([sums_of(features), *(() if stays_on_device else features)])
            features = features if stays_on_device else copies
        return features, is_finite(features, sums)

    def _units(self, sounds: Sequence[SoundJob]) -> list[list[EncoderInput]]:
        assert self._spectrograms is not None
        with self._streams.entered(sounds[0].item.modality):
            found = self._spectrograms.units([sound.waveform for sound in sounds])
        for inputs, sound in zip(found, sounds, strict=True):
            check_inputs(inputs, sound.item)
        return found

    def _store_given(self, unit: ForwardUnit) -> WeftError | None:
        """Copies a feature that a client has sent into its slot; returns an error if it is not what was planned. The
        router has checked it before."""
        spec, given = self._spec, unit.input.features
        assert spec is not None
        assert given is not None
        shape = spec.shape(unit.num_tokens, unit.num_levels)
        if given.nbytes != spec.nbytes(unit.num_tokens, unit.num_levels):
            return FeatureMismatch(f"a given feature has {given.nbytes} bytes, but shape {shape} was planned")
        begin_copy(given, unit.buffer).wait()
        stored = [slot_tensor(unit.buffer).view(torch_dtype(spec.dtype))]
        if not is_finite(stored, sums_of(stored)):
            return FeatureMismatch("a given feature has numbers that are not finite")
        return None

    def _store(self, unit: ForwardUnit, feature: torch.Tensor) -> WeftError | None:
        """Copies a feature's bytes into its slot if its shape and dtype are as planned; returns an error otherwise."""
        spec = self._spec
        assert spec is not None
        expected = spec.shape(unit.num_tokens, unit.num_levels)
        if tuple(feature.shape) != expected or dtype_name(feature.dtype) != spec.dtype:
            given = f"shape {tuple(feature.shape)} and dtype {dtype_name(feature.dtype)}"
            return FeatureMismatch(f"a feature has {given}, but shape {expected} and dtype {spec.dtype} were planned")
        write_slot(unit.buffer, feature.contiguous().view(torch.uint8).reshape(-1))
        return None


class SlowedEncoder:
    """A `SlowedEncoder` is an encoder each of whose forward passes takes at least `least_s(cost)` seconds, where the
    cost is the sum of the patches in the pass. The rest of that time passes in sleep, which takes no processor."""

    def __init__(self, model: EncoderModel, least_s: Callable[[int], float]) -> None:
        self._model = model
        self._least_s = least_s

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        end_s = time.perf_counter() + self._least_s(sum(each.num_patches for each in inputs))
        features = self._model.encode(inputs)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return features


def sums_of(features: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of the numbers of each feature, float32 `(num_features,)`, on the features' device. There is at
    least one feature."""
    return torch.stack([feature.sum(dtype=torch.float32) for feature in features])


def is_finite(features: Sequence[torch.Tensor], sums: torch.Tensor) -> bool:
    """Returns whether every number of the features is finite. `sums` are their `sums_of`, in host memory."""
    # A number that is not finite makes its sum not finite, and a sum takes a fraction of the time of a test of each
    # number. A sum of finite numbers may overflow, so each number is tested before a feature counts as not finite.
    return all(map(math.isfinite, sums.tolist())) or all(bool(feature.isfinite().all()) for feature in features)


def fail_alone(
    work: Callable[[Sequence[T]], list[R]],
    batch: Sequence[T],
    name: Callable[[T], str],
    probe: Callable[[], None],
    release_memory: Callable[[], None],
) -> list[R | WeftError]:
    """Returns the results of `work` for each element of a batch, in order. If the whole batch fails, each element is
    tried alone; if it runs out of device memory, it is split in halves. An element that fails alone gets an error in
    its place, and `name` describes the element. `probe` is called after an element has failed alone, except with a
    WeftError. If `probe` raises EncoderLost, that ends everything and reaches the caller. `release_memory` is called
    when the device has run out of memory."""
    try:
        return list(work(batch))
    except torch.OutOfMemoryError as error:
        release_memory()
        if len(batch) == 1:
            probe()
            return [EncodeFailed(f"the encoder's device has too little memory for {name(batch[0])}")]
        logger.warning("the device has too little memory for a batch of %d, which is split: %s", len(batch), error)
        half = len(batch) // 2
        halves = (batch[:half], batch[half:])
        return [each for part in halves for each in fail_alone(work, part, name, probe, release_memory)]
    except Exception as error:
        # This is one batch of the loop of the forward thread: one bad element must not affect the others. The error in
        # its place ends the items of the requests that wait for it.
        if len(batch) == 1:
            logger.exception("the encoder failed on %s", name(batch[0]))
            if not isinstance(error, WeftError):
                probe()
            failed = EncodeFailed(f"the encoder failed on {name(batch[0])} ({type(error).__name__})")
            return [error if isinstance(error, WeftError) else failed]
        logger.warning("a batch of %d failed, so each of its elements is tried alone: %r", len(batch), error)
        return [fail_alone(work, [one], name, probe, release_memory)[0] for one in batch]
