"""Tests what config.json says about quantised weights: which schemes are read, and which are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from modalities_files import thinker_config, write_config

from deploy.compose import load_model
from deploy.config import ClusterConfig
from fabric.contracts import ConfigError
from modalities.checkpoint_files import (
    Quantisation,
    names_of_others,
    read_quantisation,
    read_stored_quantisation,
)

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def written(directory: Path, scheme: dict[str, Any], *where: str, key: str = "quantization_config") -> Path:
    config: dict[str, Any] = {key: scheme}
    for section in reversed(where):
        config = {section: config}
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **config}))
    return directory


def compressed(**weights: Any) -> dict[str, Any]:
    values = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": values}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize("where", [(), ("text_config",), ("thinker_config",), ("thinker_config", "text_config")])
def test_block_scales_are_read_wherever_they_stand(tmp_path: Path, where: tuple[str, ...]) -> None:
    found = read_quantisation(written(tmp_path, {**FP8, "modules_to_not_convert": ["lm_head", "visual"]}, *where))
    assert found == Quantisation("fp8", (128, 128), ("lm_head", "visual"))


def test_forms_of_compressed_tensors(tmp_path: Path) -> None:
    for scheme, block in (
        (compressed(), None),
        (compressed(strategy="tensor"), None),
        (compressed(strategy="block", block_structure=[128, 64]), (128, 64)),
        (compressed(strategy="block", block_structure="128x64"), (128, 64)),
    ):
        found = read_quantisation(written(tmp_path, {**scheme, "ignore": ["re:.*visual.*"]}))
        assert found == Quantisation("compressed-tensors", block, ("re:.*visual.*",))
        unnamed = {key: value for key, value in scheme.items() if key != "quant_method"}
        found = read_quantisation(written(tmp_path, unnamed, key="compression_config"))
        assert found == Quantisation("compressed-tensors", block)


def test_a_checkpoint_that_says_nothing_is_not_quantised(tmp_path: Path) -> None:
    assert read_quantisation(written(tmp_path, {})) is None


def test_which_modules_are_left_plain() -> None:
    named = Quantisation("fp8", None, ("lm_head", "visual", "mlp.gate", "re:.*layers\\.1\\..*"))
    plain = ("lm_head.weight", "visual.blocks.0.attn.qkv.weight", "model.visual.x.weight", "model.layers.1.x.weight")
    assert all(named.is_plain(name) for name in (*plain, "model.layers.0.mlp.gate.weight"))
    taken = ("model.layers.0.mlp.gate_proj.weight", "model.layers.11.x.weight", "model.visuals.weight")
    assert not any(named.is_plain(name) for name in taken)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "awq": ({"quant_method": "awq", "bits": 4}, "awq"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "bitsandbytes, unnamed": ({"load_in_8bit": True}, "bitsandbytes"),
    "mxfp4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
    "torchao": ({"quant_method": "torchao"}, "torchao"),
    "hqq": ({"quant_method": "hqq"}, "hqq"),
    "no method": ({"bits": 4}, "a method that quant_method does not name"),
    "int8": (compressed(type="int", num_bits=8), "compressed-tensors of int8"),
    "int4": ({**compressed(type="int", num_bits=4), "format": "pack-quantized"}, "int4 .pack-quantized"),
    "nvfp4": ({**compressed(num_bits=4), "format": "nvfp4-pack-quantized"}, "float4 .nvfp4"),
    "groups": (compressed(strategy="group", group_size=32), "float8 per group"),
    "asymmetric": (compressed(symmetric=False), "asymmetric"),
    "sparse": ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "rotated": ({**compressed(), "transform_config": {"config_groups": {"u": {}}}}, "with transforms"),
    "no groups": ({"quant_method": "compressed-tensors", "config_groups": {}}, "no config_groups"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of format e5m2"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", [(), ("text_config",)])
def test_other_schemes_are_refused_by_name(tmp_path: Path, name: str, where: tuple[str, ...]) -> None:
    """Every component of a cluster whose workers run Weft's own engine refuses these schemes; vLLM has its own list."""
    scheme, match = REFUSED[name]
    directory = written(tmp_path, scheme, *where)
    with pytest.raises(ConfigError, match=rf"{match}.*; it supports float8.*workers.engine: vllm"):
        read_quantisation(directory)
    found = read_stored_quantisation(directory)
    assert found is not None
    assert not found.is_loadable
    assert re.search(match, found.method)


def seeing() -> dict[str, Any]:
    """Returns the config of a model that sees and does not hear, which vLLM takes."""
    thinker = thinker_config()
    names = {"architectures": ["Qwen3VLForConditionalGeneration"]}
    return {name: thinker[name] for name in ("text_config", "vision_config")} | names


def test_the_engine_of_the_workers_decides_which_checkpoints_are_served(tmp_path: Path) -> None:
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    directory = write_config(tmp_path / "awq", seeing() | awq)
    with pytest.raises(ConfigError, match=r"quantised by awq; .* set workers\.engine: vllm"):
        load_model(ClusterConfig(), directory)
    with_vllm = ClusterConfig.model_validate({"workers": {"engine": "vllm"}})
    assert load_model(with_vllm, directory).family.shape.num_layers == 4
    float8 = write_config(tmp_path / "fp8", seeing() | {"quantization_config": FP8})
    for config in (ClusterConfig(), with_vllm):
        assert load_model(config, float8).family is not None


@pytest.mark.parametrize("size", [[128], [0, 128], "wide", 128])
def test_a_broken_scheme_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ConfigError, match="quantization_config of fp8 is broken"):
        read_quantisation(written(tmp_path, {**FP8, "weight_block_size": size}))


def test_two_schemes_are_refused(tmp_path: Path) -> None:
    written(tmp_path, FP8)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": {"quantization_config": FP8}}))
    assert read_quantisation(tmp_path) == Quantisation("fp8", (128, 128))
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": {"quantization_config": compressed()}}))
    with pytest.raises(ConfigError, match="2 different ways for the parts of the model"):
        read_quantisation(tmp_path)


def test_every_published_name_is_of_one_part() -> None:
    names = {
        "vision": ("visual.blocks.0.w", "model.visual.w", "thinker.visual.w", "vision_tower.w", "image_newline"),
        "sound": ("audio_tower.conv1.weight", "thinker.audio_tower.w", "model.audio_tower.w"),
        "projector": ("multi_modal_projector.linear_1.weight", "model.multi_modal_projector.w"),
        "text": (
            *("model.layers.0.w", "model.language_model.layers.0.w", "thinker.model.norm.weight", "lm_head.weight"),
            *("language_model.model.layers.0.w", "language_model.lm_head.weight", "thinker.lm_head.weight"),
        ),
        "speech": ("talker.model.layers.0.w", "code2wav.w", "token2wav.w"),
    }
    for part in names:
        others = re.compile("|".join(names_of_others(part)))
        for owner, found in names.items():
            assert all(bool(others.search(name)) == (owner != part) for name in found)
        assert not others.search("unheard.of.weight")
