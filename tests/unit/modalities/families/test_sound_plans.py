"""Tests what a sound becomes, from its header alone: units, rows and costs; and which checkpoints are refused. The
tests import no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_files import noise, wav, write_preprocessor

from fabric.contracts import ConfigError, InvalidMedia, InvalidRequest, UnsupportedModality
from modalities.families.audio_towers.sound_plans import (
    ConvolvedChunks,
    Cutting,
    PooledChunks,
    SoundHalf,
    cut,
    qwen2_5_omni_sound,
    qwen2_audio_sound,
    qwen3_omni_sound,
)
from modalities.families.qwen2_audio import Qwen2AudioFamily
from modalities.family import AudioHeader, ImageHeader, ItemPlan
from modalities.media import plan_media
from modalities.registry import REGISTRY

RATE = 16000
REAL = {"feature_size": 128, "chunk_length": 300}


def qwen3_omni(directory: Path) -> SoundHalf:
    """Returns a sound half with the sizes of the released checkpoints, as the functions below do."""
    return qwen3_omni_sound(write_preprocessor(directory, **REAL), {"output_dim": 2048}, 2048)


def qwen2_5_omni(directory: Path) -> SoundHalf:
    return qwen2_5_omni_sound(write_preprocessor(directory, **REAL), {}, 3584)


def qwen2_audio(directory: Path) -> SoundHalf:
    return qwen2_audio_sound(write_preprocessor(directory, **REAL | {"chunk_length": 30}), {})


def plan(sound: SoundHalf, seconds: float, rate: int = RATE) -> ItemPlan:
    return sound.plan(AudioHeader("WAV", rate, 2, round(seconds * rate)))


@pytest.mark.parametrize(
    ("build", "seconds", "unit_tokens", "cost"),
    [
        (qwen3_omni, 1.0, (13,), 100),
        (qwen3_omni, 0.5, (7,), 50),
        (qwen3_omni, 8.0, (104,), 800),
        (qwen3_omni, 8.01, (104, 1), 801),
        (qwen3_omni, 20.0, (104, 104, 52), 2000),
        (qwen2_5_omni, 1.0, (25,), 100),
        (qwen2_5_omni, 8.0, (200,), 800),
        (qwen2_5_omni, 8.02, (200,), 802),  # The two additional frames give no row of their own.
        (qwen2_5_omni, 8.03, (200, 1), 803),
        (qwen2_5_omni, 400.0, (200,) * 50, 40000),
        (qwen2_audio, 1.0, (25,), 102),
        (qwen2_audio, 30.0, (750,), 3000),
        (qwen2_audio, 30.02, (750,), 3000),
        (qwen2_audio, 30.04, (750, 1), 3006),
        (qwen2_audio, 75.0, (750, 750, 375), 7502),
    ],
)
def test_plans(
    tmp_path: Path, build: Callable[[Path], SoundHalf], seconds: float, unit_tokens: tuple[int, ...], cost: int
) -> None:
    found = plan(build(tmp_path), seconds)
    assert (found.modality, found.unit_tokens, found.cost) == ("audio", unit_tokens, cost)
    assert found.grid[1:] == (1, 1)
    assert found.geometry == (RATE, round(seconds * RATE))


def test_other_rates_are_planned_as_resampled(tmp_path: Path) -> None:
    sound = qwen3_omni(tmp_path)
    assert plan(sound, 2.0, rate=44100).unit_tokens == plan(sound, 2.0).unit_tokens
    assert sound.plan(AudioHeader("WAV", 44100, 1, 44101)).geometry == (RATE, 16001)


@pytest.mark.parametrize(
    ("build", "num_samples"), [(qwen3_omni, 200), (qwen2_5_omni, 320), (qwen2_audio, 320), (qwen3_omni, 1)]
)
def test_too_short(tmp_path: Path, build: Callable[[Path], SoundHalf], num_samples: int) -> None:
    sound = build(tmp_path)
    with pytest.raises(InvalidMedia, match="too short"):
        sound.plan(AudioHeader("WAV", RATE, 1, num_samples))
    assert sum(sound.plan(AudioHeader("WAV", RATE, 1, num_samples + 1 if num_samples > 1 else 201)).unit_tokens) == 1


CUTTINGS: list[Cutting] = [ConvolvedChunks(100, 800), ConvolvedChunks(100, 100), PooledChunks(800), PooledChunks(3000)]


@settings(deadline=None)
@given(num_frames=st.integers(0, 9000), cutting=st.sampled_from(CUTTINGS))
def test_cutting_loses_nothing(num_frames: int, cutting: Cutting) -> None:
    units = cut(num_frames, cutting)
    whole = cutting.num_tokens(num_frames)
    assert sum(unit.num_tokens for unit in units) == whole
    assert sum(unit.num_frames for unit in units) == (num_frames if whole else 0)
    assert all(unit.num_tokens > 0 for unit in units)
    assert all(unit.num_frames == cutting.unit_frames for unit in units[:-1])


@pytest.mark.parametrize(
    ("audio", "hidden_size", "message"),
    [
        ({"num_mel_bins": 80}, 3584, "num_mel_bins"),
        ({}, 2048, "output_dim"),
        ({"n_window": 25}, 3584, "n_window"),
        ({"n_window_infer": 99}, 3584, "n_window_infer"),
        ({"n_window": "50"}, 3584, "positive whole number"),
        ({"n_window": 0}, 3584, "positive whole number"),
    ],
)
def test_checkpoints_that_are_refused(tmp_path: Path, audio: dict[str, Any], hidden_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        qwen3_omni_sound(write_preprocessor(tmp_path, **REAL), audio, hidden_size)


def test_windows_must_be_the_towers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_source_positions"):
        qwen2_audio_sound(write_preprocessor(tmp_path, **REAL), {})


@pytest.fixture
def family(tmp_path: Path) -> Qwen2AudioFamily:
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "audio_config": {"d_model": 1280},
        "text_config": {"vocab_size": 156032, "use_sliding_window": False},
        "audio_token_index": 151646,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_preprocessor(tmp_path, feature_size=128)
    found = REGISTRY.load_family(tmp_path)
    assert isinstance(found, Qwen2AudioFamily)
    return found


def test_the_family(family: Qwen2AudioFamily) -> None:
    assert (family.shape.hidden_size, family.shape.num_levels, family.max_items) == (4096, 1, {"audio": 64})
    assert family.placeholder_text("audio") == "<|AUDIO|>"
    data = wav(noise(40 * RATE), RATE)
    planned = plan_media(family, data, REGISTRY.modality("audio").probe(data, "p"), 0, "p")
    assert planned.item.unit_tokens == (750, 250)
    expanded = family.expand([1, 151646, 2], [planned.plan])
    assert expanded.token_ids == [1, *[151646] * 1000, 2]
    assert [(run.offset, run.length, run.unit) for run in expanded.placeholders] == [(1, 750, 0), (751, 250, 1)]
    positions = family.positions(expanded.token_ids, expanded.placeholders, [planned.item])
    assert (positions.ids.tolist(), positions.delta) == ([list(range(1002))], 0)


def test_what_the_family_does_not_take(family: Qwen2AudioFamily) -> None:
    with pytest.raises(UnsupportedModality):
        family.plan(ImageHeader("PNG", 10, 10, "RGB"))
    for call in (family.placeholder_text, family.options):
        with pytest.raises(UnsupportedModality, match="image"):
            call("image")
    with pytest.raises(InvalidRequest):
        family.expand([1, 2], [family.plan(AudioHeader("WAV", RATE, 1, RATE))])


def test_options_are_the_identity(family: Qwen2AudioFamily, tmp_path: Path) -> None:
    other = write_preprocessor(tmp_path, feature_size=128, hop_length=160, n_fft=512)
    assert REGISTRY.load_family(other).options("audio") != family.options("audio")


def test_the_pure_half_imports_no_torch() -> None:
    code = "import sys, modalities.families.qwen2_audio, modalities.families.audio_towers.sound_plans"
    show = "; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code + show], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"
