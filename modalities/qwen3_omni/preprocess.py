"""Exports the picture processing of Qwen3-Omni, which is that of `modalities.qwen_vl.preprocess`."""

from modalities.qwen_vl.preprocess import image_grid, image_patches, patchify, smart_resize

__all__ = ["image_grid", "image_patches", "patchify", "smart_resize"]
