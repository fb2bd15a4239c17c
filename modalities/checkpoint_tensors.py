"""Reads the weights of one part of a checkpoint, and loads them into a model of transformers, whole or as a rank's
share.

`open_tensors` gives access by name to the tensors of a part, and each tensor is read when it is used. Weights that are
stored as float8 are multiplied by their scales slice by slice, and the result is float32. `load_pretrained` passes
these slices to transformers. Inside `shard_weights(n)`, it loads this process's share of the part instead: the plan of
the model's config (`base_model_tp_plan`: column-wise, row-wise, packed, experts) cuts the weights as they are read, so
no rank ever holds a whole layer, and sums the ranks' parts after each row-wise layer. So a rank reads and multiplies
only its own share, and the result equals that of a checkpoint that was dequantised as a whole beforehand. Embeddings
and head stay whole because only rank 0 uses them.

This module imports torch. It knows nothing of particular models (the names that belong to other parts are an argument),
of steps and KV, or of the identity of the other ranks, which torch's default process group knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from fabric.contracts import ConfigError
from modalities.checkpoint_files import ACTIVATION_SUFFIXES, SCALE_SUFFIXES, SUPPORTED, Quantisation, read_json
from modalities.loading_progress import counted
from modalities.torch_dtypes import dtype_name

# ------------------------------------------------------------ the tensors of a part

_INDEX = ".index.json"
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"})
_FLOAT8 = "F8_E4M3"
_NEVER_PACKED = _PLAIN - {"I32"}
"""Lists the types in which no known scheme stores quantised weights: GPTQ and AWQ pack them into I32."""


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
                raise ConfigError(f"{index} must have a `weight_map` from the names of weights to the names of files")
            return [model_dir / part for part in sorted(set(parts.values()))]
    raise ConfigError(
        f"can't load {model_dir}: it contains neither model.safetensors nor pytorch_model.bin, and no index of either"
    )


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
        if quantisation is not None and not quantisation.is_loadable and dtype not in _NEVER_PACKED:
            raise ConfigError(
                f"the weight {name} is stored as {dtype}, because the checkpoint is quantised by "
                f"{quantisation.method}; Weft loads those parts of such a checkpoint that are not quantised, and "
                f"otherwise {SUPPORTED}"
            )
        if name in used or (quantisation is not None and name.endswith(ACTIVATION_SUFFIXES)):
            continue
        if dtype in _PLAIN:
            yield name, value
            continue
        if dtype != _FLOAT8:
            raise ConfigError(
                f"the weight {name} is stored as {dtype}; Weft supports {', '.join(sorted(_PLAIN))}, and {SUPPORTED}"
            )
        if quantisation is None:
            raise ConfigError(f"the weight {name} is stored as {dtype}, but config.json has no quantization_config")
        if quantisation.is_plain(name):
            raise ConfigError(
                f"the weight {name} is stored as {dtype}, but the quantization_config says that it is not quantised"
            )
        if name not in weight_to_scale:
            raise ConfigError(
                f"the weight {name} is stored as {dtype}, but its scales are missing ({name}{SCALE_SUFFIXES[0]})"
            )
        yield name, FloatSlice(value, part[weight_to_scale[name]][...], name, quantisation.block)


def _dtype(value: Any) -> str:
    """Returns the name of the value's dtype in the spelling of safetensors."""
    if not isinstance(value, torch.Tensor):
        return str(value.get_dtype())
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    names |= {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}
    return names.get(value.dtype, dtype_name(value.dtype))


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


def _grid(
    scales: torch.Tensor, shape: tuple[int, ...], name: str, block: tuple[int, int] | None
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Returns the scales with as many axes as the weight's `shape`, and the rows and columns that one scale covers.
    Raises ConfigError if the scales do not fit the weight."""
    if scales.numel() == 1:
        return scales.reshape((1,) * len(shape)), (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[0])
    if len(shape) > 1:
        rows, columns = shape[-2:]
        if block is not None and tuple(scales.shape) == (*shape[:-2], -(-rows // block[0]), -(-columns // block[1])):
            return scales, block
        if tuple(scales.shape) in (shape[:-1], (*shape[:-1], 1)):
            return scales.reshape(*shape[:-1], 1), (1, columns)
    of_blocks = f" in blocks of {block[0]}x{block[1]}" if block else ""
    raise ConfigError(
        f"the scales of {name} have shape {tuple(scales.shape)}, which does not fit its shape {shape}{of_blocks}"
    )


# ------------------------------------------------------------ loading a part


def load_pretrained(
    kind: type[PreTrainedModel], tensors: Mapping[str, Any], device: str, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns a model of class `kind` with the weights `tensors`, and the loading info. `tensors` maps names to tensors
    or to slices of a file, of which only the needed values are read. The model is whole, or inside `shard_weights` it
    is this rank's share, as plain tensors. The weights of a whole model lie on `device`, and its other buffers on the
    host. `options` are those of `from_pretrained`, including the part's `config`. Raises the errors of
    `from_pretrained`, and ValueError if the plan can't be followed."""
    options |= {"output_loading_info": True, "state_dict": counted(tensors)}
    num_ranks = _NUM_RANKS.get()
    if num_ranks == 1:
        whole: tuple[PreTrainedModel, dict[str, Any]] = _on_device(kind, device).from_pretrained(None, **options)
        return whole
    from transformers.distributed import DistributedConfig

    has_plan = bool(options["config"].base_model_tp_plan)
    plan = {**({} if has_plan else _DENSE_PLAN), **dict.fromkeys(_WHOLE, "replicate")}
    config = DistributedConfig(tp_size=num_ranks, tp_plan=plan)
    part, info = _on_our_ranks(kind).from_pretrained(None, distributed_config=config, **options)
    check_plan(part.tp_plan)
    _keep_local(part)
    return part, info


def _on_device(kind: type[PreTrainedModel], device: str) -> type[PreTrainedModel]:
    """Returns a class whose weights go to `device` one by one, each as it is read. The host then never holds them
    all."""
    found = torch.device(device)
    if found.type == "cpu":
        return kind

    # The option `device_map` of `from_pretrained` does the same, but it demands `accelerate`, a package that Weft needs
    # for nothing else.
    def load_pretrained_model(model: Any, tensors: Any, files: Any, settings: Any, keys: Any = None) -> Any:
        return kind._load_pretrained_model(model, tensors, files, replace(settings, device_map={"": found}), keys)

    # The subclass keeps the name of `kind` because transformers looks it up in its own tables.
    return type(kind.__name__, (kind,), {"_load_pretrained_model": staticmethod(load_pretrained_model)})


# ------------------------------------------------------------ shares

_NUM_RANKS: ContextVar[int] = ContextVar("num_ranks", default=1)
_WHOLE = ("model.embed_tokens", "lm_head")
_DENSE_PLAN = {
    f"model.layers.*.{name}": style
    for style, names in {
        "colwise": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        "rowwise": ("self_attn.o_proj", "mlp.down_proj"),
    }.items()
    for name in names
}
"""Holds the plan for a model for which transformers 5.23 has none (Qwen3-VL). It equals transformers' plans for all
dense models of this structure."""
_STYLES = frozenset(
    {"colwise", "rowwise", "packed_colwise", "moe_tp_experts", "replicated_with_grad_allreduce", "replicate"}
)
"""Lists the styles of transformers' plans that keep hidden states whole between layers."""


@contextmanager
def shard_weights(num_ranks: int) -> Iterator[None]:
    """Sets the number of ranks for the time of the block, in this thread. The default process group must have
    `num_ranks` members."""
    token = _NUM_RANKS.set(num_ranks)
    try:
        yield
    finally:
        _NUM_RANKS.reset(token)


def is_sharding() -> bool:
    """Returns whether parts that are loaded now become shares."""
    return _NUM_RANKS.get() > 1


def check_plan(plan: Mapping[str, str]) -> None:
    """Raises ValueError if the plan would leave the KV heads whole on every rank, or cuts in a way that Weft does not
    run."""
    if unknown := sorted(set(plan.values()) - _STYLES):
        raise ValueError(
            f"the model's tensor-parallel plan uses {', '.join(unknown)}; Weft supports {', '.join(sorted(_STYLES))}"
        )
    for name in ("k_proj", "v_proj"):
        if not any(key.endswith(f"self_attn.{name}") and style == "colwise" for key, style in plan.items()):
            raise ValueError(
                f"the model's tensor-parallel plan must split {name} by columns; otherwise each rank holds all KV heads"
            )


def _on_our_ranks(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns a subclass that uses the device of the process group. Without it, transformers would take the machine's
    best device even if the group runs on another, and would ask for `accelerate`."""

    def prepare_distribute_model(cls: type, config: Any, device_map: Any = None) -> tuple[Any, Any, _OneAxis]:
        return config, device_map, _OneAxis()

    # The subclass keeps the name of `kind` because transformers looks it up in its own tables.
    return type(kind.__name__, (kind,), {"prepare_distribute_model": classmethod(prepare_distribute_model)})


class _OneAxis:
    """A `_OneAxis` is the mesh that transformers asks for: all ranks are on one axis, in the default group itself, so
    that the group's timeout holds for every sum."""

    def __init__(self) -> None:
        import torch.distributed as dist

        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self._mesh = dist.init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))

    def get_mesh(self, axes: str | tuple[str, ...]) -> Any:
        return self._mesh


def _keep_local(part: PreTrainedModel) -> None:
    """Replaces distributed tensors by this rank's plain ones. The layers compute on these in any case, and need not
    unwrap them at every call."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter.data, DTensor):
                setattr(module, name, nn.Parameter(parameter.data.to_local(), requires_grad=False))
