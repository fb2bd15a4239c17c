"""Runs transformers' video processors without torchvision, on which they are built. It uses their own code except for
two functions, whose formulas stand in this file."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from transformers import image_processing_backends
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, SizeDict
from transformers.video_utils import VideoMetadata

_NAME_TO_MODULE = {
    "Qwen2VLVideoProcessor": "qwen2_vl",
    "Qwen3VLVideoProcessor": "qwen3_vl",
    "InternVLVideoProcessor": "internvl",
}


class Looked(NamedTuple):
    """Holds what the reference samples from a video."""

    patches: torch.Tensor
    """Has shape `(num_patches, patch_dim)`."""
    grid: list[int]
    indices: list[int]
    metadata: VideoMetadata


def resize(image: torch.Tensor, size: Any, interpolation: Any = None, antialias: bool = True) -> torch.Tensor:
    """Resizes as torchvision does for 8-bit values: its bicubic filter calls torch's own kernel for them."""
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    made = torch.nn.functional.interpolate(flat, size=list(size), mode="bicubic", antialias=antialias)
    return made.reshape(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    mean, std = (torch.as_tensor(values, dtype=image.dtype)[:, None, None] for values in (mean, std))
    return (image - mean) / std


@contextmanager
def torchvision_stand_in() -> Iterator[ModuleType]:
    """Replaces torchvision while the processors' modules are imported."""
    functional = ModuleType("torchvision.transforms.v2.functional")
    functional.resize, functional.normalize = resize, normalize
    functional.InterpolationMode = SimpleNamespace(LANCZOS="lanczos")
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules = {name: ModuleType(name) for name in names} | {functional.__name__: functional}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    added = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(added)
    try:
        yield functional
    finally:
        for name in added:
            del sys.modules[name]


def processor_class(name: str) -> Any:
    """Returns the class of a video processor, e.g. `Qwen2VLVideoProcessor`."""
    module = _NAME_TO_MODULE[name]
    with torchvision_stand_in() as functional:
        image_processing_backends.tvF = functional
        image_processing_backends.pil_torch_interpolation_mapping = {3: "bicubic"}
        found = importlib.import_module(f"transformers.models.{module}.video_processing_{module}")
    return getattr(found, name)


def load(directory: Path, name: str) -> Any:
    """Creates a processor with the checkpoint's settings for videos."""
    processor = object.__new__(processor_class(name))
    for key, value in json.loads((directory / "video_preprocessor_config.json").read_text()).items():
        setattr(processor, key, value)
    processor.num_frames = processor.fps = None
    return processor


def look(processor: Any, frames: np.ndarray, fps: float, wanted_fps: float = 2.0) -> Looked:
    """Runs the processor on `frames`, which have shape `(num_frames, height, width, 3)`."""
    metadata = VideoMetadata(total_num_frames=len(frames), fps=fps, duration=len(frames) / fps)
    indices = [int(index) for index in processor.sample_frames(metadata, fps=wanted_fps)]
    metadata.frames_indices = list(indices)
    video = torch.from_numpy(frames[indices]).permute(0, 3, 1, 2)
    made = processor._preprocess(
        [video],
        do_resize=True,
        size=SizeDict(**processor.size),
        resample=3,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=tuple(processor.image_mean),
        image_std=tuple(processor.image_std),
        patch_size=processor.patch_size,
        temporal_patch_size=processor.temporal_patch_size,
        merge_size=processor.merge_size,
        cap_pixels_per_frame=getattr(processor, "cap_pixels_per_frame", None) or False,
    )
    (grid,) = made["video_grid_thw"].tolist()
    return Looked(
        made["pixel_values_videos"].reshape(-1, made["pixel_values_videos"].shape[-1]), grid, indices, metadata
    )


def normalised(frames: np.ndarray, mean: Any = OPENAI_CLIP_MEAN, std: Any = OPENAI_CLIP_STD) -> torch.Tensor:
    """Normalises frames as every video processor does. `frames` have shape `(num_frames, height, width, 3)` and the
    model's own size; the result has shape `(num_frames, 3, height, width)`."""
    processor = object.__new__(processor_class("Qwen2VLVideoProcessor"))
    values = torch.from_numpy(frames).permute(0, 3, 1, 2)
    found: torch.Tensor = processor.rescale_and_normalize(values, True, 1 / 255, True, tuple(mean), tuple(std))
    return found


def decoded(data: bytes) -> tuple[np.ndarray, float]:
    """Returns all frames of a file, and their rate."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack(frames), float(container.streams.video[0].average_rate)
