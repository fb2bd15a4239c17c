"""Writes LoRA adapters with random factors in the form in which peft saves them, and merges them into a model of
transformers, which is the reference of an engine that applies them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

if TYPE_CHECKING:
    from contract_model import ContractModel

PREFIX = "base_model.model."
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path, module_to_shape: Mapping[str, tuple[int, int]], rank: int, seed: int = 0, **changes: Any
) -> Path:
    """Writes an adapter of modules whose weights have these shapes, `(outputs, inputs)`. `changes` go to its config."""
    rng = np.random.default_rng(seed)
    factors: dict[str, np.ndarray] = {}
    for module, (num_outputs, num_inputs) in module_to_shape.items():
        for side, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            factors[f"{PREFIX}{module}.lora_{side}.weight"] = rng.normal(0, 0.3, shape).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(factors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config |= {"target_modules": sorted({module.rpartition(".")[2] for module in module_to_shape})}
    (directory / "adapter_config.json").write_text(json.dumps(config | changes))
    return directory


def layer_shapes(model: ContractModel) -> dict[str, tuple[int, int]]:
    """Returns the linear modules of attention and MLP in the language model, as transformers names them."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.reference.named_modules()
        if "language_model.layers." in name and name.rpartition(".")[2] in TARGETS
    }


def merged(model: ContractModel, directory: Path) -> ContractModel:
    """Returns the model with an adapter merged into its reference: each weight W becomes W + (alpha / rank) B A."""
    import torch

    config = json.loads((directory / "adapter_config.json").read_text())
    factors = load_file(directory / "adapter_model.safetensors")
    found = copy.copy(model)
    found.reference = copy.deepcopy(model.reference)
    with torch.no_grad():
        for name in [name for name in factors if name.endswith(".lora_A.weight")]:
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            first, second = (torch.from_numpy(factors[f"{PREFIX}{module}.lora_{side}.weight"]) for side in "AB")
            scale = config["lora_alpha"] / config["r"]
            found.reference.get_submodule(module).weight += scale * (second @ first)
    return found
