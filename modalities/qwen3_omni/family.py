"""Combines the layout and the transformers classes of Qwen3-Omni into a family. It knows nothing of weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modalities.qwen3_omni.config import LAYOUT
from modalities.qwen_vl.family import QwenVLFamily

if TYPE_CHECKING:
    from modalities.qwen_vl.checkpoint import Checkpoint


class Qwen3OmniFamily(QwenVLFamily):
    """A `Qwen3OmniFamily` stands for one checkpoint directory. It is immutable and thread-safe."""

    def __init__(self, model_dir: Path) -> None:
        """Reads only config files. Raises ConfigError if Weft can't use them."""
        super().__init__(LAYOUT, model_dir, _checkpoint)


def _checkpoint() -> Checkpoint:
    from modalities.qwen3_omni.checkpoint import CHECKPOINT

    return CHECKPOINT
