"""JSON files of a checkpoint, and sections of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError


def read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The file's bytes and the object in it. Raises ConfigError."""
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return raw, value


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of config.json. Raises ConfigError."""
    found = config.get(name)
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json has no {name}")
    return found
