"""Qwen3-Omni's pictures are those of its siblings: see `modalities.qwen_vl.preprocess`."""

from modalities.qwen_vl.preprocess import image_grid, image_patches, patchify, smart_resize

__all__ = ["image_grid", "image_patches", "patchify", "smart_resize"]
