"""Exports the positions of Qwen3-Omni, which are those of the related families in `modalities.qwen_vl.positions`."""

from modalities.qwen_vl.positions import BlockPositions, grid_positions, prompt_positions

__all__ = ["BlockPositions", "grid_positions", "prompt_positions"]
