"""Finds the LoRA adapters of the config on a node, and refuses one that can't be served before anything starts.

The process that starts a cluster opens them first, and each worker opens them again on its own node. An adapter with a
URL is downloaded as a model is, once for all processes of a node.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from deploy.config import ClusterConfig
from deploy.models import ModelUrl, fetch_model
from fabric.contracts import ConfigError
from modalities.adapter_files import LoraAdapter, read_adapter


def pin_adapters(config: ClusterConfig, model_name: str, model_dir: Path) -> ClusterConfig:
    """Returns the config with the version of each adapter that has a URL, so that every worker loads the same. Raises
    ConfigError for an adapter that can't be served with the model, and for one with the model's name; raises
    Unavailable if one can't be downloaded now."""
    if model_name in config.model.adapters:
        raise ConfigError(f"model.adapters has the name {model_name}, which the model itself has; set model.name")
    name_to_source = dict(config.model.adapters)
    for name, source in name_to_source.items():
        name_to_source[name], directory = _found(config, name, source)
        _read(name, directory, model_dir)
    model = config.model.model_copy(update={"adapters": name_to_source})
    return config.model_copy(update={"model": model}) if name_to_source else config


def open_adapters(config: ClusterConfig, model_dir: Path) -> Mapping[str, LoraAdapter]:
    """Returns the adapters by their names, with their files on this node. Raises what `pin_adapters` raises."""
    sources = config.model.adapters.items()
    return {name: _read(name, _found(config, name, source)[1], model_dir) for name, source in sources}


def _found(config: ClusterConfig, name: str, source: Path | str) -> tuple[Path | str, Path]:
    """Returns where an adapter comes from, with its version if that is a URL, and the directory of its files."""
    if isinstance(source, Path):
        if not source.is_dir():
            node = platform.node() or "localhost"
            raise ConfigError(f"model.adapters.{name} is {source}, which is not a directory on {node}")
        return source, source
    url, directory = fetch_model(ModelUrl.parse(source), config.model.cache_dir, True, config.model.cache_bytes)
    return str(url), directory


def _read(name: str, directory: Path, model_dir: Path) -> LoraAdapter:
    try:
        return read_adapter(directory, model_dir)
    except ConfigError as error:
        raise ConfigError(f"model.adapters.{name}: {error.message}") from error
