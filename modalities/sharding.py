"""Loads the weights of one rank of a tensor-parallel worker, through transformers' own tensor-parallel plan.

Inside `shard_weights(n)` every part that a family loads becomes this process's share of it. The plan of the model's
config (`base_model_tp_plan`: column-wise, row-wise, packed, experts) cuts the weights as they are read, so no rank ever
holds a whole layer, and sums the ranks' parts after each row-wise layer. Embeddings and head stay whole because only
rank 0 uses them. This module knows nothing of steps, KV or the identity of the other ranks, which torch's default
process group knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel

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


def load_pretrained(
    kind: type[PreTrainedModel], tensors: Mapping[str, Any], **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns a model of class `kind` with the weights `tensors`, and the loading info. `tensors` maps names to tensors
    or to slices of a file, of which only the needed values are read. The model is whole, or inside `shard_weights` it
    is this rank's share, as plain tensors. `options` are those of `from_pretrained`, including the part's `config`.
    Raises the errors of `from_pretrained`, and ValueError if the plan can't be followed."""
    options |= {"output_loading_info": True, "state_dict": dict(tensors)}
    num_ranks = _NUM_RANKS.get()
    if num_ranks == 1:
        whole: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(None, **options)
        return whole
    from transformers.distributed import DistributedConfig

    has_plan = bool(options["config"].base_model_tp_plan)
    plan = {**({} if has_plan else _DENSE_PLAN), **dict.fromkeys(_WHOLE, "replicate")}
    config = DistributedConfig(tp_size=num_ranks, tp_plan=plan)
    part, info = _on_our_ranks(kind).from_pretrained(None, distributed_config=config, **options)
    check_plan(part.tp_plan)
    _keep_local(part)
    return part, info


def check_plan(plan: Mapping[str, str]) -> None:
    """Raises ValueError if the plan would leave the KV heads whole on every rank, or cuts in a way that Weft does not
    run."""
    if unknown := sorted(set(plan.values()) - _STYLES):
        raise ValueError(f"the model's tensor-parallel plan asks for {', '.join(unknown)}, which Weft does not run")
    for name in ("k_proj", "v_proj"):
        if not any(key.endswith(f"self_attn.{name}") and style == "colwise" for key, style in plan.items()):
            raise ValueError(f"the model's tensor-parallel plan does not share out {name}")


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
