"""Tests what a checkpoint says of its speech."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from voices_file import voices_file, written_single_code

from fabric.contracts import ConfigError
from modalities.speech_traits import read_speech_traits

TALKER = {"speaker_id": {"Ethan": 1, "Chelsie": 2}, "accept_hidden_layer": 2}


def written(directory: Path, **values: Any) -> Path:
    config = {"model_type": "qwen3_omni_moe", "talker_config": TALKER} | values
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_checkpoint_that_says_little_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    found = read_speech_traits(written(tmp_path))
    assert (found.voices, found.sample_rate) == (("ethan", "chelsie"), 24_000)
    assert (found.row_layer, found.needs_all_rows) == (1, False)
    assert found.frame_s == pytest.approx(0.08)


def test_the_length_of_a_frame_follows_from_the_rates(tmp_path: Path) -> None:
    rates = {"upsample_rates": [4, 3], "upsampling_ratios": [2]}
    assert read_speech_traits(written(tmp_path, code2wav_config=rates)).frame_s == pytest.approx(24 / 24_000)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "qwen3_vl"}, "without a talker"),
        ({"enable_audio_output": False}, "enable_audio_output: false"),
        ({"talker_config": {}}, "names no voice"),
        ({"talker_config": TALKER | {"accept_hidden_layer": 0}}, "accept_hidden_layer is 0"),
    ],
)
def test_a_checkpoint_that_can_not_speak_is_refused(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_speech_traits(written(tmp_path, **values))


# ---------------------------------------------------------------- Qwen2.5-Omni


def test_a_talker_of_all_rows_takes_the_last_layer(tmp_path: Path) -> None:
    found = read_speech_traits(written_single_code(tmp_path))
    assert (found.voices, found.sample_rate) == (("chelsie", "ethan"), 24_000)
    assert (found.row_layer, found.needs_all_rows) == (27, True)
    assert found.frame_s == pytest.approx(0.02)


def test_its_layers_and_rates_are_those_of_the_config(tmp_path: Path) -> None:
    token2wav = {"dit_config": {"repeats": 3}, "bigvgan_config": {"upsample_rates": [4, 2]}}
    thinker = {"text_config": {"num_hidden_layers": 36}}
    found = read_speech_traits(written_single_code(tmp_path, token2wav_config=token2wav, thinker_config=thinker))
    assert found.row_layer == 35
    assert found.frame_s == pytest.approx(24 / 24_000)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"no archive", "can't be read"),
        (voices_file(7), "can't be read"),
        (voices_file({}), "has no voice"),
        (voices_file({"a": Path("/")}), None),
    ],
)
def test_a_file_of_voices_runs_nothing(tmp_path: Path, file: bytes, reason: str | None) -> None:
    """The last file names a class that is not made of it."""
    if reason is None:
        assert read_speech_traits(written_single_code(tmp_path, file)).voices == ("a",)
        return
    with pytest.raises(ConfigError, match=reason):
        read_speech_traits(written_single_code(tmp_path, file))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"enable_audio_output": False}, "enable_audio_output: false"),
        ({"model_type": "qwen2_5_vl"}, "without a talker"),
    ],
)
def test_a_checkpoint_without_speech_is_refused(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_speech_traits(written_single_code(tmp_path, **values))


def test_missing_voices_are_named(tmp_path: Path) -> None:
    directory = written_single_code(tmp_path)
    (directory / "spk_dict.pt").unlink()
    with pytest.raises(ConfigError, match=r"spk_dict\.pt"):
        read_speech_traits(directory)
