"""Compares videos and sounds of the Qwen families with transformers: prompts and positions of any mixture, frames and
patches of any size, and the effects of limits and options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference_videos
import torch
from family_row import FILM, FamilyRow
from family_rows_qwen3_omni import QWEN3_OMNI
from family_rows_qwen_vl import QWEN2_5_OMNI, QWEN2_5_VL, QWEN2_VL, QWEN3_VL, token_types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lossless_files import mkv
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from fabric.contracts import ConfigError, InvalidMedia, MediaItem
from modalities.families.qwen_vl.patches import VideoDefaults, cut_video, read_video_options, step_patches
from modalities.family import (
    DEFAULT_OPTIONS,
    AudioHeader,
    EncoderInput,
    Family,
    ImageHeader,
    ItemPlan,
    MediaOptions,
    VideoHeader,
)
from modalities.media import frame_sampling as video_rows
from modalities.media import plan_media
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

ROWS = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN2_5_OMNI, QWEN3_OMNI)
OMNI: dict[str, Any] = {"qwen2_5_omni": Qwen2_5OmniProcessor, "qwen3_omni": Qwen3OmniMoeProcessor}
RATES = (1.0, 5.0, 10.0, 24.0, 25.0, 30.0)


@dataclass(frozen=True)
class Saved:
    row: FamilyRow
    model: Any
    family: Family


@pytest.fixture(scope="module", params=ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    row: FamilyRow = request.param
    directory = tmp_path_factory.mktemp(row.name)
    model = row.build()
    model.config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {"architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(config))
    for name, content in row.files.items():
        (directory / name).write_text(json.dumps(content))
    return Saved(row, model, REGISTRY.load_family(directory))


@dataclass(frozen=True)
class Part:
    kind: str
    header: Any
    text: int
    """Counts the tokens of text after the part."""


sizes = st.integers(20, 300)
sounds = st.builds(AudioHeader, st.just("WAV"), st.just(16_000), st.just(1), st.integers(8_000, 300_000))


@st.composite
def videos(draw: st.DrawFn) -> VideoHeader:
    num_frames, fps = draw(st.integers(1, 400)), draw(st.sampled_from(RATES))
    return VideoHeader("MP4", draw(sizes), draw(sizes), num_frames, num_frames / fps)


KIND_TO_HEADERS: dict[str, st.SearchStrategy[Any]] = {
    "image": st.builds(ImageHeader, st.just("PNG"), sizes, sizes, st.just("RGB")),
    "video": videos(),
    "audio": sounds,
    FILM: st.tuples(videos(), sounds).map(lambda pair: replace(pair[0], sound=pair[1])),
}


def prompts(row: FamilyRow) -> st.SearchStrategy[list[Part]]:
    """Returns prompts that the reference can process: it cannot have silent videos and videos with sound in one prompt,
    and it has no positions for sounds alone."""

    def parts(kinds: Sequence[str]) -> st.SearchStrategy[list[Part]]:
        one = st.sampled_from(kinds).flatmap(
            lambda kind: st.builds(Part, st.just(kind), KIND_TO_HEADERS[kind], st.integers(0, 5))
        )
        return st.lists(one, min_size=1, max_size=4).filter(lambda found: any(p.kind != "audio" for p in found))

    silent = parts([kind for kind in row.kinds if kind != FILM])
    return silent | parts([kind for kind in row.kinds if kind != "video"]) if FILM in row.kinds else silent


def letters(text: str, behind: int | None = None) -> list[int]:
    return [3 + ord(letter) % 80 for letter in text]


def planned(family: Family, part: Part, media: list[MediaItem], plans: list[ItemPlan]) -> None:
    headers = [part.header] if part.kind != FILM else [part.header, part.header.sound]
    for index, header in enumerate(headers):
        plan, item = plan_media(family, b"", header, len(media), "p", anchor=len(media) - 1 if index else -1)
        plans.append(plan)
        media.append(item)


def reference_ids(saved: Saved, part: Part, plans: Sequence[ItemPlan]) -> list[int]:
    """Returns the tokens that the reference's processor puts in place of the placeholder."""
    family: Any = saved.family
    tokens, marks = family.config.modality_to_token, family.config.marks
    if part.kind in ("image", "audio") or (part.kind == "video" and saved.row is not QWEN3_VL):
        return [tokens[part.kind]] * sum(plans[0].unit_tokens)
    grid = np.array([plans[0].grid])
    names = {"v": tokens["video"], "<": marks.vision_start, ">": marks.vision_end}
    if part.kind == "video":
        cut = cut_video(part.header, DEFAULT_OPTIONS, family.config.video)
        processor = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            video_token="\ue000",
            vision_start_token="\ue001",
            vision_end_token="\ue002",
        )
        processor._calculate_timestamps = lambda *args: Qwen3VLProcessor._calculate_timestamps(processor, *args)
        metadata = VideoMetadata(part.header.num_frames, fps=part.header.fps, frames_indices=list(cut.frames))
        inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
        text = Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
        spelled = dict(zip("\ue000\ue001\ue002", (names["v"], names["<"], names[">"]), strict=True))
        return [spelled[letter] if letter in spelled else letters(letter)[0] for letter in text]
    kind = OMNI[saved.row.name]
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        audio_bos_token="(",
        audio_eos_token=")",
        audio_token="a",
        video_token="v",
    )
    processor.get_chunked_index = lambda *args: kind.get_chunked_index(processor, *args)
    seen = {"video_grid_thw": grid, "video_second_per_grid": [plans[0].row_seconds]}
    heard = {"num_audio_tokens": [sum(plans[1].unit_tokens)]}
    per_second = saved.model.config.position_id_per_seconds
    text = kind.replace_video_with_audio_token(
        processor, seen, 0, heard, 0, position_id_per_seconds=per_second, seconds_per_chunk=2.0
    )
    spelled = {"(": marks.audio_start, ")": marks.audio_end, "a": tokens["audio"], "v": tokens["video"]}
    return [spelled[letter] for letter in text]


def rope_index(saved: Saved, ids: torch.Tensor, parts: Sequence[Part], media: Sequence[MediaItem]) -> Any:
    def grids(modality: str) -> torch.Tensor | None:
        found = [item.grid for item in media if item.modality == modality]
        return torch.tensor(found) if found else None

    seconds = torch.tensor([item.row_seconds for item in media if item.modality == "video"])
    kwargs: dict[str, Any] = {"image_grid_thw": grids("image"), "video_grid_thw": grids("video")}
    if saved.row in (QWEN2_5_OMNI, QWEN3_OMNI):
        heard = [item.grid[0] for item in media if item.modality == "audio"]
        kwargs |= {
            "second_per_grids": seconds,
            "audio_seqlens": torch.tensor(heard),
            "use_audio_in_video": any(part.kind == FILM for part in parts),
        }
        return saved.model.get_rope_index(ids, attention_mask=torch.ones_like(ids), **kwargs)[0]
    if saved.row is QWEN2_5_VL:
        kwargs["second_per_grid_ts"] = seconds
    return saved.model.model.get_rope_index(ids, attention_mask=torch.ones_like(ids), **token_types(ids), **kwargs)[0]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_prompts_and_positions_equal_the_references(saved: Saved, data: st.DataObject) -> None:
    parts = data.draw(prompts(saved.row))
    token_ids, expected = [5, 6], [5, 6]
    media: list[MediaItem] = []
    plans: list[ItemPlan] = []
    for part in parts:
        first = len(plans)
        planned(saved.family, part, media, plans)
        markup = saved.row.markup[part.kind]
        text = list(range(7, 7 + part.text))
        token_ids += [*markup.before, markup.placeholder, *markup.after, *text]
        expected += [*markup.before, *reference_ids(saved, part, plans[first:]), *markup.after, *text]
    expanded = saved.family.expand(token_ids, plans, letters)
    assert expanded.token_ids == expected
    found = saved.family.positions(expanded.token_ids, expanded.placeholders, media)
    want = rope_index(saved, torch.tensor([expected]), parts, media)[:, 0].numpy()
    np.testing.assert_allclose(found.ids, want, atol=num_rounded(saved, media) * 1.01)
    assert found.delta == found.ids[0, -1] + 1 - len(expected)
    rows = sorted((run.item, run.unit, run.row + at) for run in expanded.placeholders for at in range(run.length))
    assert rows == [
        (item.index, unit, row)
        for item in media
        for unit, num_rows in enumerate(item.unit_tokens)
        for row in range(num_rows)
    ]


def num_rounded(saved: Saved, media: Sequence[MediaItem]) -> int:
    """Returns the number of videos for which Qwen3-Omni's reference has fractional positions. Our positions may differ
    by one more for each of them."""
    if saved.row is not QWEN3_OMNI:
        return 0
    steps = [item.row_seconds * 13 for item in media if item.modality == "video" and item.grid[0] > 1]
    return sum(step != int(step) for step in steps)


SIZED = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
COLOURS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
LIMITS = {"min_frames": 4, "max_frames": 768, "cap_pixels_per_frame": False}


@pytest.mark.parametrize("name", ["Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"])
@pytest.mark.parametrize("is_capped", [False, True])
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=sizes, height=sizes, num_frames=st.integers(2, 40), fps=st.sampled_from(RATES))
def test_frames_and_patches_equal_the_video_processors(
    tmp_path: Path, name: str, is_capped: bool, width: int, height: int, num_frames: int, fps: float
) -> None:
    """The frames are smooth pictures; on these, Pillow's and torch's filters differ by one or two levels of 256."""
    content = {**SIZED, **COLOURS, **LIMITS, "cap_pixels_per_frame": is_capped, "video_processor_type": name}
    content |= {"size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256}, "max_video_tokens": 40}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(content))
    rules = read_video_options(tmp_path, VideoDefaults("Qwen2VLVideoProcessor"))
    y, x = np.mgrid[:height, :width] / max(width, height)
    waves = [np.sin(5 * x + 3 * y * channel + index / 4) for index in range(num_frames) for channel in (1, 2, 3)]
    frames = (127 + 120 * np.array(waves)).astype(np.uint8).reshape(num_frames, 3, height, width)
    frames = np.ascontiguousarray(frames.transpose(0, 2, 3, 1))
    expected = reference_videos.look(reference_videos.load(tmp_path, name), frames, fps)
    header = VideoHeader("MP4", width, height, num_frames, num_frames / fps)
    cut = cut_video(header, MediaOptions(max_frames=768, max_tokens=10**6), rules)
    assert list(cut.grid) == expected.grid
    assert list(dict.fromkeys(cut.frames)) == expected.indices
    patches = np.concatenate(list(step_patches((frames[index] for index in cut.frames), cut.grid, rules.frame)))
    level = 1 / 255 / np.array(COLOURS["image_std"])
    found = patches.reshape(len(patches), 3, -1) - expected.patches.numpy().reshape(len(patches), 3, -1)
    assert (np.abs(found) <= 2.01 * level[None, :, None]).all()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=videos(), data=st.data())
def test_plans_keep_what_was_wished(saved: Saved, header: VideoHeader, data: st.DataObject) -> None:
    family: Any = saved.family
    options = MediaOptions(
        sampling=data.draw(st.sampled_from(["fps", "uniform", "keyframe"])),
        fps=data.draw(st.sampled_from([0.5, 2.0, 3.0])),
        max_frames=data.draw(st.integers(2, 40)),
        max_tokens=data.draw(st.integers(120, 900)),
        num_pooled_frames=data.draw(st.integers(1, 4)),
        keep_fraction=data.draw(st.sampled_from([0.01, 0.3, 0.5, 1.0])),
        reduction=data.draw(st.integers(0, 3)),
    )
    plan, item = plan_media(family, b"", header, 0, "p", options=options)
    cut = cut_video(header, options, family.config.video)
    num_groups = -(-plan.grid[0] // options.num_pooled_frames)
    assert sum(plan.unit_tokens) <= options.max_tokens
    assert len(cut.frames) <= max(options.max_frames, 2)
    assert sum(plan.unit_tokens) == num_groups * len(cut.rows.kept)
    num_rows = plan.grid[1] * plan.grid[2] // 4
    assert abs(len(cut.rows.kept) - num_rows * options.keep_fraction) <= 1
    gaps = np.diff([-1, *cut.rows.kept, num_rows])
    assert gaps.min() >= 1
    assert gaps[1:-1].max(initial=1) - gaps[1:-1].min(initial=num_rows) <= 1
    assert sum(cut.unit_steps) == plan.grid[0]
    assert len(plan.frame_times_s) == plan.grid[0]
    assert all(0 <= at <= header.seconds for at in plan.frame_times_s)
    whole = family.plan(header, replace(options, reduction=0))
    assert plan.grid[1:] == whole.grid[1:]
    # The reduction halves the frames, and a step holds two frames. The last step of `whole` may be filled with a
    # repeated frame.
    frames = {max(count >> options.reduction, 1) for count in (2 * whole.grid[0] - 1, 2 * whole.grid[0])}
    if family.config.video.is_budget_shared:  # The number of steps is rounded up.
        assert plan.grid[0] in {-(-count // 2) for count in frames}
    else:  # The number of steps is rounded down.
        assert plan.grid[0] == max(max(frames) // 2, 1) == max(whole.grid[0] >> options.reduction, 1)
    # The prompt and its positions match the plan, regardless of the rows that were left out.
    expanded = family.expand([1, family.config.modality_to_token["video"], 2], [plan], letters)
    positions = family.positions(expanded.token_ids, expanded.placeholders, [item])
    video = np.array(expanded.token_ids) == family.config.modality_to_token["video"]
    assert video.sum() == sum(plan.unit_tokens)
    if not family.config.video_time.is_written and options.keep_fraction == 1.0 and options.num_pooled_frames == 1:
        assert len(np.unique(positions.ids[:, video], axis=1).T) in (video.sum(), num_rows)


def test_rows_are_averaged_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The units have several steps, and the last unit has an odd number of them."""
    monkeypatch.setattr(video_rows, "UNIT_PATCHES", 4 * 24)
    QWEN3_OMNI.build().save_pretrained(tmp_path)
    for name, content in QWEN3_OMNI.files.items():
        (tmp_path / name).write_text(json.dumps(content))
    family = REGISTRY.load_family(tmp_path)
    rng = np.random.default_rng(0)
    data = mkv(rng.integers(0, 256, (14, 64, 96, 3), dtype=np.uint8), 2)
    header = REGISTRY.modality("video").probe(data, "p")
    encoder = family.load_encoder(tmp_path, "cpu", "float32", ["video"])

    def features(options: MediaOptions) -> tuple[torch.Tensor, MediaItem, list[EncoderInput]]:
        item = plan_media(family, data, header, 0, "p", options=options).item
        inputs = family.preprocess(data, item)
        found = encoder.encode(inputs)
        assert [one.shape[1] for one in found] == list(item.unit_tokens)
        return torch.cat(found, dim=1), item, inputs

    whole, item, _ = features(DEFAULT_OPTIONS)
    assert item.grid == (7, 4, 6)
    steps = whole.reshape(whole.shape[0], 7, 6, -1)
    thinned, item, inputs = features(MediaOptions(num_pooled_frames=2, keep_fraction=0.5))
    assert item.unit_tokens == (6, 6)
    assert [unit.grid for unit in inputs] == [(4, 4, 6), (3, 4, 6)]
    pairs = [steps[:, 0:2], steps[:, 2:4], steps[:, 4:6], steps[:, 6:7]]
    expected = torch.cat([pair.mean(dim=1)[:, [1, 3, 5]] for pair in pairs], dim=1)
    torch.testing.assert_close(thinned, expected, atol=1e-5, rtol=1e-5)
    halved, item, _ = features(MediaOptions(reduction=1))
    assert item.grid == (3, 4, 6)
    assert halved.shape[1] == 18


def test_what_can_not_be_is_refused(saved: Saved) -> None:
    family: Any = saved.family
    with pytest.raises(InvalidMedia, match="aspect ratio"):
        family.plan(VideoHeader("MP4", 3000, 10, 30, 1.0))
    with pytest.raises(InvalidMedia, match="no frames"):
        family.plan(VideoHeader("MP4", 100, 100, 0, 1.0))
    if saved.row is QWEN3_VL:
        plan = family.plan(VideoHeader("MP4", 100, 100, 10, 1.0))
        with pytest.raises(ConfigError, match="tokenizer"):
            family.expand([1, family.config.modality_to_token["video"]], [plan])
