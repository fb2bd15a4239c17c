"""Reads from a checkpoint's config.json how its weights are quantised. This module is pure: it knows nothing of
tensors.

Weft computes in the model's own dtype: float8 weights are multiplied by their scales when they are read
(`modalities.checkpoint_tensors`). Any other scheme is refused by its name, since its weights are useless without
special kernels or unpacking. The known forms of `quantization_config` are transformers' `FineGrainedFP8Config`
(DeepSeek, Qwen), vLLM's `fp8`, and compressed-tensors' `QuantizationConfig` (llm-compressor).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError
from modalities.json_files import read_json

SUPPORTED = "float8 (e4m3) weights with scales per tensor, per channel or per block (fp8, compressed-tensors)"
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Lists the suffixes that turn the name of a weight into that of its scales. The values are multiplied by the scales,
despite the name of the first suffix."""
ACTIVATION_SUFFIXES = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".input_scale_ub")
"""Lists the suffixes of scales of activations and of a KV cache, which Weft does not quantise."""
_FLOAT8_FORMATS = ("float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Describes float8 weights. The area that a scale covers follows from the shape of the scales, and from `block`
    where it is given."""

    method: str
    block: tuple[int, int] | None = None
    """Gives the rows and columns of a weight that share a scale, for scales per block."""
    plain_modules: tuple[str, ...] = ()
    """Lists the modules that are not quantised: names, ends of names, or patterns behind `re:`."""

    def is_plain(self, name: str) -> bool:
        """Returns whether the config says that the weight `name` is not quantised."""
        module = name.rpartition(".")[0]
        return any(_covers(pattern, module) for pattern in self.plain_modules)


def read_quantisation(model_dir: Path) -> Quantisation | None:
    """Returns the quantisation of a checkpoint, or None if its config has none. Raises ConfigError if the file is
    missing or broken, and if Weft can't load the scheme, which the error names."""
    _, config = read_json(model_dir / "config.json")
    found = {json.dumps(section, sort_keys=True): section for section in _sections(config)}
    if len(found) > 1:
        raise ConfigError(f"{model_dir}: the parts of the model are quantised in different ways; supported: one way")
    for section in found.values():
        return _parsed(section, model_dir)
    return None


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the sections of a config that describe a quantisation: at the top level, or in the part of the model that
    is quantised."""
    for key in ("quantization_config", "compression_config"):
        if isinstance(config.get(key), Mapping) and config[key]:
            yield config[key]
    for key in ("thinker_config", "text_config", "vision_config", "audio_config"):
        if isinstance(config.get(key), Mapping):
            yield from _sections(config[key])


def _parsed(section: Mapping[str, Any], model_dir: Path) -> Quantisation:
    method = str(section.get("quant_method") or _unnamed(section)).lower()
    try:
        if method == "fp8":
            return _fine_grained(section)
        if method == "compressed-tensors":
            return _compressed(section)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{model_dir}: the quantization_config of {method} is broken: {error}") from error
    raise _refusal(method)


def _unnamed(section: Mapping[str, Any]) -> str:
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in section else "without a quant_method"


def _fine_grained(section: Mapping[str, Any]) -> Quantisation:
    kind = str(section.get("fmt") or "e4m3").lower()
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(f"fp8 of format {kind}")
    plain = (*(section.get("modules_to_not_convert") or ()), *(section.get("ignored_layers") or ()))
    return Quantisation("fp8", _block(section.get("weight_block_size")), tuple(map(str, plain)))


def _compressed(section: Mapping[str, Any]) -> Quantisation:
    name = "compressed-tensors"
    if (sparsity := str((section.get("sparsity_config") or {}).get("format") or "dense")) != "dense":
        raise _refusal(f"{name} of format {sparsity}")
    if section.get("transform_config"):
        raise _refusal(f"{name} with transforms")
    blocks = set()
    groups = [group for group in (section.get("config_groups") or {}).values() if group.get("weights")]
    for group in groups:
        weights = group["weights"]
        form = str(group.get("format") or section.get("format") or "float-quantized")
        values = f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}"
        if values != "float8" or form not in _FLOAT8_FORMATS:
            raise _refusal(f"{name} of {values} ({form})")
        strategy = str(weights.get("strategy") or "tensor")
        if strategy not in _STRATEGIES or not weights.get("symmetric", True):
            raise _refusal(
                f"{name} of {values} per {strategy}{'' if weights.get('symmetric', True) else ', asymmetric'}"
            )
        if strategy == "block":
            blocks.add(_block(weights.get("block_structure")))
    if not groups or len(blocks) > 1:
        raise _refusal(f"{name} with {'several sizes of blocks' if groups else 'no config_groups for weights'}")
    return Quantisation(name, next(iter(blocks), None), tuple(map(str, section.get("ignore") or ())))


def _block(found: Any) -> tuple[int, int] | None:
    """Returns the rows and columns of a block, or None. Raises ValueError or TypeError if `found` is not a block
    size."""
    if found is None:
        return None
    if isinstance(found, str):  # An older form is "128x128".
        found = found.split("x")
    rows, columns = (int(side) for side in found)
    if rows < 1 or columns < 1:
        raise ValueError(f"blocks of {rows}x{columns}")
    return rows, columns


def _covers(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def _refusal(scheme: str) -> ConfigError:
    return ConfigError(f"checkpoints quantised by {scheme} are not supported; supported: {SUPPORTED}")
