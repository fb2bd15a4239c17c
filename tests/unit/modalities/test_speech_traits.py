"""Tests what a checkpoint's config says of its speech."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fabric.contracts import ConfigError
from modalities.speech_traits import read_speech_traits

TALKER = {"speaker_id": {"Ethan": 1, "Chelsie": 2}, "accept_hidden_layer": 2}


def written(directory: Path, **values: Any) -> Path:
    config = {"model_type": "qwen3_omni_moe", "talker_config": TALKER} | values
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_checkpoint_that_says_little_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    found = read_speech_traits(written(tmp_path))
    assert (found.voices, found.sample_rate, found.media_layer) == (("ethan", "chelsie"), 24_000, 1)
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
