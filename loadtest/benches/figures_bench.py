"""Runs `weft bench figures`: single figures of the articles in docs/references.md, next to what Weft does.

They are the time to submit a medium, the splice of 5,000 tokens and how much faster it is than a loop, a worked merge
of 4,883 tokens with its bytes as a model family plans it, the tokens of a picture for LLaVA-1.5, and the sum of the
bytes of all features. Encode times and batches are in `weft bench encoder`, and the time of a further token of a
request with media against that of a text is in `weft bench isolation`.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.encoder_wait import running_service
from loadtest.benches.engine_parts import splice_times
from loadtest.benches.synthetic import llava_1_5_config, model_of_long_films, qwen2_5_vl_config
from modalities.family import ImageHeader, MediaOptions, VideoHeader
from modalities.registry import REGISTRY

MOST_SUBMIT_MS = 0.1
MOST_SPLICE_MS, LEAST_SPLICE_GAIN = 0.3, 4.0 / 0.3
"""The OmniConnector article (docs/references.md) gives 0.3 ms, and 4 ms for a loop."""
BYTES_PER_NUMBER = 2
NUM_SUBMITTED = 40
LLAVA_SIZES = ((336, 336), (100, 900), (4000, 3000))


class MergePart(NamedTuple):
    """A `MergePart` is a run of a merged prompt, text or the rows of one medium."""

    name: str
    first: int
    num_tokens: int
    num_bytes: int


DOCUMENTED_MERGE = (
    MergePart("text", 0, 7, 57_344),
    MergePart("image", 7, 1_024, 8 * 2**20),
    MergePart("text", 1_031, 8, 65_536),
    MergePart("video", 1_039, 3_840, 30 * 2**20),
    MergePart("text", 4_879, 4, 32_768),
)
"""This is the worked merge of the OmniConnector article (docs/references.md): one picture and 30 frames, half
precision."""


class SubmittedMedia(NamedTuple):
    submit_s: float
    """Holds the median processor time to submit a medium."""
    planned_bytes: int
    encoded_bytes: int


def run() -> BenchResult:
    with tempfile.TemporaryDirectory() as folder:
        merge, pictures = planned_merge(_new(Path(folder) / "qwen")), llava_tokens(_new(Path(folder) / "llava"))
        submitted = asyncio.run(submitted_media(_new(Path(folder) / "demo")))
    splice = splice_times()
    splice_ms, loop_ms = 1000 * splice.ours_s, 1000 * splice.loop_s
    rows = [["figure", "document", "here", "what is compared"]]
    rows.append(["submit a medium, ms", "0.1", f"{1000 * submitted.submit_s:.3f}", "an encoder takes a call"])
    rows.append(["splice of 5,000 tokens, ms", "0.3", f"{splice_ms:.3f}", "1,024 numbers a token, half precision"])
    rows.append(["the same bytes copied by memmove, ms", "", f"{1000 * splice.copy_s:.3f}", "what the memory allows"])
    rows.append(["the same in a loop, ms", "4", f"{loop_ms:.1f}", f"{loop_ms / splice_ms:.1f} times the splice"])
    for part, expected in zip(merge, DOCUMENTED_MERGE, strict=True):
        end = part.first + part.num_tokens - 1
        rows.append([f"merge: {part.name}", _describe(expected), _describe(part), f"positions {part.first} to {end}"])
    total = sum(part.num_tokens for part in merge)
    rows.append(["merge: all", "4,883 tokens, ~38 MB", f"{total:,} tokens, {_size(merge)}", "Qwen2.5-VL, hidden 4,096"])
    counts = ", ".join(str(count) for count in sorted(set(pictures)))
    rows.append(["tokens of a picture, LLaVA-1.5", "576", counts, f"{len(pictures)} sizes of pictures"])
    rows.append(
        [
            "total_features_bytes",
            f"{submitted.planned_bytes:,}",
            f"{submitted.encoded_bytes:,}",
            "planned bytes; weft_encoder_feature_bytes_total",
        ]
    )
    is_as_documented = merge == list(DOCUMENTED_MERGE)
    bars = [
        Bar("submit a medium", 1000 * submitted.submit_s, MOST_SUBMIT_MS, "ms", is_max=True),
        Bar("splice of 5,000 tokens", splice_ms, MOST_SPLICE_MS, "ms", is_max=True),
        Bar("splice over the loop", loop_ms / splice_ms, LEAST_SPLICE_GAIN, "x"),
        Bar("merge of 4,883 tokens as documented", float(is_as_documented), 1.0, ""),
        Bar("LLaVA-1.5: sizes of pictures with 576 tokens", pictures.count(576) / len(pictures), 1.0, "share"),
        Bar("total_features_bytes / planned", submitted.encoded_bytes / submitted.planned_bytes, 1.0, ""),
    ]
    notes = [
        f"Submitting is the processor time of an encoder's call until it waits, the median of {NUM_SUBMITTED} "
        "pictures that come at once; hashing and planning are the router's work before it.",
        "The merge is planned for a picture of 896 x 896 and 30 frames of 448 x 448; the article has a picture of "
        "448 x 448 with a token per patch, and frames whose rows are averaged in pairs. The tokens that begin and end "
        "a medium count as text.",
        "The article's splice ran on an A100, next to a loop in Python that copied row by row, as here.",
    ]
    return BenchResult(rows, bars, notes)


def planned_merge(directory: Path) -> list[MergePart]:
    """Returns the worked merge as the family of a Qwen2.5-VL plans it: text, a picture, text, a video, text."""
    family = REGISTRY.load_family(qwen2_5_vl_config(directory))
    plans = [
        family.plan(ImageHeader("PNG", 896, 896, "RGB"), MediaOptions()),
        family.plan(VideoHeader("MP4", 448, 448, 30, 1.0), MediaOptions(fps=30.0, max_frames=30)),
    ]
    start, end, image, video, word = 2044, 2045, 2046, 2047, 1
    prompt = [*[word] * 6, start, image, end, *[word] * 6, start, video, end, *[word] * 3]
    expanded = family.expand(prompt, plans)
    row_bytes = family.shape.hidden_size * BYTES_PER_NUMBER
    parts, at = [], 0
    for index, plan in enumerate(plans):
        runs = [run for run in expanded.placeholders if run.item == index]
        first, last = min(run.offset for run in runs), max(run.end for run in runs)
        parts.append(MergePart("text", at, first - at, (first - at) * row_bytes))
        parts.append(MergePart(plan.modality, first, last - first, sum(plan.unit_tokens) * row_bytes))
        at = last
    left = len(expanded.token_ids) - at
    return [*parts, MergePart("text", at, left, left * row_bytes)]


def llava_tokens(directory: Path) -> list[int]:
    """Returns how many tokens LLaVA-1.5 makes of pictures of several sizes."""
    family = REGISTRY.load_family(llava_1_5_config(directory))
    plans = [family.plan(ImageHeader("PNG", width, height, "RGB"), MediaOptions()) for width, height in LLAVA_SIZES]
    return [sum(plan.unit_tokens) for plan in plans]


async def submitted_media(directory: Path) -> SubmittedMedia:
    """Submits pictures to an encoder service of the demo model, all in one turn of its event loop. The demo model is
    linked into `directory`."""
    model_dir = model_of_long_films(directory)
    shape = REGISTRY.load_family(model_dir).shape
    async with running_service(model_dir, "cpu") as stage:
        await stage.encode_s(stage.picture())
        before, shown = stage.encoded_bytes, [stage.picture() for _ in range(NUM_SUBMITTED)]
        seconds = await asyncio.gather(*(stage.submit_s(each) for each in shown))
        items = [item for each in shown for item in each.request.items]
        num_rows = sum(item.num_tokens * (item.num_levels or shape.num_levels) for item in items)
        encoded_bytes = stage.encoded_bytes - before
    return SubmittedMedia(statistics.median(seconds), num_rows * shape.hidden_size * 4, encoded_bytes)


def _new(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _describe(part: MergePart) -> str:
    return f"{part.num_tokens:,} tokens, {_size([part])}"


def _size(parts: Sequence[MergePart]) -> str:
    num_bytes = sum(part.num_bytes for part in parts)
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 1000:.0f} KB"
