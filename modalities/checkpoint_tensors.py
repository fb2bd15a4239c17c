"""Gives access by name to the tensors of a checkpoint that belong to one part of its model, and reads each tensor when
it is used. It imports torch.

Weights that are stored as float8 are multiplied by their scales slice by slice, and the result is float32. So a rank of
a tensor-parallel worker reads and multiplies only its own share, and the result equals that of a checkpoint that was
dequantised as a whole beforehand. This module knows nothing of models: the names that belong to other parts are an
argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fabric.errors import ConfigError
from modalities.json_files import read_json
from modalities.quantisation import ACTIVATION_SUFFIXES, SCALE_SUFFIXES, SUPPORTED, Quantisation
from modalities.torch_dtypes import dtype_name

_INDEX = ".index.json"
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"})
_FLOAT8 = "F8_E4M3"


class FloatSlice:
    """A `FloatSlice` is a float8 weight with its scales. It has the interface of the file slices that transformers
    reads: a shape, and values by index."""

    def __init__(self, weight: Any, scales: torch.Tensor, name: str, block: tuple[int, int] | None) -> None:
        """Takes `weight`, a slice of a safetensors file of shape `(..., rows, columns)`. Raises ConfigError if the
        scales do not fit the weight."""
        self._weight = weight
        self._shape = tuple(weight.get_shape())
        self._scales, self._block = _grid(scales.float(), self._shape, name, block)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns the values at `index` in float32. `index` is an ellipsis, a slice, or a tuple of slices for the first
        axes."""
        found = index if isinstance(index, tuple) else () if index is Ellipsis else (index,)
        spans = [
            range(*one.indices(size))
            for one, size in zip([*found, *[slice(None)] * (len(self._shape) - len(found))], self._shape, strict=True)
        ]
        values: torch.Tensor = self._weight[tuple(slice(span.start, span.stop, span.step) for span in spans)].float()
        scales = self._scales
        for axis, span in enumerate(spans):
            if scales.shape[axis] > 1:
                side = self._block[axis - len(spans) + 2] if axis >= len(spans) - 2 else 1
                scales = scales.index_select(axis, torch.tensor(span) // side)
        return values.mul_(scales)


@contextmanager
def open_tensors(model_dir: Path, others: Sequence[str], quantisation: Quantisation | None) -> Iterator[dict[str, Any]]:
    """Yields a dict that maps each name to a tensor or to a slice of a file, for all weights except those whose names
    match a pattern of `others`. The files stay open within the block. Raises ConfigError if a file can't be read, and
    if a value is of an unknown type or is quantised without scales, because only another program could interpret it."""
    is_other = re.compile("|".join(others) or r"(?!)")
    with ExitStack() as files:
        try:
            names = _weight_files(model_dir)
            stored = {name: value for path in names for name, value in _tensors(path, files)}
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise ConfigError(f"can't read the weights of {model_dir}: {error}") from error
        part = {name: value for name, value in stored.items() if not is_other.search(name)}
        yield dict(_plain(part, quantisation))


def _weight_files(model_dir: Path) -> list[Path]:
    """Returns the files that hold the weights. The order of precedence is that of transformers: safetensors as one
    file, safetensors with an index, then PyTorch's own files in the same two forms. Raises ConfigError if there are
    none, or if an index has no `weight_map`."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (model_dir / name).is_file():
            return [model_dir / name]
        index = model_dir / (name + _INDEX)
        if index.is_file():
            parts = read_json(index)[1].get("weight_map")
            if not isinstance(parts, Mapping) or not all(isinstance(part, str) for part in parts.values()):
                raise ConfigError(f"{index} has no weight_map")
            return [model_dir / part for part in sorted(set(parts.values()))]
    raise ConfigError(f"can't load {model_dir}: no model.safetensors, no pytorch_model.bin, no index of several")


def _tensors(path: Path, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yields the name and the tensor, or slice, of each weight in the file. Raises the same errors as the reading
    functions of torch and safetensors."""
    if path.suffix == ".bin":
        yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()
        return
    file = files.enter_context(safe_open(path, framework="pt", device="cpu"))
    for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
        yield name, file.get_slice(name)


def _plain(part: Mapping[str, Any], quantisation: Quantisation | None) -> Iterator[tuple[str, Any]]:
    """Yields the weights in the form in which they are loaded. Scales that belong to a quantised weight are left out,
    and so are the scales of activations in a quantised checkpoint. Raises ConfigError if a weight has an unsupported
    type, or a float8 weight contradicts the config or has no scales."""
    weight_to_scale = {
        name: name + suffix
        for name, value in part.items()
        if _dtype(value) == _FLOAT8
        for suffix in SCALE_SUFFIXES
        if name + suffix in part
    }
    used = set(weight_to_scale.values())
    for name, value in part.items():
        dtype = _dtype(value)
        if name in used or (quantisation is not None and name.endswith(ACTIVATION_SUFFIXES)):
            continue
        if dtype in _PLAIN:
            yield name, value
            continue
        if dtype != _FLOAT8:
            raise ConfigError(f"{name} is stored as {dtype}, which is not supported; supported: {SUPPORTED}")
        if quantisation is None:
            raise ConfigError(f"{name} is stored as {dtype}, but config.json has no quantization_config")
        if quantisation.is_plain(name):
            raise ConfigError(f"{name} is stored as {dtype}, but the quantization_config says it is not quantised")
        if name not in weight_to_scale:
            raise ConfigError(f"{name} is stored as {dtype}, and its scales are missing ({name}{SCALE_SUFFIXES[0]})")
        yield name, FloatSlice(value, part[weight_to_scale[name]][...], name, quantisation.block)


def _dtype(value: Any) -> str:
    """Returns the name of the value's dtype in the spelling of safetensors."""
    if not isinstance(value, torch.Tensor):
        return str(value.get_dtype())
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    names |= {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}
    return names.get(value.dtype, dtype_name(value.dtype))


def _grid(
    scales: torch.Tensor, shape: tuple[int, ...], name: str, block: tuple[int, int] | None
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Returns the scales with as many axes as the weight's `shape`, and the rows and columns that one scale covers.
    Raises ConfigError if the scales do not fit the weight."""
    if scales.numel() == 1:
        return scales.reshape((1,) * len(shape)), shape[-2:] if len(shape) > 1 else (1, shape[0])  # type: ignore[return-value]
    if len(shape) > 1:
        rows, columns = shape[-2:]
        if block is not None and tuple(scales.shape) == (*shape[:-2], -(-rows // block[0]), -(-columns // block[1])):
            return scales, block
        if tuple(scales.shape) in (shape[:-1], (*shape[:-1], 1)):
            return scales.reshape(*shape[:-1], 1), (1, columns)
    of_blocks = f" in blocks of {block[0]}x{block[1]}" if block else ""
    raise ConfigError(f"{name}: scales of shape {tuple(scales.shape)} do not fit {shape}{of_blocks}")
