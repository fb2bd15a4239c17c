"""Counts the parameters of a checkpoint, per part, from the headers of its safetensors files. It reads no weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from fabric.contracts import ConfigError
from modalities.checkpoint_files import ACTIVATION_SUFFIXES, SCALE_SUFFIXES, read_tensor_header

ENCODER_NAMES = frozenset(
    {
        "visual", "vision_tower", "vision_model", "vision_embed_tokens", "audio_tower", "image_newline", "mlp1",
        "multi_modal_projector",
    }
)  # fmt: skip
"""A tensor belongs to an encoder if its path contains one of these names."""
NAME_TO_STAGE = {"talker": "talker", "code2wav": "code2wav", "token2wav": "code2wav"}
"""Maps names in the paths of tensors to the stages that load them; neither encoders nor workers do."""

_SCALES = (*SCALE_SUFFIXES, *ACTIVATION_SUFFIXES)
"""Tensors with these suffixes are scales in quantised checkpoints. The count leaves them out: loading multiplies the
scales of weights into the weights, and Weft does not quantise activations."""
_PACKED_TO_BYTES = {"I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
"""Maps the dtypes in which quantised weights are stored to the bytes of a value."""


class PackedWeights(NamedTuple):
    """Counts the values among the parameters that are stored as integers or float8, and the bytes of these. An engine
    that computes on quantised weights holds them as they are stored."""

    num_values: int = 0
    nbytes: int = 0


class StoredWeights(NamedTuple):
    num_encoder: int
    """Counts the parameters of all encoders. It is an upper bound, because a cluster may load fewer modalities."""
    num_language: int
    num_talker: int = 0
    num_code2wav: int = 0
    packed_language: PackedWeights = PackedWeights()
    packed_encoder: PackedWeights = PackedWeights()


def read_stored_weights(model_dir: Path) -> StoredWeights | None:
    """Returns the number of parameters per part, or None if the directory has no readable safetensors files."""
    counts = {"encoder": 0, "language": 0, "talker": 0, "code2wav": 0}
    packed = dict.fromkeys(counts, PackedWeights())
    files = sorted(model_dir.glob("*.safetensors"))
    try:
        for path in files:
            for name, tensor in read_tensor_header(path).items():
                if name.endswith(_SCALES):
                    continue
                part, num_values = _part(name), math.prod(tensor["shape"])
                counts[part] += num_values
                if (size := _PACKED_TO_BYTES.get(tensor["dtype"])) is not None:
                    before = packed[part]
                    packed[part] = PackedWeights(before.num_values + num_values, before.nbytes + num_values * size)
    except (ConfigError, TypeError):
        return None
    if not files:
        return None
    return StoredWeights(
        counts["encoder"],
        counts["language"],
        counts["talker"],
        counts["code2wav"],
        packed["language"],
        packed["encoder"],
    )


def _part(name: str) -> str:
    steps = set(name.split("."))
    for name, stage in NAME_TO_STAGE.items():
        if name in steps:
            return stage
    return "encoder" if steps & ENCODER_NAMES else "language"
