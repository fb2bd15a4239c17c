"""Tests which LoRA adapters are refused before a worker loads them, and by which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_files import write_adapter
from safetensors.numpy import load_file, save_file

from fabric.contracts import ConfigError
from modalities.adapter_files import layer_modules, read_adapter

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (12, 8), DOWN: (8, 20)}
VISION = "model.visual.blocks.0.attn.qkv"


def write_model(folder: Path, prefix: str = "model.language_model.", has_weights: bool = True) -> Path:
    """Writes weights of a model, or an index of them alone. transformers names the layers differently over time."""
    folder.mkdir(parents=True)
    names = [module.replace("model.", prefix, 1) for module in SHAPES]
    weights = {
        f"{name}.weight": np.zeros(shape, np.float32) for name, shape in zip(names, SHAPES.values(), strict=True)
    }
    weights |= {f"{VISION}.weight": np.zeros((8, 8), np.float32), "lm_head.weight": np.zeros((30, 8), np.float32)}
    if has_weights:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        index = {"weight_map": dict.fromkeys(weights, "model-1.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", "thinker.model."])
@pytest.mark.parametrize("has_weights", [True, False])
def test_an_adapter_fits_however_the_layers_are_named(tmp_path: Path, prefix: str, has_weights: bool) -> None:
    model_dir = write_model(tmp_path / "model", prefix, has_weights)
    found = read_adapter(write_adapter(tmp_path / "poet", SHAPES, 4), model_dir)
    assert (found.directory, found.max_rank) == (tmp_path / "poet", 4)
    shapes = {"layers.0.self_attn.q_proj": (12, 8), "layers.1.mlp.down_proj": (8, 20)}
    assert layer_modules(model_dir) == (shapes if has_weights else dict.fromkeys(shapes, ()))


def test_the_largest_rank_of_a_pattern_counts(tmp_path: Path, model_dir: Path) -> None:
    adapter = write_adapter(tmp_path / "poet", SHAPES, 4, r=2, rank_pattern={"q_proj": 16, "down_proj": 4})
    assert read_adapter(adapter, model_dir).max_rank == 16


def test_modules_are_not_compared_with_a_model_whose_weights_are_elsewhere(tmp_path: Path) -> None:
    nowhere = tmp_path / "small files only"
    nowhere.mkdir()
    assert layer_modules(nowhere) is None
    assert read_adapter(write_adapter(tmp_path / "poet", {"model.layers.9.x": (2, 2)}, 1), nowhere).max_rank == 1
    with pytest.raises(ConfigError, match="the vision tower"):
        read_adapter(write_adapter(tmp_path / "painter", {VISION: (8, 8)}, 1), nowhere)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3, and only LORA is served"),
        ({"use_dora": True}, r"is a DoRA adapter \(use_dora\), which vLLM workers do not take"),
        ({"modules_to_save": ["lm_head"]}, r"replaces whole modules \(modules_to_save\)"),
        ({"bias": "all"}, "bias is all"),
        ({"lora_bias": True}, r"changes biases \(lora_bias\)"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights is pissa_niter_4, which changes the weights of the",
        ),
        ({"alora_invocation_tokens": [1]}, "an activated LoRA"),
        ({"layer_replication": [[0, 1]]}, "repeats layers"),
        ({"trainable_token_indices": [3]}, "the embeddings of tokens"),
        ({"target_parameters": ["experts"]}, "no linear modules"),
        ({"r": 0}, "the rank .* at least 1"),
        ({"r": None}, "the rank .* at least 1"),
        ({"rank_pattern": {"q_proj": "8"}}, "the rank .* at least 1"),
        ({"lora_alpha": None}, "lora_alpha must be a number, not None"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"r": 2}, f"the factors of {Q} have ranks 4 and 4, but the config says 2"),
    ],
)
def test_what_is_not_plain_lora_is_named(
    tmp_path: Path, model_dir: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_adapter(write_adapter(tmp_path / "poet", SHAPES, 4, **changes), model_dir)


def test_neutral_values_of_unsupported_keys_pass(tmp_path: Path, model_dir: Path) -> None:
    neutral = {"use_dora": False, "modules_to_save": None, "init_lora_weights": "gaussian", "layer_replication": None}
    assert read_adapter(write_adapter(tmp_path / "poet", SHAPES, 4, **neutral), model_dir).max_rank == 4


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {VISION: (8, 8)},
            r"changes the vision tower \(model.visual.blocks.0.attn.qkv\); encoders compute the features",
        ),
        ({"model.visual.merger.mlp.0": (8, 8)}, "changes the vision tower"),
        ({"multi_modal_projector.linear_1": (8, 8)}, "changes the projector"),
        ({"thinker.audio_tower.layers.0.fc1": (8, 8)}, "changes the audio tower"),
        ({"lm_head": (30, 8)}, "changes lm_head; here it may change linear modules of the layers only"),
        ({"model.embed_tokens": (30, 8)}, "changes model.embed_tokens"),
        ({"model.layers.7.self_attn.q_proj": (12, 8)}, "this model has no model.layers.7.self_attn.q_proj; is the"),
        ({f"model.layers.0.x{n}": (2, 2) for n in range(5)}, "this model has no .*x0, .*x1, .*x2 and 2 more"),
        ({Q: (12, 9)}, "made for 9 inputs and 12 outputs, but the module has 8 and 12 in this model"),
    ],
)
def test_modules_that_can_not_be_changed_are_named(
    tmp_path: Path, model_dir: Path, shapes: dict[str, tuple[int, int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_adapter(write_adapter(tmp_path / "poet", shapes, 2), model_dir)


def test_missing_and_broken_files_are_named(tmp_path: Path, model_dir: Path) -> None:
    adapter = write_adapter(tmp_path / "poet", SHAPES, 2)
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    factors = load_file(weights)
    for changed, message in (
        ({}, "it has no weights"),
        ({"base_model.model.lm_head.weight": np.zeros((30, 8))}, "lm_head.weight is no factor of a linear module"),
        (
            {f"base_model.model.{Q}.lora_magnitude_vector": np.zeros(12)},
            "lora_magnitude_vector is no factor of a linear module",
        ),
        ({f"base_model.model.{Q}.lora_A.weight": np.zeros((2, 8))}, f"{Q} needs two factors"),
        (factors | {f"base_model.model.{Q}.lora_A.weight": np.zeros((1, 8))}, "have ranks 1 and 2"),
    ):
        save_file(changed, weights)
        with pytest.raises(ConfigError, match=message):
            read_adapter(adapter, model_dir)
    for content in (b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{"):
        weights.write_bytes(content)
        with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
            read_adapter(adapter, model_dir)
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"can't read .*adapter_config\.json"):
        read_adapter(adapter, model_dir)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"no LoRA adapter: it has no adapter_model\.safetensors"):
        read_adapter(adapter, model_dir)
    config.unlink()
    with pytest.raises(ConfigError, match=r"poet is no LoRA adapter: it has no adapter_config\.json"):
        read_adapter(adapter, model_dir)
