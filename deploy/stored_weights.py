"""How many parameters a checkpoint has, per part, from the headers of its safetensors files. Reads no weights.

The format: 8 bytes little-endian length, then JSON `name -> {dtype, shape, data_offsets}`
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from modalities.quantisation import ACTIVATION_SUFFIXES, SCALE_SUFFIXES

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
ENCODER_NAMES = frozenset(
    {
        "visual", "vision_tower", "vision_model", "vision_embed_tokens", "audio_tower", "image_newline", "mlp1",
        "multi_modal_projector",
    }
)  # fmt: skip
"""A tensor with one of these in its path is an encoder's."""
OTHER_NAMES = frozenset({"talker", "code2wav", "token2wav"})
"""Loaded by neither encoders nor workers."""

_SCALES = (*SCALE_SUFFIXES, *ACTIVATION_SUFFIXES)
"""Of quantised weights: multiplied into them when they are loaded."""


class StoredWeights(NamedTuple):
    num_encoder: int
    """Parameters of all encoders, whatever modalities are loaded: an upper bound."""
    num_language: int


def read_stored_weights(model_dir: Path) -> StoredWeights | None:
    """None if the directory has no readable safetensors files."""
    counts = {"encoder": 0, "language": 0, "other": 0}
    files = sorted(model_dir.glob("*.safetensors"))
    try:
        for path in files:
            for name, tensor in _header(path).items():
                if name != "__metadata__" and not name.endswith(_SCALES):
                    counts[_part(name)] += math.prod(tensor["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return StoredWeights(counts["encoder"], counts["language"]) if files else None


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, dict[str, list[int]]] = json.loads(file.read(length))
    return header


def _part(name: str) -> str:
    steps = set(name.split("."))
    if steps & OTHER_NAMES:
        return "other"
    return "encoder" if steps & ENCODER_NAMES else "language"
