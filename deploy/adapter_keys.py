"""Defines the values of `model.adapters`, and checks them against the other keys of the config.

The module reads no file: `deploy.lora_adapters` finds the adapters and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field

from deploy.config_values import ModelPath

MAX_ADAPTERS = 256
OPTIONS = (
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "lora_dtype",
    "fully_sharded_loras",
    "specialize_active_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""Lists the options of vLLM that say how adapters are computed, and nothing without any."""


def _absolute(source: Path | str) -> Path | str:
    return source.absolute() if isinstance(source, Path) else source


AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.:@/-]*[A-Za-z0-9_.:@-])?$", max_length=128)]
"""Is a name for which clients ask as for a model."""
AdapterSource = Annotated[ModelPath, AfterValidator(_absolute)]
"""Is a folder, or the text of a URL. A relative path counts from the folder in which the config is read, because
replicas run in other folders."""


class AdapterPool(NamedTuple):
    """An `AdapterPool` is what a pool of workers says that counts for adapters."""

    path: str
    """Says where the config has the pool."""
    engine: str
    device: str
    options: Mapping[str, Any]
    """Holds the options for vLLM."""


def check_adapter_keys(
    adapters: Mapping[str, Path | str],
    model_name: str | None,
    embeddings: str,
    pools: Sequence[AdapterPool],
    *,
    has_speech: bool,
) -> None:
    """Raises ValueError if the rest of the config has no use for adapters, takes one of their names, or gives something
    that would be answered without them. `pools` are all pools of workers."""
    for pool in pools:
        idle = [name for name in OPTIONS if name in pool.options]
        if idle and not adapters:
            raise ValueError(f"{pool.path}.vllm.{idle[0]} is set, but there are no adapters (model.adapters)")
    if not adapters:
        return
    names = ", ".join(adapters)
    computing = [pool for pool in pools if pool.engine == "vllm"]
    if not computing:
        raise ValueError(
            f"model.adapters has {names}, but workers.engine is weft, which computes no adapters; set workers.engine: "
            "vllm"
        )
    if embeddings != "off":
        raise ValueError(
            f"model.adapters has {names}, but model.embeddings is {embeddings}, and workers with vLLM, which adapters "
            "need, give no embeddings"
        )
    if has_speech:
        raise ValueError(
            f"model.adapters has {names}, but the cluster speaks (stages), and workers with vLLM, which adapters need, "
            "give no speech"
        )
    for pool in computing:
        if pool.device == "cpu" and "max_loras" in pool.options:
            key = f"{pool.path}.vllm.max_loras"
            raise ValueError(f"{key} can't be set on a CPU, where each adapter needs a place of its own")
    if model_name in adapters:
        raise ValueError(f"model.adapters has the name {model_name}, which model.name gives to the model itself")
