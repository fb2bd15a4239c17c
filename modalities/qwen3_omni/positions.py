"""Qwen3-Omni's positions are those of its siblings: see `modalities.qwen_vl.positions`."""

from modalities.qwen_vl.positions import BlockPositions, grid_positions, prompt_positions

__all__ = ["BlockPositions", "grid_positions", "prompt_positions"]
