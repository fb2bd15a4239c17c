"""Reads a LoRA adapter in the form in which the library peft saves it, and refuses one that can't be served with a
model.

An adapter is a directory with `adapter_config.json` and `adapter_model.safetensors`. For each linear module that it
changes, it has two factors: `base_model.model.MODULE.lora_A.weight` with shape `(rank, inputs)`, and `lora_B` with
shape `(outputs, rank)`. The module then computes with its own weight plus the product of both, times a scale.

What an adapter changes follows from the names of its factors. Only the layers of the language model may be changed: the
features of media are computed once, by encoders without any adapter, and all adapters share them.

The module reads the headers of files with weights, and no weights. It knows nothing of engines.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fabric.contracts import ConfigError
from modalities.checkpoint_files import Part, part_of, read_json, read_tensor_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KEY_TO_KIND: Mapping[str, str] = {
    "use_dora": "is a DoRA adapter",
    "modules_to_save": "replaces whole modules",
    "lora_bias": "changes biases",
    "alora_invocation_tokens": "is an activated LoRA, which begins in mid-prompt",
    "layer_replication": "repeats layers",
    "trainable_token_indices": "changes the embeddings of tokens",
    "target_parameters": "changes parameters that are no linear modules",
    "use_bdlora": "has blocks (BD-LoRA)",
    "use_qalora": "is a QALoRA adapter",
}
"""Maps each key of an adapter's config that asks for more than LoRA to what it then is. The keys are those that vLLM
0.32 refuses, and those that it does not read."""
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Lists the ways to begin a training that leave the weights of the model as they are."""
PART_TO_NOUN: Mapping[Part, str] = {
    "vision": "the vision tower",
    "sound": "the audio tower",
    "projector": "the projector",
    "speech": "the parts that speak",
}
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_AHEAD_OF_LAYERS = re.compile(r"^(thinker\.)?(model\.)?(language_model\.)?(model\.)?")
_NUM_NAMED = 3


class LoraAdapter(NamedTuple):
    """A `LoraAdapter` is what a worker needs to know of an adapter before it loads it."""

    directory: Path
    max_rank: int
    """Is the largest rank of its factors."""


def read_adapter(directory: Path, model_dir: Path) -> LoraAdapter:
    """Returns the adapter in `directory`, for the model in `model_dir`. Raises ConfigError if a file is missing or
    broken, if the adapter is of another kind than LoRA, and if it changes what the language model of this model does
    not have, or another part. If the weights of the model are not at hand, its modules are not compared."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ConfigError(f"{directory} is no LoRA adapter: it has no {name}")
    _, config = read_json(directory / CONFIG_FILE)
    try:
        max_rank = _checked_rank(config)
    except ConfigError as error:
        raise ConfigError(f"{directory / CONFIG_FILE}: {error.message}") from error
    try:
        _check_factors(read_tensor_header(directory / WEIGHTS_FILE), max_rank, layer_modules(model_dir))
    except ConfigError as error:
        raise ConfigError(f"{directory / WEIGHTS_FILE}: {error.message}") from error
    return LoraAdapter(directory, max_rank)


def layer_modules(model_dir: Path) -> Mapping[str, tuple[int, ...]] | None:
    """Returns the modules of the layers of the language model that have a weight, with the shape of it, or with an
    empty shape if that is not known. Returns None if the weights of the model are not at hand, nor an index of them.
    Raises ConfigError if a file is broken."""
    stored: dict[str, tuple[int, ...]] = {}
    files = sorted(model_dir.glob("*.safetensors"))
    for path in files:
        stored |= {name: _shape(tensor) for name, tensor in read_tensor_header(path).items()}
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        stored = dict.fromkeys(read_json(index)[1].get("weight_map", ()), ()) | stored
    elif not files:
        return None
    names = {name.removesuffix(".weight"): shape for name, shape in stored.items() if name.endswith(".weight")}
    modules = {_within_model(name): shape for name, shape in names.items() if part_of(name) == "text"}
    return {name: shape for name, shape in modules.items() if name.startswith("layers.")}


def _checked_rank(config: Mapping[str, Any]) -> int:
    """Returns the largest rank that an adapter's config allows. Raises ConfigError if the config is not that of plain
    LoRA."""
    kind = config.get("peft_type")
    if str(kind).upper() != "LORA":
        raise ConfigError(f"peft_type is {kind}, and only LORA is served")
    for key, what in KEY_TO_KIND.items():
        if config.get(key):
            raise ConfigError(f"the adapter {what} ({key}), which vLLM workers do not take")
    if (bias := config.get("bias", "none")) != "none":
        raise ConfigError(f"the adapter changes biases (bias is {bias}), which vLLM workers do not take")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        raise ConfigError(
            f"init_lora_weights is {init}, which changes the weights of the model itself; convert the adapter to plain "
            "LoRA (path_initial_model_for_weight_conversion of peft)"
        )
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank >= 1 for rank in ranks):
        raise ConfigError(f"the rank (r, rank_pattern) must be a whole number of at least 1, not {ranks}")
    alphas = [config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values()]
    if not all(type(alpha) in (int, float) for alpha in alphas):
        raise ConfigError(f"lora_alpha must be a number, not {alphas[0]}")
    if not config.get("target_modules"):
        raise ConfigError("target_modules is missing")
    return int(max(ranks))


def _check_factors(
    header: Mapping[str, Mapping[str, Any]], max_rank: int, known: Mapping[str, tuple[int, ...]] | None
) -> None:
    """Raises ConfigError unless the tensors are factors of modules that are known, or that may be there."""
    module_to_sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in header.items():
        factor = _FACTOR.fullmatch(name.removeprefix(PREFIX))
        if factor is None:
            raise ConfigError(f"{name} is no factor of a linear module")
        module_to_sides.setdefault(factor["module"], {})[factor["side"]] = _shape(tensor)
    if not module_to_sides:
        raise ConfigError("it has no weights")
    _check_places(module_to_sides, known)
    for module, sides in module_to_sides.items():
        if len(sides) < 2 or any(len(shape) != 2 for shape in sides.values()):
            raise ConfigError(f"{module} needs two factors, lora_A and lora_B, with two axes each")
        (rank, num_inputs), (num_outputs, other) = sides["A"], sides["B"]
        if rank != other or rank > max_rank:
            raise ConfigError(f"the factors of {module} have ranks {rank} and {other}, but the config says {max_rank}")
        own = known[_within_model(module)] if known is not None else ()
        if own and own != (num_outputs, num_inputs):
            raise ConfigError(
                f"the factors of {module} are made for {num_inputs} inputs and {num_outputs} outputs, but the module "
                f"has {own[-1]} and {own[0]} in this model; was the adapter trained for another one?"
            )


def _check_places(modules: Collection[str], known: Mapping[str, tuple[int, ...]] | None) -> None:
    """Raises ConfigError for modules outside the layers of the language model, and for those that it does not have."""
    for module in modules:
        part = part_of(module)
        if part is not None and part in PART_TO_NOUN:
            raise ConfigError(
                f"the adapter changes {PART_TO_NOUN[part]} ({module}); encoders compute the features of media without "
                "adapters, and all adapters share them, so an adapter may change the language model only"
            )
        if part == "text" and not _within_model(module).startswith("layers."):
            raise ConfigError(f"the adapter changes {module}; here it may change linear modules of the layers only")
    missing = [each for each in modules if known is not None and _within_model(each) not in known]
    if missing:
        more = f" and {len(missing) - _NUM_NAMED} more" if len(missing) > _NUM_NAMED else ""
        raise ConfigError(
            f"this model has no {', '.join(missing[:_NUM_NAMED])}{more}; is the adapter of another model?"
        )


def _within_model(name: str) -> str:
    """Returns the name of a module without what stands ahead of `layers`, which differs between versions of
    transformers."""
    return _AHEAD_OF_LAYERS.sub("", name)


def _shape(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape of a tensor, or an empty one if its values are packed, as some quantised weights are."""
    return () if str(tensor.get("dtype")) in ("I32", "U32", "I8", "U8") else tuple(tensor["shape"])
