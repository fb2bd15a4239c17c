"""Tests how the families plan videos, from config files and headers alone: what is read, counted, written and
refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modalities_files import VIDEO_PREPROCESSOR, thinker_config, write_config

from fabric.contracts import ConfigError, InvalidMedia, InvalidRequest
from modalities.families.qwen_vl.layout import MeasuredTime, SharedTime
from modalities.families.qwen_vl.patches import SizeRange, VideoDefaults, read_video_options
from modalities.family import AudioHeader, Family, FeatureRows, MediaOptions, VideoHeader, expand_pieces
from modalities.pixel_options import CLIP_MEAN, CLIP_STD
from modalities.registry import REGISTRY

QWEN2, QWEN3 = VideoDefaults("Qwen2VLVideoProcessor"), VideoDefaults("Qwen3VLVideoProcessor")
OMNI = VideoDefaults("Qwen2VLVideoProcessor", SizeRange(128 * 32 * 32, 768 * 32 * 32))
CLIP = VideoHeader("MP4", 96, 64, 48, 12.0)
SOUND = AudioHeader("MP4", 16_000, 1, 16_000 * 12)


def write(directory: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def omni(tmp_path: Path, **config: Any) -> Family:
    write_config(tmp_path, thinker_config() | config)
    write(tmp_path, video_preprocessor_config=VIDEO_PREPROCESSOR)
    return REGISTRY.load_family(tmp_path)


def test_which_file_speaks_of_videos(tmp_path: Path) -> None:
    write(tmp_path, preprocessor_config={"patch_size": 14, "min_pixels": 3136, "max_pixels": 99_000})
    # As in the reference, the file for pictures counts.
    assert read_video_options(tmp_path, QWEN2).frame.max_pixels == 99_000
    assert read_video_options(tmp_path, OMNI).frame.max_pixels == 768 * 32 * 32  # The omni processors ask for this.
    write(tmp_path, video_preprocessor_config={"size": {"shortest_edge": 4096, "longest_edge": 77_000}})
    assert read_video_options(tmp_path, OMNI).frame.max_pixels == 77_000
    write(tmp_path, processor_config={"video_processor": {"size": {"shortest_edge": 4096, "longest_edge": 55_000}}})
    found = read_video_options(tmp_path, QWEN3)
    assert (found.frame.max_pixels, found.frame.patch_size, found.is_budget_shared) == (55_000, 16, True)
    assert (found.min_frames, found.max_frames, found.frame.mean) == (4, 768, (0.5, 0.5, 0.5))


@pytest.mark.parametrize("content", [{}, {"image_mean": None, "image_std": None}], ids=["absent", "null"])
def test_frames_are_normalised_by_the_colours_of_their_processor(tmp_path: Path, content: dict[str, Any]) -> None:
    write(tmp_path, video_preprocessor_config=content)
    older, newer = (read_video_options(tmp_path, kind).frame for kind in (QWEN2, QWEN3))
    assert (older.mean, older.std) == (CLIP_MEAN, CLIP_STD)
    assert (newer.mean, newer.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert (older.resample, older.rescale_factor) == (newer.resample, newer.rescale_factor) == (3, 1 / 255)


def test_frames_are_not_normalised_where_the_config_says_so(tmp_path: Path) -> None:
    write(tmp_path, video_preprocessor_config={"do_normalize": False, "do_rescale": False, "image_mean": [1, 2, 3]})
    frame = read_video_options(tmp_path, QWEN3).frame
    assert (frame.mean, frame.std, frame.rescale_factor) == (None, None, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"video_processor_type": "SmolVLMVideoProcessor"}, "SmolVLM"),
        ({"do_resize": False}, "must resize"),
        ({"min_frames": "some"}, "broken"),
    ],
)
def test_processors_that_are_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_video_options(write(tmp_path, video_preprocessor_config=content), QWEN2)


def test_towers_that_do_not_fit_the_video_processor_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, thinker_config())
    write(tmp_path, video_preprocessor_config=VIDEO_PREPROCESSOR | {"patch_size": 14})
    with pytest.raises(ConfigError, match="video preprocessor"):
        REGISTRY.load_family(tmp_path)


def test_frames_are_thinned_out_to_the_limit_of_tokens(tmp_path: Path) -> None:
    family = omni(tmp_path)
    assert family.plan(CLIP).grid == (12, 4, 6)
    assert family.plan(CLIP, MediaOptions(max_tokens=40)).grid == (6, 4, 6)  # There are 6 rows for each of 6 steps.
    assert family.plan(CLIP, MediaOptions(max_tokens=40, keep_fraction=0.5)).grid == (12, 4, 6)
    assert family.plan(CLIP, MediaOptions(max_tokens=40, num_pooled_frames=2)).grid == (12, 4, 6)
    assert family.plan(CLIP, MediaOptions(reduction=1)).grid == (6, 4, 6)
    assert family.plan(VideoHeader("MP4", 2000, 1000, 48, 12.0), MediaOptions(max_tokens=40)).unit_tokens == (32,)
    with pytest.raises(InvalidMedia, match="no frames"):
        family.plan(VideoHeader("MP4", 96, 64, 0, 1.0))


def test_the_time_between_rows(tmp_path: Path) -> None:
    """The time is as requested until a limit makes it longer."""
    family = omni(tmp_path, position_id_per_seconds=13)
    assert family.plan(CLIP).row_seconds == 1.0
    assert family.plan(CLIP, MediaOptions(max_frames=8)).row_seconds == 3.0
    assert family.plan(CLIP, MediaOptions(fps=3.0, max_frames=64)).row_seconds == 2 / 3
    assert SharedTime(per_second=13, is_rounded_up=True, chunk=0).positions(4, 2 / 3).tolist() == [0, 9, 18, 26]
    time = SharedTime(per_second=25, is_rounded_up=False, chunk=50)
    assert time.positions(4, 0.7).tolist() == [0, 17, 35, 52]
    assert MeasuredTime(4).positions(4, 0.7).tolist() == [0, 2, 5, 8]


def test_what_is_seen_and_what_is_heard_by_turns() -> None:
    seen = np.repeat([0, 13, 26], 2)
    merged = SharedTime(per_second=13, is_rounded_up=True, chunk=0).woven(seen, 20)
    assert "".join("v" if flag else "a" for flag in merged) == "vv" + "a" * 13 + "vv" + "a" * 7 + "vv"
    chunked = SharedTime(per_second=25, is_rounded_up=False, chunk=50).woven(np.repeat([0, 25, 50, 75], 1), 80)
    assert "".join("v" if flag else "a" for flag in chunked) == "vv" + "a" * 50 + "vv" + "a" * 30


def test_a_video_and_its_sound_share_a_placeholder(tmp_path: Path) -> None:
    family = omni(tmp_path, position_id_per_seconds=13)
    film = family.plan(CLIP)
    heard = family.plan(SOUND)
    plans = [film, replace(heard, anchor=0)]
    expanded = family.expand([1, 105, 102, 106, 2], plans)
    assert expanded.token_ids[:4] == [1, 105, 104, 102]
    assert expanded.token_ids[-3:] == [107, 106, 2]
    assert expanded.token_ids.count(102) == sum(film.unit_tokens)
    assert expanded.token_ids.count(103) == sum(heard.unit_tokens)
    write_config(tmp_path, {name: value for name, value in thinker_config().items() if name != "audio_end_token_id"})
    with pytest.raises(ConfigError, match="how a video and its sound are interleaved"):
        REGISTRY.load_family(tmp_path).expand([1, 105, 102, 106, 2], plans)


def test_frames_with_their_numbers(tmp_path: Path) -> None:
    """InternVL uses a tile for each frame, and it takes no videos if the tokenizer has no token for them."""
    text = {"model_type": "qwen2", "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"image_size": [28, 28], "patch_size": [7, 7]},
        "image_token_id": 100,
    }
    tokens = {str(index): {"content": name} for index, name in enumerate(("<img>", "</img>", "<video>"), start=103)}
    processor = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 28, "width": 28}}
    write_config(tmp_path, config, processor)
    write(tmp_path, tokenizer_config={"added_tokens_decoder": tokens})
    family = REGISTRY.load_family(tmp_path)
    plan = family.plan(CLIP, MediaOptions(max_frames=3))
    assert (plan.grid, plan.unit_tokens) == ((3, 4, 4), (12,))
    expanded = family.expand([1, 105, 2], [plan], lambda text, behind=None: [*map(ord, text)])
    spelled = [[*map(ord, mark), 103, 100, 100, 100, 100, 104] for mark in ("Frame1: ", "\nFrame2: ", "\nFrame3: ")]
    assert expanded.token_ids == [1, *spelled[0], *spelled[1], *spelled[2], 2]
    assert [(run.unit, run.row, run.length) for run in expanded.placeholders] == [(0, 0, 4), (0, 4, 4), (0, 8, 4)]
    with pytest.raises(ConfigError, match="tokenizer"):
        family.expand([1, 105, 2], [plan])
    write(tmp_path, tokenizer_config={"added_tokens_decoder": dict(list(tokens.items())[:2])})
    assert set(REGISTRY.load_family(tmp_path).max_items) == {"image"}


def test_pieces_that_do_not_match_are_refused(tmp_path: Path) -> None:
    plan = omni(tmp_path).plan(CLIP)
    with pytest.raises(InvalidRequest, match="1 placeholders for 0"):
        expand_pieces([7], {"video": 7}, [], lambda index: [])
    with pytest.raises(InvalidRequest, match="another modality"):
        expand_pieces([8], {"video": 7, "image": 8}, [plan], lambda index: [FeatureRows(index, 0, 1)])
