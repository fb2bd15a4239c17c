"""Tests and measures a family's encoder when a replica starts, with short synthetic media.

`calibrate` decodes samples and runs forward passes, to learn the shape of features and a first estimate of what
decoding and a pass cost. `load_spectrograms` and `try_spectrograms` do the same start work for the part of a family
that turns sounds into units on the encoder's device. Both use the samples of this module: small and ordinary media of
each modality, made as ordinary files. They go through the family's own plan and preprocessing, so nothing is assumed
about how a family processes them.

The module knows nothing of requests or of any particular family.
"""

from __future__ import annotations

import io
import time
import wave
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from encoder_pool.decode_process import check_inputs
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.planning import FeatureSpec, ForwardCosts, StageCosts
from fabric.contracts import DTYPE_TO_BYTES, ConfigError, MediaItem, MmHash, WeftError
from modalities.family import (
    AudioHeader,
    EncoderInput,
    EncoderModel,
    Family,
    ImageHeader,
    MediaHeader,
    MelOnDevice,
    Spectrograms,
    VideoHeader,
)
from modalities.torch_dtypes import dtype_name

FPS = 4
NUM_FRAMES = 8
SAMPLE_RATE = 16_000
RATES = (SAMPLE_RATE, 48_000)
"""Lists the sample rates of the test sounds: one needs no resampling, and one does."""
NUM_RUNS = 2


def calibrate(
    family: Family, model: EncoderModel, modality: str, costs: ForwardCosts, decode_costs: StageCosts
) -> FeatureSpec:
    """Runs `model` on two sizes of one modality and records the times in `costs`, and the times in which this process
    decodes and preprocesses them in `decode_costs`. Blocks for a few forward passes.

    Two sizes of a modality separate the overhead of a pass from the price of a patch. A model with fixed tiles makes
    one size of every input, so a pass over two units stands for the second size there.

    Raises ConfigError if the model's features do not have the family's shape or a known dtype, or are not finite, or if
    there is no sample for `modality`.
    """
    if modality not in MODALITY_TO_SAMPLES:
        known = ", ".join(MODALITY_TO_SAMPLES)
        raise ConfigError(f"the modality {modality!r} has no sample for the calibration; samples exist for {known}")
    make, sizes = MODALITY_TO_SAMPLES[modality]
    spec: FeatureSpec | None = None
    measured: list[tuple[int, float]] = []
    for size in sizes:
        sample = make(size)
        item = sample_item(family, sample, modality)
        inputs = family.preprocess(sample.data, item)  # the first run of a size includes imports
        prepare_s = _least_s(partial(family.preprocess, sample.data, item))
        measured.append((item.cost, prepare_s))
        feature = _forward(model, inputs)[0][0]  # the first run of a size includes compiling and allocating
        spec = FeatureSpec(family.shape.num_levels, family.shape.hidden_size, dtype_name(feature.dtype))
        if spec.dtype not in DTYPE_TO_BYTES:
            known = ", ".join(DTYPE_TO_BYTES)
            raise ConfigError(f"the {modality} features have dtype {spec.dtype}; supported dtypes are {known}")
        expected = spec.shape(item.unit_tokens[0], item.num_levels)
        if tuple(feature.shape) != expected:
            shape = tuple(feature.shape)
            raise ConfigError(f"the {modality} features have shape {shape}, but the model family plans {expected}")
        if not bool(feature.isfinite().all()):
            raise ConfigError(
                f"the {modality} features of a sample are not finite: the encoder's weights can't be used in this "
                "dtype; try another `model.dtype`"
            )
        for _ in range(NUM_RUNS):
            costs.observe(modality, item.cost, _forward(model, inputs)[1])
    if not costs.has_spread(modality):
        _forward(model, [*inputs, *inputs])
        for _ in range(NUM_RUNS):
            costs.observe(modality, 2 * item.cost, _forward(model, [*inputs, *inputs])[1])
    decode_costs.calibrate(modality, measured[0], measured[-1])
    assert spec is not None
    return spec


def probe_inputs(family: Family, modality: str) -> list[EncoderInput]:
    """Returns the smallest sample of a modality, ready for a forward pass that does not depend on the content of any
    request."""
    make, sizes = MODALITY_TO_SAMPLES[modality]
    sample = make(min(sizes))
    return family.preprocess(sample.data, sample_item(family, sample, modality))


def _least_s(work: Callable[[], object]) -> float:
    """Returns the shortest time that `work` takes in several runs, because other work on the machine only adds to
    it."""
    times: list[float] = []
    for _ in range(NUM_RUNS):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)


def _forward(model: EncoderModel, inputs: list[EncoderInput]) -> tuple[list[torch.Tensor], float]:
    started_s = time.perf_counter()
    with torch.inference_mode():
        features = model.encode(inputs)
        features[-1].cpu()  # this waits for the device
    return features, time.perf_counter() - started_s


# ------------------------------------------------------------ spectrograms on the device


def load_spectrograms(config: EncoderConfig, family: Family) -> Spectrograms | None:
    """Loads the spectrograms of the family. Returns None if the config names no device for them, if no sounds are
    encoded here, or if the family supports only `preprocess`.

    Sounds with more mel frames than a batch may cost stay with the decode processes even so, because work on the device
    can't be stopped and nothing else is encoded meanwhile.
    """
    if not config.mel_device or "audio" not in config.modalities or not isinstance(family, MelOnDevice):
        return None
    return family.load_spectrograms(config.mel_device)


def try_spectrograms(
    family: Family, spectrograms: Spectrograms, decode_costs: StageCosts, prepare_costs: StageCosts
) -> None:
    """Makes units of two short sounds in one batch, so that the device's libraries allocate and compile before the
    first request. Then it measures sounds of two lengths: in `decode_costs` the time to decode them to samples, and in
    `prepare_costs` the time of the device. Blocks. Raises ConfigError if the units differ from the plan."""
    assert isinstance(family, MelOnDevice)
    samples = [audio_sample(2, rate) for rate in RATES]
    items = [sample_item(family, sample, "audio") for sample in samples]
    waveforms = [family.decode_waveform(sample.data, item) for sample, item in zip(samples, items, strict=True)]
    try:
        for inputs, item in zip(spectrograms.units(waveforms), items, strict=True):
            check_inputs(inputs, item)
    except WeftError as error:
        raise ConfigError(f"the device computes spectrograms that differ from their plan: {error.message}") from error
    measured, decoded = list[tuple[int, float]](), list[tuple[int, float]]()
    for seconds in MODALITY_TO_SAMPLES["audio"][1]:
        sample = audio_sample(seconds)
        item = sample_item(family, sample, "audio")
        waveform = family.decode_waveform(sample.data, item)
        decoded.append((item.cost, _least_s(partial(family.decode_waveform, sample.data, item))))
        spectrograms.units([waveform])  # the first run of a length includes compiling and allocating
        measured.append((item.cost, _least_s(partial(spectrograms.units, [waveform]))))
    decode_costs.calibrate("audio", decoded[0], decoded[-1])
    prepare_costs.calibrate("audio", measured[0], measured[-1])


# ------------------------------------------------------------ samples


class CalibrationSample(NamedTuple):
    header: MediaHeader
    data: bytes


def sample_item(family: Family, sample: CalibrationSample, modality: str) -> MediaItem:
    """Plans a sample as a router would."""
    plan = family.plan(sample.header)
    return MediaItem(
        index=0,
        modality=modality,
        mm_hash=MmHash("calibration"),
        grid=plan.grid,
        unit_tokens=plan.unit_tokens,
        cost=plan.cost,
        part="calibration",
        row_seconds=plan.row_seconds,
        num_levels=plan.num_levels,
    )


def image_sample(edge: int) -> CalibrationSample:
    """Makes a grey PNG of `edge` x `edge` pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (edge, edge), (127, 127, 127)).save(buffer, "PNG")
    return CalibrationSample(ImageHeader("PNG", edge, edge, "RGB"), buffer.getvalue())


def video_sample(edge: int) -> CalibrationSample:
    """Makes an MP4 of two seconds, `edge` x `edge` pixels, that grows brighter."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width = stream.height = edge
        stream.pix_fmt = "yuv420p"
        for number in range(NUM_FRAMES):
            pixels = np.full((edge, edge, 3), 255 * number // NUM_FRAMES, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return CalibrationSample(VideoHeader("mp4", edge, edge, NUM_FRAMES, NUM_FRAMES / FPS), buffer.getvalue())


def audio_sample(seconds: int, rate: int = SAMPLE_RATE) -> CalibrationSample:
    """Makes a WAV of one channel: a tone of 440 Hz."""
    num_samples = seconds * rate
    tone = 8000 * np.sin(2 * np.pi * 440 / rate * np.arange(num_samples))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(tone.astype("<i2").tobytes())
    return CalibrationSample(AudioHeader("wav", rate, 1, num_samples), buffer.getvalue())


MODALITY_TO_SAMPLES: dict[str, tuple[Callable[[int], CalibrationSample], tuple[int, ...]]] = {
    "image": (image_sample, (64, 448)),
    "video": (video_sample, (64, 224)),
    "audio": (audio_sample, (2, 10)),
}
"""Maps a modality to the function that makes its samples, and to their edges in pixels or lengths in seconds. The two
sizes are far enough apart to separate slope and overhead."""
