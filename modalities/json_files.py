"""Reads JSON files of a checkpoint directory, and sections of them. This module knows nothing of models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3

from fabric.errors import ConfigError


def read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Returns the file's bytes and the JSON object in it. Raises ConfigError if the file can't be read or holds no
    object."""
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return raw, value


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the object `name` of config.json. Raises ConfigError if there is none."""
    found = config.get(name)
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json has no {name}")
    return found


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


def model_id(model_dir: Path, config: bytes) -> str:
    """Returns `NAME@DIGEST`: the name of the directory, and a digest of 8 bytes of `config`, its config.json."""
    return f"{model_dir.resolve().name}@{blake3.blake3(config).hexdigest(length=8)}"


def _read_processor(model_dir: Path, name: str) -> Mapping[str, Any]:
    nested = _nested_processor(model_dir, name)
    return nested if nested is not None else read_json(model_dir / "preprocessor_config.json")[1]


def _nested_processor(model_dir: Path, name: str) -> Mapping[str, Any] | None:
    """Returns the options `name` in processor_config.json, or None if there are none. Raises ConfigError if the file
    can't be read."""
    path = model_dir / "processor_config.json"
    nested = read_json(path)[1].get(name) if path.exists() else None
    return nested if isinstance(nested, Mapping) else None
