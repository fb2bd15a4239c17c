"""Reads the JSON files of a checkpoint directory: sections of its config, the options of its processors, and how its
weights are stored.

`read_json`, `section` and the functions next to them serve all families. Loaders need two more facts that hold for all
families: to which part of the model a weight belongs, which follows from its name (`names_of_others`), and how the
weights are quantised (`read_quantisation`).

Weft computes in the model's own dtype: float8 weights are multiplied by their scales when they are read
(`modalities.checkpoint_tensors`). Weights of any other scheme are refused by its name, since they are useless without
special kernels or unpacking; vLLM has these. A checkpoint of such a scheme may have parts that are not quantised, such
as its encoders, and those can be loaded (`read_stored_quantisation`). The known forms of `quantization_config` are
transformers' `FineGrainedFP8Config` (DeepSeek, Qwen), vLLM's `fp8`, and compressed-tensors' `QuantizationConfig`
(llm-compressor).

This module is pure: it knows nothing of tensors and of particular models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import blake3

from fabric.contracts import ConfigError


def read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Returns the file's bytes and the JSON object in it. Raises ConfigError if the file can't be read or holds no
    object."""
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must contain a JSON object, not a value of type {type(value).__name__}")
    return raw, value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file, which is empty if there is no such file. Raises ConfigError if the file
    can't be read or holds no object."""
    return read_json(path)[1] if path.exists() else {}


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the object `name` of config.json. Raises ConfigError if there is none."""
    found = config.get(name)
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json has no object `{name}`")
    return found


def model_id(model_dir: Path, config: bytes) -> str:
    """Returns `NAME@DIGEST`: the name of the directory, and a digest of 8 bytes of `config`, its config.json."""
    return f"{model_dir.resolve().name}@{blake3.blake3(config).hexdigest(length=8)}"


def read_image_processor(model_dir: Path) -> Mapping[str, Any]:
    """Returns the image processor's options: those nested in processor_config.json, or else preprocessor_config.json
    (transformers' order). Raises ConfigError if the files can't be read."""
    return _read_processor(model_dir, "image_processor")


def read_feature_extractor(model_dir: Path) -> Mapping[str, Any]:
    """Returns the options of the feature extractor for sounds. The files and their order are those of the image
    processor, and one file often serves both. Raises ConfigError if the files can't be read."""
    return _read_processor(model_dir, "feature_extractor")


def read_video_processor(model_dir: Path) -> tuple[Mapping[str, Any], bool]:
    """Returns the video processor's options, and whether they are meant for videos. The order is that of transformers:
    the options nested in processor_config.json, the file for videos, the file for pictures. Raises ConfigError if the
    files can't be read."""
    if (nested := _nested_processor(model_dir, "video_processor")) is not None:
        return nested, True
    path = model_dir / "video_preprocessor_config.json"
    if path.exists():
        return read_json(path)[1], True
    return read_json(model_dir / "preprocessor_config.json")[1], False


def _read_processor(model_dir: Path, name: str) -> Mapping[str, Any]:
    nested = _nested_processor(model_dir, name)
    return nested if nested is not None else read_json(model_dir / "preprocessor_config.json")[1]


def _nested_processor(model_dir: Path, name: str) -> Mapping[str, Any] | None:
    """Returns the options `name` in processor_config.json, or None if there are none. Raises ConfigError if the file
    can't be read."""
    nested = read_json_if_present(model_dir / "processor_config.json").get(name)
    return nested if isinstance(nested, Mapping) else None


# ------------------------------------------------------------ the parts of a model

Part = Literal["vision", "sound", "projector", "text", "speech"]

# The names changed over time: `visual.` became `model.visual.`, and `language_model.model.` became
# `model.language_model.`. `thinker.` is in front of all of these in models with other parts.
_PART_TO_PATTERN: dict[Part, str] = {
    "vision": r"^(thinker\.)?(model\.)?(visual|vision_tower)\.|^(model\.)?image_newline$",
    "sound": r"^(thinker\.)?(model\.)?audio_tower\.",
    "projector": r"^(model\.)?multi_modal_projector\.",
    "text": r"^(thinker\.)?(model\.)?(language_model|embed_tokens|layers|norm|lm_head)\.",
    "speech": r"^(talker|code2wav|token2wav)\.",
}


def names_of_others(*own: Part) -> tuple[str, ...]:
    """Returns patterns of the names that belong to other parts than `own`. A loader takes one part and leaves out the
    names of the other parts. A name that belongs to no part is never left out."""
    return tuple(pattern for part, pattern in _PART_TO_PATTERN.items() if part not in own)


def part_of(name: str) -> Part | None:
    """Returns the part of a model to which the weight, or the module, `name` belongs. Returns None if the name says
    nothing of it."""
    return next((part for part, pattern in _PART_TO_PATTERN.items() if re.search(pattern, f"{name}.")), None)


# ------------------------------------------------------------ the header of a file with weights

MAX_HEADER_BYTES = 100_000_000
"""Limits the length of a header; the format itself has this limit."""


def read_tensor_header(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the tensors of a safetensors file by name, each with its `dtype` and its `shape`. It reads no weights.

    The file begins with the length of its header, 8 bytes in little-endian order. The header follows as JSON `name ->
    {dtype, shape, data_offsets}` (https://huggingface.co/docs/safetensors). Raises ConfigError for another file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ConfigError(f"{path} is not a safetensors file")
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if not all(isinstance(each["shape"], list) and isinstance(each["dtype"], str) for each in header.values()):
            raise ConfigError(f"{path} is not a safetensors file: its header lacks shapes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    return header


# ------------------------------------------------------------ quantisation

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
    """Describes quantised weights. The area of float8 weights that a scale covers follows from the shape of the scales,
    and from `block` where it is given."""

    method: str
    block: tuple[int, int] | None = None
    """Gives the rows and columns of a weight that share a scale, for scales per block."""
    plain_modules: tuple[str, ...] = ()
    """Lists the modules that are not quantised: names, ends of names, or patterns behind `re:`."""
    is_loadable: bool = True
    """Says whether Weft can load quantised weights of this scheme. If not, it loads parts without any."""

    def is_plain(self, name: str) -> bool:
        """Returns whether the config says that the weight `name` is not quantised."""
        module = name.rpartition(".")[0]
        return any(_covers(pattern, module) for pattern in self.plain_modules)


def read_quantisation(model_dir: Path) -> Quantisation | None:
    """Returns the quantisation of a checkpoint, or None if its config has none. Raises ConfigError if the file is
    missing or broken, and if Weft can't load the scheme, which the error names."""
    try:
        return _found_quantisation(model_dir)
    except _UnsupportedScheme as error:
        raise ConfigError(
            f"Weft's own engine does not support checkpoints that are quantised by {error}; it supports {SUPPORTED}. "
            "For other schemes, set workers.engine: vllm"
        ) from error


def read_stored_quantisation(model_dir: Path) -> Quantisation | None:
    """Returns what `read_quantisation` returns, and also a scheme that Weft can't load (`is_loadable`), for parts of
    which no weight may be quantised. Raises ConfigError if the file is missing or broken."""
    try:
        return _found_quantisation(model_dir)
    except _UnsupportedScheme as error:
        return Quantisation(str(error), is_loadable=False)


class _UnsupportedScheme(Exception):
    """Says that Weft can't load weights of this scheme, which its text names."""


def _found_quantisation(model_dir: Path) -> Quantisation | None:
    _, config = read_json(model_dir / "config.json")
    found = {json.dumps(section, sort_keys=True): section for section in _quantised_sections(config)}
    if len(found) > 1:
        raise _UnsupportedScheme(f"{len(found)} different ways for the parts of the model")
    for section in found.values():
        return _parsed(section, model_dir)
    return None


def _quantised_sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the sections of a config that describe a quantisation: at the top level, or in the part of the model that
    is quantised."""
    for key in ("quantization_config", "compression_config"):
        if isinstance(config.get(key), Mapping) and config[key]:
            yield config[key]
    for key in ("thinker_config", "text_config", "vision_config", "audio_config"):
        if isinstance(config.get(key), Mapping):
            yield from _quantised_sections(config[key])


def _parsed(section: Mapping[str, Any], model_dir: Path) -> Quantisation:
    method = str(section.get("quant_method") or _unnamed(section)).lower()
    try:
        if method == "fp8":
            return _fine_grained(section)
        if method == "compressed-tensors":
            return _compressed(section)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{model_dir}: the quantization_config of {method} is broken: {error}") from error
    raise _UnsupportedScheme(method)


def _unnamed(section: Mapping[str, Any]) -> str:
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in section else "a method that quant_method does not name"


def _fine_grained(section: Mapping[str, Any]) -> Quantisation:
    kind = str(section.get("fmt") or "e4m3").lower()
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _UnsupportedScheme(f"fp8 of format {kind}")
    plain = (*(section.get("modules_to_not_convert") or ()), *(section.get("ignored_layers") or ()))
    return Quantisation("fp8", _block(section.get("weight_block_size")), tuple(map(str, plain)))


def _compressed(section: Mapping[str, Any]) -> Quantisation:
    name = "compressed-tensors"
    if (sparsity := str((section.get("sparsity_config") or {}).get("format") or "dense")) != "dense":
        raise _UnsupportedScheme(f"{name} of format {sparsity}")
    if section.get("transform_config"):
        raise _UnsupportedScheme(f"{name} with transforms")
    blocks = set()
    groups = [group for group in (section.get("config_groups") or {}).values() if group.get("weights")]
    for group in groups:
        weights = group["weights"]
        form = str(group.get("format") or section.get("format") or "float-quantized")
        values = f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}"
        if values != "float8" or form not in _FLOAT8_FORMATS:
            raise _UnsupportedScheme(f"{name} of {values} ({form})")
        strategy = str(weights.get("strategy") or "tensor")
        if strategy not in _STRATEGIES or not weights.get("symmetric", True):
            form = "symmetric" if weights.get("symmetric", True) else "asymmetric"
            raise _UnsupportedScheme(f"{name} with {form} {values} per {strategy}")
        if strategy == "block":
            blocks.add(_block(weights.get("block_structure")))
    if not groups or len(blocks) > 1:
        raise _UnsupportedScheme(
            f"{name} with {'several sizes of blocks' if groups else 'no config_groups for weights'}"
        )
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
        raise ValueError(f"a block must have at least one row and one column, not {rows}x{columns}")
    return rows, columns


def _covers(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."
