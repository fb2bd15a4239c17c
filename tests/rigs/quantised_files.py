"""Writes checkpoints of tiny models whose linear layers are stored as float8, in the forms of published checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

FLOAT8_MAX = 448.0
FP8_BLOCK: Mapping[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
COMPRESSED: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
}


class Form(NamedTuple):
    """Describes one way to store float8."""

    config: Mapping[str, Any]
    block: tuple[int, int] | None
    """Holds the rows and columns that share a scale. 0 means all of them; None means one scale for the whole weight."""
    suffix: str
    scale_dtype: torch.dtype = torch.float32


def compressed(**weights: Any) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS | weights}}}


FORMS: Mapping[str, Form] = {
    "fp8-block": Form(FP8_BLOCK, (128, 128), "_scale_inv", torch.bfloat16),
    "fp8-small-block": Form({**FP8_BLOCK, "weight_block_size": [20, 28]}, (20, 28), "_scale_inv"),
    "fp8-tensor": Form({"quant_method": "fp8", "activation_scheme": "static"}, None, "_scale"),
    "compressed-channel": Form(compressed(), (1, 0), "_scale", torch.bfloat16),
    "compressed-tensor": Form(compressed(strategy="tensor"), None, "_scale"),
    "compressed-block": Form(compressed(strategy="block", block_structure=[20, 28]), (20, 28), "_scale"),
}


class Pair(NamedTuple):
    quantised: Path
    plain: Path
    """Holds the same weights, dequantised beforehand."""
    num_quantised: int


def is_linear(name: str, value: torch.Tensor) -> bool:
    """Returns whether a quantiser takes the weight: it takes no embeddings, no head, and only matrices."""
    return value.ndim == 2 and name.endswith(".weight") and not re.search(r"embed|lm_head|\bpos|conv|norm", name)


def quantised(value: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the float8 values, their scales as the form stores them, and the values that both stand for, in
    float32."""
    rows, columns = value.shape
    height, width = form.block or (rows, columns)
    height, width = height or rows, width or columns
    spread = torch.zeros(value.shape)
    scales = torch.zeros(-(-rows // height), -(-columns // width))
    for down in range(scales.shape[0]):
        for right in range(scales.shape[1]):
            area = slice(down * height, (down + 1) * height), slice(right * width, (right + 1) * width)
            scale = (value[area].abs().max() / FLOAT8_MAX).clamp(min=1e-8).to(form.scale_dtype).float()
            scales[down, right], spread[area] = scale, scale
    values = (value / spread).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    stored = scales.to(form.scale_dtype)
    return values, stored if form.block else stored.reshape(()), values.float() * spread


def write_pair(source: Path, target: Path, form: Form, left_alone: str = r"$^") -> Pair:
    """Writes both versions of the checkpoint `source`. It does not quantise modules whose names match `left_alone`."""
    weights = {name: value.float() for name, value in load_file(source / "model.safetensors").items()}
    stored, plain, num_quantised = {}, {}, 0
    for name, value in weights.items():
        if not is_linear(name, value) or re.search(left_alone, name):
            stored[name] = plain[name] = value
            continue
        stored[name], stored[name + form.suffix], plain[name] = quantised(value, form)
        num_quantised += 1
        if form.config.get("activation_scheme") == "static":
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
    pair = Pair(target / "quantised", target / "plain", num_quantised)
    for directory, tensors, config in ((pair.quantised, stored, form.config), (pair.plain, plain, None)):
        write_checkpoint(source, directory, tensors, config)
    return pair


AWQ: Mapping[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def write_packed(source: Path, directory: Path, left_alone: str = r"$^") -> Path:
    """Writes the checkpoint `source` in the form of AWQ: eight values of a linear layer in each int32, with zeros and
    scales beside them. It does not pack modules whose names match `left_alone`. The values are of no use."""
    stored = {}
    for name, value in load_file(source / "model.safetensors").items():
        if not is_linear(name, value) or re.search(left_alone, name):
            stored[name] = value
            continue
        rows, columns = value.shape
        module = name.removesuffix("weight")
        stored[module + "qweight"] = torch.zeros((columns, -(-rows // 8)), dtype=torch.int32)
        stored[module + "qzeros"] = torch.zeros((1, -(-rows // 8)), dtype=torch.int32)
        stored[module + "scales"] = torch.ones((1, rows), dtype=torch.float16)
    return write_checkpoint(source, directory, stored, AWQ)


def write_checkpoint(
    source: Path, directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None
) -> Path:
    """Writes the files of `source` with other weights, and with `config` as their quantization_config."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in (*source.glob("*.json"), *source.glob("*.jinja")):
        shutil.copy(path, directory)
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    if config is not None:
        found = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(found | {"quantization_config": dict(config)}))
    return directory
