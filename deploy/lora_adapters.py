"""Finds the LoRA adapters of the config on a node, and refuses one that can't be served before anything starts.

The process that starts a cluster opens them first, and each worker opens them again on its own node. An adapter with a
URL is downloaded as a model is, once for all processes of a node.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from deploy.config import ClusterConfig
from deploy.models import ModelUrl, fetch_model
from fabric.contracts import ConfigError
from modalities.adapter_files import LoraAdapter, read_adapter

LARGEST_RANK = 512
"""Is the largest rank that vLLM 0.32 takes."""


class FoundAdapter(NamedTuple):
    """A `FoundAdapter` is an adapter whose files are on this node."""

    source: Path | str
    """Is the path of the config, or the URL with its version."""
    directory: Path


def find_adapters(config: ClusterConfig) -> Mapping[str, FoundAdapter]:
    """Returns the adapters by their names, after it has downloaded those that have a URL and are not here. Raises
    ConfigError or Unavailable if one is not there."""
    return {name: _found(config, name, source) for name, source in config.model.adapters.items()}


def pin_adapters(config: ClusterConfig, model_name: str, model_dir: Path) -> ClusterConfig:
    """Returns the config with the version of each adapter that has a URL, so that every worker loads the same. Raises
    ConfigError for an adapter that can't be served with the model, and for one with the model's name, and what
    `find_adapters` raises."""
    if model_name in config.model.adapters:
        raise ConfigError(f"model.adapters has the name {model_name}, which the model itself has; set model.name")
    found = find_adapters(config)
    _read(config, found, model_dir)
    model = config.model.model_copy(update={"adapters": {name: each.source for name, each in found.items()}})
    return config.model_copy(update={"model": model}) if found else config


def open_adapters(config: ClusterConfig, model_dir: Path) -> Mapping[str, LoraAdapter]:
    """Returns the adapters by their names, with their files on this node. Raises what `pin_adapters` raises."""
    return _read(config, find_adapters(config), model_dir)


def _found(config: ClusterConfig, name: str, source: Path | str) -> FoundAdapter:
    if isinstance(source, Path):
        if not source.is_dir():
            node = platform.node() or "localhost"
            raise ConfigError(f"model.adapters.{name} is {source}, which is not a directory on {node}")
        return FoundAdapter(source, source)
    url, directory = fetch_model(ModelUrl.parse(source), config.model.cache_dir, True, config.model.cache_bytes)
    return FoundAdapter(str(url), directory)


def _read(config: ClusterConfig, found: Mapping[str, FoundAdapter], model_dir: Path) -> Mapping[str, LoraAdapter]:
    """Reads and checks the files of all adapters."""
    name_to_adapter: dict[str, LoraAdapter] = {}
    for name, each in found.items():
        try:
            name_to_adapter[name] = adapter = read_adapter(each.directory, model_dir)
        except ConfigError as error:
            raise ConfigError(f"model.adapters.{name}: {error.message}") from error
        for pool in config.by_pool():
            options = pool.workers.vllm
            most = options.get("max_lora_rank", LARGEST_RANK)
            if isinstance(most, int) and adapter.max_rank > most:
                key = f"{pool.pool_path}.vllm.max_lora_rank is"
                limit = key if "max_lora_rank" in options else "vLLM takes at most"
                raise ConfigError(f"model.adapters.{name} has rank {adapter.max_rank}, but {limit} {most}")
    return name_to_adapter
