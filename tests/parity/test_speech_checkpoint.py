"""Tests how a talker is loaded from a checkpoint, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modalities_files import PREPROCESSOR
from safetensors.torch import load_file, save_file
from tiny_speech import TOKENS_OF_CHAT, tiny_omni

from fabric.contracts import (
    ConfigError,
    EngineFailed,
    MemberId,
    PlaceholderRange,
    ProtocolError,
    RequestId,
    StagePrompt,
    StageRequest,
)
from llm_workers.speech import TalkerStage, load_talker
from llm_workers.speech.talker_stage import HiddenRows
from llm_workers.stages import StageChunk, StageSpan

pytestmark = pytest.mark.torch

POOL = (8, 16)
PROMPT = (TOKENS_OF_CHAT["im_start_token_id"], TOKENS_OF_CHAT["assistant_token_id"], 119)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("omni")
    tiny_omni().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return path


@pytest.fixture(scope="module")
def talker(model_dir: Path) -> TalkerStage:
    return load_talker(model_dir, "cpu", "float32", POOL)


def changed(model_dir: Path, path: Path, remove: str, config: dict[str, Any] | None = None) -> Path:
    """Copies the checkpoint without the weights whose names begin with `remove`."""
    shutil.copytree(model_dir, path, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not (remove and name.startswith(remove))}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    found = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(found | (config or {})))
    return path


def test_only_the_talker_and_the_embeddings_are_loaded(model_dir: Path, tmp_path: Path) -> None:
    path = changed(model_dir, tmp_path, "thinker.visual.")
    stage = load_talker(changed(path, tmp_path / "less", "code2wav."), "cpu", "float32", POOL)
    assert stage.kv.num_blocks == POOL[0]
    loaded = stage._network._text_embeddings
    assert torch.equal(loaded, load_file(model_dir / "model.safetensors")["thinker.model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("remove", "config", "message"),
    [
        ("talker.", {}, "lacks"),
        ("talker.model.layers.1.mlp.experts.2.up_proj", {}, "can't load|lacks"),
        ("talker.code_predictor.lm_head.0", {}, "lacks 1"),
        ("thinker.model.embed_tokens", {}, "embed_tokens"),
        ("", {"enable_audio_output": False}, "no talker"),
    ],
)
def test_a_checkpoint_without_a_talker_is_refused(
    model_dir: Path, tmp_path: Path, remove: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_talker(changed(model_dir, tmp_path, remove, config), "cpu", "float32", POOL)


def request(name: str, prompt: StagePrompt | None) -> StageRequest:
    return StageRequest(RequestId(name), 0, MemberId("router"), "", 1, (0.0, name), None, prompt)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"token_ids": np.array([5.0]), "first_index": 0}, "integers"),
        ({"token_ids": np.array([5])}, "first_index"),
        ({"token_ids": np.array([5]), "first_index": 3}, "start at 3"),
        ({"token_ids": np.array([10**6]), "first_index": 0}, "does not know"),
        ({"prompt_hidden": np.zeros((1, 64), np.float32)}, "one position"),
        ({"prompt_hidden": np.zeros((1, 63), np.float32), "prompt_hidden_at": np.array([0])}, "64 values"),
        ({"prompt_hidden": np.zeros((1, 64), np.float32), "prompt_hidden_at": np.array([0])}, "other positions"),
    ],
)
def test_wrong_payloads_are_refused(talker: TalkerStage, payload: dict[str, Any], message: str) -> None:
    call = request("r", StagePrompt(PROMPT))
    talker.open(call)
    try:
        with pytest.raises(ProtocolError, match=message):
            talker.receive(StageChunk(call.key, 0, False, payload))
    finally:
        talker.close(call.key)


def test_hidden_rows_may_be_bfloat16(talker: TalkerStage) -> None:
    rows = torch.randn(2, 64).bfloat16()
    prompt = StagePrompt((5, 5, *PROMPT), (PlaceholderRange(0, 2, 0, 0, 0),))
    call = request("r", prompt)
    talker.open(call)
    payload = {"prompt_hidden": rows.view(torch.uint16).numpy(), "prompt_hidden_at": np.array([0, 1])}
    talker.receive(StageChunk(call.key, 0, False, payload))
    assert torch.equal(talker._key_to_request[call.key].hidden.take(np.arange(2)), rows.float())
    talker.close(call.key)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1, 1, 1, 1, 1), (7, 0, 2, 30, 1)])
def test_hidden_rows_keep_their_order(sizes: tuple[int, ...]) -> None:
    kept, parts = HiddenRows(4, torch.bfloat16), [torch.randn(size, 4) for size in sizes]
    for number, part in enumerate(parts):
        kept.append(part)
        assert len(kept) == sum(sizes[: number + 1])
    at = np.random.default_rng(1).integers(0, sum(sizes), 50)
    assert torch.equal(kept.take(at), torch.cat(parts).bfloat16()[torch.from_numpy(at)])
    with pytest.raises(IndexError):
        kept.take(np.array([sum(sizes)]))


def test_a_call_without_a_prompt_and_a_second_call_are_refused(talker: TalkerStage) -> None:
    with pytest.raises(ProtocolError, match="no prompt"):
        talker.open(request("r", None))
    call = request("r", StagePrompt(PROMPT))
    talker.open(call)
    with pytest.raises(ProtocolError, match="open already"):
        talker.open(call)
    talker.close(call.key)
    assert talker.num_states == 0


def test_weights_that_are_not_finite_end_the_step(model_dir: Path, tmp_path: Path) -> None:
    path = changed(model_dir, tmp_path, "")
    weights = load_file(path / "model.safetensors")
    weights["talker.model.norm.weight"][0] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    stage = load_talker(path, "cpu", "float32", POOL)
    call = request("r", StagePrompt(PROMPT))
    stage.open(call)
    stage.receive(StageChunk(call.key, 0, True, {"token_ids": np.array([5]), "first_index": 0}))
    with pytest.raises(EngineFailed, match="not finite"):
        stage.execute([StageSpan(call.key, 0, stage.num_units_ready(call.key), np.array([0]))])
    assert not stage.is_complete(call.key)
