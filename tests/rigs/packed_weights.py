"""Packs the linear layers of a tiny model into four bits, in the forms of published checkpoints (AWQ, GPTQ and
compressed-tensors), and gives the reference the values that they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contract_model import ContractModel, ContractPrompt
from lora_files import layer_shapes
from quantised_files import AWQ, write_checkpoint
from safetensors.torch import load_file

from modalities.registry import REGISTRY

GROUP = 32
"""Counts the inputs that share a scale."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Lists the columns that AWQ packs into an int32, from the lowest four bits on."""


class Rounded(NamedTuple):
    """Holds a weight in four bits; `values` times its scale, counted from its zero, is the weight."""

    values: torch.Tensor
    """Holds integers from 0 to 15, `(outputs, inputs)`."""
    zeros: torch.Tensor
    """Holds the integer that stands for 0, `(outputs, groups)`."""
    scales: torch.Tensor
    """Holds bfloat16, `(outputs, groups)`."""

    def weight(self) -> torch.Tensor:
        zeros, scales = (each.float().repeat_interleave(GROUP, 1) for each in (self.zeros, self.scales))
        return (self.values - zeros) * scales


def rounded(weight: torch.Tensor, *, has_zeros: bool) -> Rounded:
    """Rounds a weight. Without zeros of their own, all groups have the zero 8."""
    grouped = weight.detach().float().reshape(weight.shape[0], -1, GROUP)
    least, most = grouped.amin(-1), grouped.amax(-1)
    if has_zeros:
        scales = ((most - least) / 15).to(torch.bfloat16)
        zeros = (-least / scales.float()).round().clamp(0, 15)
    else:
        scales = (torch.maximum(most, -least) / 7).to(torch.bfloat16)
        zeros = torch.full_like(least, 8)
    values = ((grouped / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return Rounded(values.reshape(weight.shape).int(), zeros.int(), scales)


def packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Packs integers of four bits `(rows, columns)` into int32 `(rows, columns / 8)`."""
    grouped = values.reshape(values.shape[0], -1, 8)[..., list(order)].to(torch.int64)
    whole = (grouped << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(whole < 2**31, whole, whole - 2**32).to(torch.int32)


Stored = Mapping[str, torch.Tensor]


def _awq(of: Rounded) -> Stored:
    return {
        "qweight": packed(of.values.T, AWQ_ORDER),
        "qzeros": packed(of.zeros.T, AWQ_ORDER),
        "scales": of.scales.T,
    }


def _gptq(of: Rounded) -> Stored:
    return {
        "qweight": packed(of.values).T,
        "qzeros": packed(of.zeros.T - 1),  # This form stores a zero as one less.
        "scales": of.scales.T,
        "g_idx": torch.arange(of.values.shape[1], dtype=torch.int32) // GROUP,
    }


def _compressed(of: Rounded) -> Stored:
    shape = torch.tensor(of.values.shape)
    return {"weight_packed": packed(of.values), "weight_scale": of.scales, "weight_shape": shape}


class PackedForm(NamedTuple):
    """Describes one way to store four bits."""

    config: Mapping[str, Any]
    store: Callable[[Rounded], Stored]
    """Maps a weight to the tensors of its module."""
    has_zeros: bool


_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
PACKED_FORMS: Mapping[str, PackedForm] = {
    "awq": PackedForm(
        {**AWQ, "group_size": GROUP, "zero_point": True, "modules_to_not_convert": ["visual"]},
        _awq,
        has_zeros=True,
    ),
    "gptq": PackedForm(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        _gptq,
        has_zeros=False,
    ),
    "compressed-tensors": PackedForm(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
            "ignore": ["lm_head", "re:.*visual.*"],
        },
        _compressed,
        has_zeros=False,
    ),
}


def packed_model(model: ContractModel, form: PackedForm, directory: Path) -> ContractModel:
    """Writes the model's checkpoint into `directory`, with the language model's linear layers packed. Returns the model
    of that checkpoint: its reference has the values that the packed ones stand for, and its encoder is loaded from
    it."""
    found = copy.copy(model)
    found.reference = copy.deepcopy(model.reference)
    stored = load_file(model.directory / "model.safetensors")
    for module in layer_shapes(model):
        linear = found.reference.get_submodule(module)
        of = rounded(linear.weight, has_zeros=form.has_zeros)
        with torch.no_grad():
            linear.weight.copy_(of.weight())
        (name,) = [each for each in stored if each.endswith(module.partition("language_model.")[2] + ".weight")]
        del stored[name]
        stored |= {name.removesuffix("weight") + part: tensor for part, tensor in form.store(of).items()}
    found.directory = write_checkpoint(model.directory, directory, stored, form.config)
    found.family = REGISTRY.load_family(directory)
    found.encoder = found.family.load_encoder(directory, "cpu", "bfloat16", tuple(found.family.max_items))
    return found


def error_over_difference(
    packed: ContractModel, source: ContractModel, of: ContractPrompt, id_to_logprob: Mapping[int, float]
) -> float:
    """Returns how far some log-probabilities of the token behind a prompt are from those of the dequantised reference,
    on average, over how far those of `source`, the model that was quantised, are from the latter."""
    ids, found = list(id_to_logprob), torch.tensor(list(id_to_logprob.values()))
    expected, plain = (
        torch.log_softmax(model.generate(of, 1).logits[0][0].float(), -1)[ids] for model in (packed, source)
    )
    return float((found - expected).abs().mean() / (plain - expected).abs().mean())
