"""The family Qwen3-Omni: its layout and its classes, put together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from modalities.qwen3_omni.config import LAYOUT
from modalities.qwen_vl.family import QwenVLFamily

if TYPE_CHECKING:
    from modalities.qwen_vl.checkpoint import Checkpoint


class Qwen3OmniFamily(QwenVLFamily):
    """One checkpoint directory. Immutable and thread-safe."""

    def __init__(self, model_dir: Path) -> None:
        """Reads config files only. Raises ConfigError."""
        super().__init__(LAYOUT, model_dir, _checkpoint)


def _checkpoint() -> Checkpoint:
    from modalities.qwen3_omni.checkpoint import CHECKPOINT

    return CHECKPOINT
