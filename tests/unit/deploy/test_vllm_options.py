"""Tests that options of vLLM are checked before a cluster starts, and that speech with vLLM is refused. A script
stands for the interpreter of the environment with vLLM; `tests/vllm_cluster` has the real one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from modalities_files import thinker_config, write_config

from deploy import compose
from deploy.cli import main
from deploy.config import ClusterConfig
from deploy.vllm_worker import check_environment, check_options_there, token_kv_bytes
from fabric.contracts import ConfigError

Captured = pytest.CaptureFixture[str]


def interpreter(folder: Path, script: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def config(python: Path, **options: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"workers": {"engine": "vllm", "python": python, "vllm": options}})


def test_options_that_vllm_takes_pass(tmp_path: Path) -> None:
    """The script fails unless the options come as JSON, and Weft's switches for vLLM as variables."""
    python = interpreter(tmp_path, 'test "$(cat)" = \'[{"seed": 7}, "workers"]\' && test "$HF_HUB_OFFLINE" = 1')
    assert check_options_there(config(python, seed=7)) == []
    assert check_options_there(config(interpreter(tmp_path, "exit 1"))) == [], "without options, nothing is asked"
    assert check_options_there(ClusterConfig()) == []


def test_what_vllm_refuses_is_named(tmp_path: Path) -> None:
    python = interpreter(
        tmp_path, "echo a warning >&2; echo workers.vllm has keys that vLLM does not know: sed >&2; exit 3"
    )
    with pytest.raises(ConfigError) as refused:
        check_options_there(config(python, sed=7))
    assert refused.value.message == "workers.vllm has keys that vLLM does not know: sed"


def test_what_weft_decides_is_refused_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workers\.vllm\.dtype can't be set, because model\.dtype says it"):
        check_options_there(config(tmp_path / "nowhere", dtype="float16"))


def test_pipeline_stages_need_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is above 1, and vLLM has pipeline stages on GPUs"):
        check_options_there(config(tmp_path / "nowhere", pipeline_parallel_size=2))
    with pytest.raises(ConfigError, match="must be 1 or more, and it is 'two'"):
        check_options_there(config(tmp_path / "nowhere", pipeline_parallel_size="two"))


@pytest.mark.parametrize(("num_ranks", "share"), [(1, 1), (2, 2), (4, 2), (8, 2)])
def test_each_rank_keeps_the_keys_of_its_own_heads(num_ranks: int, share: int) -> None:
    """A model with two heads of keys shares them among two ranks, and more ranks have copies of them."""
    family: Any = SimpleNamespace(shape=SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=16))
    assert token_kv_bytes(family, "float32", num_ranks) * share == 2 * 3 * 2 * 16 * 4


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo \"ModuleNotFoundError: No module named 'vllm'\" >&2; exit 1")
    with pytest.raises(ConfigError, match="can't import vLLM: ModuleNotFoundError: No module named 'vllm'"):
        check_options_there(config(python, seed=7))
    (tmp_path / "file").write_text("no program")
    with pytest.raises(ConfigError, match="the interpreter of workers with vLLM can't run"):
        check_options_there(config(tmp_path / "file", seed=7))


def test_what_can_not_be_checked_is_said(tmp_path: Path, capsys: Captured) -> None:
    nowhere = tmp_path / "nowhere"
    (unchecked,) = check_options_there(config(nowhere, seed=7))
    assert unchecked.startswith(f"the options in workers.vllm are not checked: {nowhere} is not on this machine")
    with pytest.raises(ConfigError, match="make install-vllm"):
        check_environment(config(nowhere, seed=7))
    slow = interpreter(tmp_path, "exec sleep 30")
    (unchecked,) = check_options_there(config(slow, seed=7), timeout_s=0.05)
    assert unchecked == f"the options in workers.vllm are not checked: {slow} did not answer within 0.05 s"
    file = tmp_path / "weft.yaml"
    file.write_text(f"model: {{path: {nowhere}}}\nworkers: {{engine: vllm, python: {nowhere}, vllm: {{seed: 7}}}}\n")
    assert main(["check", str(file)]) == 0
    assert f"the options in workers.vllm are not checked: {nowhere} is not" in capsys.readouterr().out


def test_check_and_serve_name_a_wrong_option(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("workers: {engine: vllm, vllm: {block_size: 32}}\n")
    assert main(["check", str(file)]) == 1
    assert (
        f"{file}: workers.vllm.block_size can't be set, because workers.block_size says it" in capsys.readouterr().err
    )


SPEECH = "speech (stages) needs workers.engine: weft, because vLLM does not hand over the thinker's hidden states"


def test_speech_with_vllm_is_refused_by_name(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("workers: {engine: vllm}\nstages: {}\n")
    assert main(["check", str(file)]) == 1
    assert SPEECH in capsys.readouterr().err
    file.write_text("workers: {engine: vllm}\n")
    assert main(["serve", "--config", str(file), "--speech"]) == 1
    assert SPEECH in capsys.readouterr().err
    assert main(["serve", "--config", str(file), "--in-process"]) == 1
    assert "serve without --in-process" in capsys.readouterr().err


def test_a_model_that_can_speak_is_said_to_answer_in_text(tmp_path: Path, capsys: Captured) -> None:
    """The demo model can speak."""
    said = "the model can speak, but workers with vLLM answer in text alone; spoken answers need workers.engine: weft"
    for engine, is_said in (("vllm", True), ("weft", False)):
        file = tmp_path / "weft.yaml"
        file.write_text(f"workers: {{engine: {engine}}}\n")
        assert main(["check", str(file)]) == 0
        assert (said in capsys.readouterr().out) == is_said


def test_media_of_a_family_that_was_not_tried_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = SimpleNamespace(name="llava", max_items={"image": 4})
    monkeypatch.setattr("deploy.compose.REGISTRY.load_family", lambda directory: family)
    config = ClusterConfig.model_validate({"workers": {"engine": "vllm"}})
    with pytest.raises(ConfigError, match="not those of llava; use"):
        compose.load_model(config, tmp_path)


def test_a_quantised_checkpoint_is_refused_by_the_name_of_its_scheme(tmp_path: Path, capsys: Captured) -> None:
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    model_dir, file = write_config(tmp_path / "awq", thinker_config() | awq), tmp_path / "weft.yaml"
    file.write_text(f"model: {{path: {model_dir}}}\n")
    assert main(["check", str(file)]) == 1
    assert "quantised by awq; it supports float8" in capsys.readouterr().err
