"""Turns videos into patches with numpy and Pillow, as transformers' Qwen2VLVideoProcessor does, except for the filter
of the resize, which is Pillow's (on pictures of real things, torchvision's filter differs by one or two of 256 grey
levels).

The module knows nothing of requests, models or torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.errors import InvalidMedia
from fabric.messages import MediaItem
from modalities.family import EncoderInput, MediaOptions
from modalities.keyframes import settled_frames
from modalities.pixels import Normalisation, fused_channel_values
from modalities.qwen_vl.image_options import ImageOptions
from modalities.qwen_vl.video_options import VideoOptions
from modalities.qwen_vl.video_plan import cut_video
from modalities.video import VideoPlugin, decode_frames

_VIDEO = "video"
Pixels = npt.NDArray[np.uint8]


def video_units(data: bytes, item: MediaItem, rules: VideoOptions) -> Iterator[EncoderInput]:
    """Yields the units of a video, each as soon as its frames are decoded. Raises InvalidMedia for a broken file or one
    that differs from its plan."""
    options = MediaOptions.decode(item.options)
    header = VideoPlugin().probe(data, item.part)
    cut = cut_video(header, options, rules)
    if (cut.grid, cut.unit_tokens) != (item.grid, item.unit_tokens):
        raise InvalidMedia(
            f"{item.part}: the video gives patches {cut.grid}, planned were {item.grid}", param=item.part
        )
    indices = settled_frames(data, header, cut.frames, options, item.part)
    frames = decode_frames(data, indices, header, item.part)
    steps = step_patches(frames, cut.grid, rules.frame)
    for num_steps in cut.unit_steps:
        pixels = np.concatenate([next(steps) for _ in range(num_steps)])
        grid = (num_steps, cut.grid[1], cut.grid[2])
        yield EncoderInput(_VIDEO, pixels, grid, geometry=cut.rows.geometry())


def step_patches(
    frames: Iterator[Pixels], grid: tuple[int, int, int], options: ImageOptions
) -> Iterator[npt.NDArray[np.float32]]:
    """Turns frames `(height, width, 3)` of any size into patches. Yields, for each temporal patch, float32
    `(grid_h * grid_w, patch_dim)`. The patches of one merged token follow each other."""
    size = (grid[2] * options.patch_size, grid[1] * options.patch_size)
    for _ in range(grid[0]):
        step = [_resized(next(frames), size, options.resample) for _ in range(options.temporal_patch_size)]
        yield _patchify(np.stack(step), options)


def _resized(pixels: Pixels, size: tuple[int, int], resample: int) -> Pixels:
    """Returns the frame, resized to `size`, which is width and height."""
    if pixels.shape[1::-1] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, resample=resample))


def _patchify(frames: Pixels, options: ImageOptions) -> npt.NDArray[np.float32]:
    """Turns frames `(temporal_patch_size, height, width, 3)` into patches `(num_patches, patch_dim)`."""
    patch, merge, step = options.patch_size, options.merge_size, options.temporal_patch_size
    rows, columns = frames.shape[1] // patch, frames.shape[2] // patch
    blocks = frames.reshape(step, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    # The axes become (rows/m, columns/m, m, m, channel, step, patch, patch).
    blocks = blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    blocks = blocks.reshape(rows * columns, 3, step * patch * patch)
    values = fused_channel_values(Normalisation(options.rescale_factor, options.mean, options.std))
    return values[np.arange(3)[None, :, None], blocks].reshape(rows * columns, -1)
