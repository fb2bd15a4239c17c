"""Runs `weft bench encoder`: repeats the latency tables of the articles in docs/references.md on the present device.

It measures latency and output size per modality, latency per batch size, and what packed attention gains, at the sizes
of the real architectures with random weights. Through a real encoder service with the demo model, it measures by how
much a video of 120 frames delays one picture.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from loadtest.bench_result import Bar, BenchResult, gpu_name
from loadtest.benches.encoder_attention import NUM_PICTURES as NUM_PACKED
from loadtest.benches.encoder_attention import AttentionRun, measure_attention
from loadtest.benches.encoder_batching import NUM_PICTURES, BatchingGain, batching_gains
from loadtest.benches.encoder_towers import Place, Run, clip_l, internvit, qwen2_5_vl, siglip_l, whisper
from loadtest.benches.encoder_wait import Waits, measure_waits
from modalities.torch_dtypes import dtype_name, torch_dtype

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
GPU_GAIN, CPU_GAIN = 3.0, 0.95
"""Holds the target gain in pictures per second at 8 per forward pass, compared with one per pass. The OmniConnector
article (docs/references.md) reports 3.8 on an A100; one picture keeps a CPU fully busy."""


class Case(NamedTuple):
    modality: str
    input: str
    encoder: str
    build: Callable[[Place], Run]
    num_items: int
    published_ms: float
    """Gives the latency on an A100 in half precision, from the articles in docs/references.md; it is 0 if they have
    none."""


CASES = (
    Case("image", "448x448", "SigLIP-L/14", siglip_l(448), 1, 4.8),
    Case("image", "HD, 6 tiles of 448x448", "SigLIP-L/14", siglip_l(448), 6, 12.3),
    Case("image", "448x448", "Qwen2.5-VL vision", qwen2_5_vl(448), 1, 0.0),
    Case("image", "336x336", "ViT-L/14", clip_l(336), 1, 5.0),
    Case("image", "4 of 336x336", "ViT-L/14", clip_l(336), 4, 12.0),
    Case("video", "30 of 256x256", "InternViT, 2 frames pooled", internvit(30, 2), 1, 48.7),
    Case("video", "120 of 256x256", "InternViT, 2 frames pooled", internvit(120, 2), 1, 187.0),
    Case("video", "30 of 336x336", "ViT-L/14", clip_l(336), 30, 48.0),
    Case("audio", "30 s", "Whisper-large, 2 rows pooled", whisper("large", 1, 2), 1, 2.9),
    Case("audio", "120 s", "Whisper-large, 2 rows pooled", whisper("large", 4, 2), 1, 11.2),
    Case("audio", "30 s", "Whisper-small", whisper("small", 1, 1), 1, 85.0),
)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="weft bench encoder")
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", default="float16" if has_gpu else "float32")
    parser.add_argument(
        "--scale", type=float, default=1.0 if has_gpu else 0.0625, help="scales depth and width; 1 is the real size"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0 if has_gpu else 0.5, help="measures each cell for this many seconds"
    )
    return parser.parse_args(arguments)


def run(arguments: Sequence[str] = ()) -> BenchResult:
    chosen = options(arguments)
    place = Place(chosen.device, torch_dtype(chosen.dtype), chosen.scale)
    with torch.inference_mode():
        rows = [_modality_row(case, place, chosen.seconds) for case in CASES]
        tower = _built(siglip_l(448), place)
        batches = _batch_latencies(tower, place, chosen.seconds)
        utilisation = Utilisation(_flop_of(tower), _peak_flop_per_s(place))
        gains = batching_gains(lambda num_items: _timed(tower, num_items, place))
        attention = measure_attention(place, lambda run: _latency_s(lambda _: run(), 1, place, chosen.seconds))
    waits = asyncio.run(measure_waits(place.device))
    table = [["modality", "input", "encoder", "output", "MiB", "ms", "A100 ms", "per second", "utilisation"], *rows]
    table += _batch_rows(batches, utilisation)
    table += [_attention_row(each) for each in attention]
    notes = _notes(place, gains, waits)
    return BenchResult(table, _bars(batches, gains, waits, place), notes, variant=gpu_name(place.device))


def _built(build: Callable[[Place], Run], place: Place) -> Run:
    """Builds an encoder whose random weights are drawn on the device, because a CPU takes seconds for them."""
    with torch.device(place.device):
        return build(place)


def _modality_row(case: Case, place: Place, seconds: float) -> list[str]:
    tower = _built(case.build, place)
    shape = tower(case.num_items).shape
    latency_s = _latency_s(tower, case.num_items, place, seconds)
    del tower
    gc.collect()
    num_tokens, width = case.num_items * shape[1], shape[2]
    nbytes = num_tokens * width * place.dtype.itemsize
    return [
        case.modality,
        case.input,
        case.encoder,
        f"[{num_tokens}, {width}]",
        f"{nbytes / 2**20:.1f}",
        f"{1000 * latency_s:.1f}",
        f"{case.published_ms:g}" if case.published_ms else "",
        f"{1 / latency_s:.1f}",
        "",
    ]


class Utilisation(NamedTuple):
    """Says which part of the device's computing power passes use."""

    flop_per_item: float
    peak_flop_per_s: float
    """Holds the rate that the device reached in a large product of matrices."""

    def of(self, num_items: int, seconds: float) -> float:
        return num_items * self.flop_per_item / seconds / self.peak_flop_per_s


def _flop_of(tower: Run) -> float:
    """Returns the floating-point operations of a pass over one item, as torch counts them. Attention runs as plain
    products here, because torch counts no operations of its fused attention on a CPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        tower(1)
    return float(counter.get_total_flops())


def _peak_flop_per_s(place: Place) -> float:
    """Returns the rate of the fastest of several products of large square matrices."""
    side = 8192 if place.device == "cuda" else 1024
    left = torch.randn(side, side, device=place.device, dtype=place.dtype)
    return 2.0 * side**3 / min(_timed(lambda _: left @ left, 1, place) for _ in range(8))


def _batch_latencies(tower: Run, place: Place, seconds: float) -> dict[int, float]:
    """Returns the seconds of a forward pass for each batch size. It measures all sizes twice, in turn, and takes the
    smaller value of each, so that changes in the machine's speed do not distort the comparison."""
    found = {size: _latency_s(tower, size, place, seconds) for size in BATCH_SIZES}
    again = {size: _latency_s(tower, size, place, seconds) for size in BATCH_SIZES}
    return {size: min(found[size], again[size]) for size in BATCH_SIZES}


def _batch_rows(size_to_s: dict[int, float], utilisation: Utilisation) -> list[list[str]]:
    published_ms = {1: 4.8, 4: 7.2, 8: 10.1, 16: 16.3, 32: 29.7}
    published_utilisation = {1: " (A100 11%)", 4: " (A100 38%)", 8: " (A100 67%)", 16: " (A100 84%)", 32: " (A100 92%)"}
    return [
        [
            "image",
            f"batch of {size}, 448x448",
            "SigLIP-L/14",
            f"{1000 * seconds / size:.2f} ms each",
            "",
            f"{1000 * seconds:.1f}",
            f"{published_ms.get(size, '')}",
            f"{size / seconds:.1f}",
            f"{utilisation.of(size, seconds):.0%}{published_utilisation.get(size, '')}",
        ]
        for size, seconds in size_to_s.items()
    ]


def _attention_row(found: AttentionRun) -> list[str]:
    calls, ms = f"{found.num_calls:,} calls of attention", f"{1000 * found.seconds:.1f}"
    per_second = f"{NUM_PACKED / found.seconds:.1f}"
    return ["image", found.batch, f"Qwen2.5-VL vision, {found.way}", calls, "", ms, "", per_second, ""]


def _bars(size_to_s: dict[int, float], gains: list[BatchingGain], waits: list[Waits], place: Place) -> list[Bar]:
    is_gpu = place.device == "cuda"
    eight = Bar("pictures per second, 8 in a forward over one by one", 8 * size_to_s[1] / size_to_s[8], GPU_GAIN, "x")
    target = GPU_GAIN if is_gpu else CPU_GAIN
    worst = max(median for one in waits for median in one.medians)
    return [
        *([eight] if is_gpu else []),
        *(
            Bar(
                f"pictures per second, {NUM_PICTURES} waiting after {gain.num_worn} of one size, batched as measured, "
                "over one by one",
                gain.gain,
                target,
                "x",
            )
            for gain in gains
        ),
        Bar("delay of one picture by a video of 120 frames, at the worst moment", worst, 1.0, "units", is_max=True),
    ]


def _notes(place: Place, gains: list[BatchingGain], waits: list[Waits]) -> list[str]:
    return [
        f"{place.device}, {dtype_name(place.dtype)}, depth and width x {place.scale:g}, random "
        f"weights; {torch.get_num_threads()} threads.",
        "Latencies are medians of one forward, the wait for the device included; the published ones are an "
        "A100's, in half precision, at full size.",
        *(
            f"After {gain.num_worn} pictures of one size {NUM_PICTURES} waiting ones went in {len(gain.first_sizes)} "
            f"forwards of {gain.first_sizes}, in the last round of {gain.last_sizes}."
            for gain in gains
        ),
        "Utilisation is the rate of floating-point operations over that of a large product of matrices on the same "
        "device; the OmniConnector article does not say how it measured its own.",
        *(_delays_note(one) for one in waits),
    ]


def _delays_note(waits: Waits) -> str:
    medians = ", ".join(f"{median:.2f}" for median in waits.medians)
    single = max(delay.units for delays in waits.moments for delay in delays)
    when = "once it lies decoded" if waits.is_decoded else "while it is being decoded"
    return (
        f"Delay of a picture ({1000 * waits.alone_s:.1f} ms alone) by the video {when} (demo model, units of "
        f"{1000 * waits.unit_s:.1f} ms), at each moment of a unit and at the worst: {medians} units (medians of "
        f"{len(waits.moments[0])}), each picture's in the unit that was in its way; in median units at the worst "
        f"{waits.worst_of_median_units:.2f}; of a single picture {single:.2f} at most."
    )


def _latency_s(tower: Callable[[int], object], num_items: int, place: Place, seconds: float) -> float:
    """Returns the median duration of a forward pass, over at least three passes and for at least `seconds`."""
    _timed(tower, num_items, place)
    found: list[float] = []
    while len(found) < 3 or sum(found) < seconds:
        found.append(_timed(tower, num_items, place))
    return statistics.median(found)


def _timed(tower: Callable[[int], object], num_items: int, place: Place) -> float:
    started_s = time.perf_counter()
    tower(num_items)
    if place.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s
