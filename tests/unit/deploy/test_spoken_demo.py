"""Tests `weft demo --speak` against a cluster of fake members: what it prints, and the sound that it writes."""

from __future__ import annotations

import wave
from pathlib import Path

import pytest
from served_fakes import served_fakes
from voices_file import written_single_code

from deploy.commands.serve_cluster import apply_overrides
from deploy.config import ClusterConfig
from deploy.demo.hear import SPOKEN_TASKS, run_spoken_demo
from deploy.speech_parts import speech_settings, with_talker_rows
from deploy.testing import spoken_samples
from fabric.contracts import ConfigError, Unavailable
from llm_workers.worker_config import WorkerConfig
from modalities.speech_traits import read_speech_traits
from router.router_config import SpeechSettings

SPEECH = SpeechSettings(("anna", "ben"), 24_000)


def test_the_answers_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.wav"
    with served_fakes(speech=SPEECH, max_model_len=4096) as served:

        def add_stages() -> None:
            served.cluster.add_stage(1, "talker", is_last=False)
            served.cluster.add_stage(2, "code2wav", is_last=True)
            served.cluster.publish()

        served.do(add_stages)
        assert run_spoken_demo(served.url, 0, path) == 0
    said = capsys.readouterr().out
    assert said.count("anna: ") == said.count("ben: ") == len(SPOKEN_TASKS) // 2
    assert f"The answers are in {path}." in said
    with wave.open(str(path)) as file:
        samples = file.readframes(file.getnframes())
    assert samples.count(spoken_samples()) == len(SPOKEN_TASKS)


def test_a_cluster_without_speech_is_told_apart(tmp_path: Path) -> None:
    with served_fakes() as served, pytest.raises(Unavailable, match="weft serve --speech"):
        run_spoken_demo(served.url, 0, tmp_path / "answers.wav")
    assert list(tmp_path.iterdir()) == []


def test_serve_takes_speech_from_the_command_line() -> None:
    assert apply_overrides(ClusterConfig(), {}).stages is None
    config = apply_overrides(ClusterConfig(), {}, has_speech=True)
    assert config.stages is not None
    assert [stage.model_stage for stage in config.stages.later] == ["talker", "code2wav"]
    own = ClusterConfig.model_validate({"stages": {"async_chunk": False}})
    assert apply_overrides(own, {}, has_speech=True).stages == own.stages


def test_a_model_without_a_voice_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    config = ClusterConfig.model_validate({"stages": {}})
    with pytest.raises(ConfigError, match=r"stages is set, but .* is a llama without a talker"):
        speech_settings(config, tmp_path)
    assert speech_settings(ClusterConfig(), tmp_path) is None


def test_a_talker_of_all_rows_needs_workers_that_store_them(tmp_path: Path) -> None:
    directory = written_single_code(tmp_path)
    found = speech_settings(ClusterConfig.model_validate({"stages": {}}), directory)
    assert found is not None
    assert (found.voices, found.talker_rows, found.needs_all_rows) == (("chelsie", "ethan"), "talker", True)
    worker = with_talker_rows(WorkerConfig(), read_speech_traits(directory))
    assert (worker.side_layers, worker.needs_all_rows) == ((("talker", 27),), True)
    config = ClusterConfig.model_validate({"stages": {}, "workers": {"tensor_parallel": 2}})
    with pytest.raises(ConfigError, match="tensor_parallel must be 1, not 2"):
        speech_settings(config, directory)
