"""Plans pictures and videos from their headers, and turns them into patches with numpy and Pillow.

`image_grid` and `cut_video` plan what the model sees of a medium, and how much that is: size, frames, temporal patches,
rows, units. A *step* is a temporal patch: the frames that become one plane of patches. Towers attend within a step.
`image_patches` and `video_units` decode the file into the patches of that plan. Pictures equal those of transformers'
Qwen2VLImageProcessorPil to the bit. Videos equal those of Qwen2VLVideoProcessor, except for the filter of the resize,
which is Pillow's (on pictures of real things, torchvision's filter differs by one or two of 256 grey levels).
`ImageOptions` and `VideoOptions` say how a checkpoint wants its media cut. They are read as plain JSON, and missing
keys take the values that transformers 5.23 gives them.

The plans are pure and know nothing of the values of pixels. The module knows nothing of requests, models or torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from fabric.contracts import ConfigError, InvalidMedia, MediaItem
from modalities.checkpoint_files import read_image_processor, read_video_processor
from modalities.family import DEFAULT_OPTIONS, EncoderInput, FeaturesHeader, ImageHeader, MediaOptions, VideoHeader
from modalities.media import (
    Normalisation,
    Timeline,
    VideoPlugin,
    VideoRows,
    channel_values,
    decode_frames,
    decode_image,
    fused_channel_values,
    sample_frames,
    settled_frames,
    step_rows,
    to_rgb,
    unit_steps,
)
from modalities.pixel_options import CLIP_MEAN, CLIP_STD, Channels, PixelOptions, pixel_options

# ------------------------------------------------------------ pictures


def image_grid(
    header: ImageHeader, options: ImageOptions, wishes: MediaOptions = DEFAULT_OPTIONS
) -> tuple[int, int, int]:
    """Returns the numbers of patches (t, h, w) of a picture, from its header. It has at least `wishes.min_pixels` and
    at most `wishes.max_pixels` pixels, as far as the checkpoint's largest size allows, and the sides that it would be
    scaled to are halved `wishes.reduction` times, down to the smallest size that the model takes. Raises
    InvalidMedia."""
    most, reduction = options.max_pixels, wishes.reduction
    wished = replace(options, min_pixels=min(wishes.min_pixels or options.min_pixels, most))
    if wishes.max_pixels:
        most = min(most, max(wishes.max_pixels, wished.min_pixels))
    height, width = smart_resize(header.height, header.width, wished, most)
    if wishes.min_pixels and height * width > options.max_pixels:
        # Rounding up exceeded a narrow range. Rounding down may give less than the picture has without the wish.
        reduced = smart_resize(height, width, replace(options, min_pixels=0))
        unenlarged = smart_resize(header.height, header.width, options, most)
        height, width = max(reduced, unenlarged, key=math.prod)
    if reduction:
        most_pixels = max(min(options.min_pixels, wished.min_pixels), (height * width) >> (2 * reduction))
        least = min(wished.min_pixels, most_pixels)
        height, width = smart_resize(header.height, header.width, replace(options, min_pixels=least), most_pixels)
    if height == 0 or width == 0:
        raise InvalidMedia(f"a picture of {header.width}x{header.height} pixels is too small for the model")
    return 1, height // options.patch_size, width // options.patch_size


def check_given_grid(header: FeaturesHeader, options: ImageOptions) -> None:
    """Raises InvalidMedia unless features that a client sends state a grid, it is one of a picture that the model
    takes, and it has as many tokens as the features."""
    if header.grid is None:
        raise InvalidMedia("this model needs the grid of the picture, in patches (1, height, width): `image_grid_thw`")
    steps, rows, columns = header.grid
    merge, most = options.merge_size, options.max_pixels // options.patch_size**2
    is_whole = min(rows, columns) >= merge and rows % merge == columns % merge == 0
    if steps != 1 or not is_whole or max(rows, columns) > _MAX_ASPECT_RATIO * min(rows, columns):
        raise InvalidMedia(
            f"`image_grid_thw` must be 1 and two multiples of {merge}, neither of them more than {_MAX_ASPECT_RATIO} "
            f"times the other, not {list(header.grid)}"
        )
    if rows * columns > most:
        raise InvalidMedia(f"`image_grid_thw` has {rows * columns} patches, but the model takes at most {most}")
    if (num_tokens := rows * columns // merge**2) != header.num_tokens:
        raise InvalidMedia(
            f"a picture with the grid {list(header.grid)} has {num_tokens} tokens, but the features have "
            f"{header.num_tokens}"
        )


_MAX_ASPECT_RATIO = 200


def smart_resize(height: int, width: int, options: ImageOptions, most_pixels: int | None = None) -> tuple[int, int]:
    """Returns the size (height, width) that a picture is scaled to: both are multiples of `options.factor`, the number
    of pixels is within the options' range (or at most `most_pixels`), and the aspect ratio is nearly kept (rule and
    rounding are those of Qwen2-VL). Raises InvalidMedia for a picture whose longer side is more than 200 times the
    shorter one."""
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise InvalidMedia(f"the aspect ratio of {width}x{height} pixels is above the limit of {_MAX_ASPECT_RATIO}")
    factor, most_pixels = options.factor, options.max_pixels if most_pixels is None else most_pixels
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > most_pixels:
        beta = math.sqrt((height * width) / most_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < options.min_pixels:
        beta = math.sqrt(options.min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def image_patches(
    data: bytes,
    grid: tuple[int, int, int],
    options: ImageOptions,
    param: str,
    wishes: MediaOptions = DEFAULT_OPTIONS,
) -> npt.NDArray[np.float32]:
    """Decodes a picture into patches, float32 `(grid_h * grid_w, 3 * temporal_patch_size * patch_size**2)`. The patches
    of one merged token follow each other. Raises InvalidMedia for a broken file or one that does not give `grid`."""
    image, header = decode_image(data, param)
    found = image_grid(header, options, wishes)
    if found != grid:
        raise InvalidMedia(
            f"{param}: the image gives patches {found}, but {grid} were planned from its header", param=param
        )
    rgb = to_rgb(image)
    size = (grid[2] * options.patch_size, grid[1] * options.patch_size)
    pixels = np.asarray(rgb.resize(size, resample=options.resample))
    return patchify(pixels, options)


def patchify(pixels: npt.NDArray[np.uint8], options: ImageOptions) -> npt.NDArray[np.float32]:
    """Turns pixels `(height, width, 3)` into patches `(num_patches, patch_dim)`. A still picture fills all frames of a
    temporal patch."""
    patch, merge = options.patch_size, options.merge_size
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # The axes are (rows/m, columns/m, m, m, channel, patch, patch).
    blocks = blocks.reshape(rows * columns, 3, 1, patch * patch)
    values = channel_values(Normalisation(options.rescale_factor, options.mean, options.std))[
        np.arange(3)[None, :, None, None], blocks
    ]
    return np.repeat(values, options.temporal_patch_size, axis=2).reshape(rows * columns, -1)


# ------------------------------------------------------------ plans of videos

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class VideoCut:
    """Describes which parts of a video the model sees, as they follow from its header and its options."""

    frames: tuple[int, ...]
    """Holds the frames in ascending order, in whole steps. The last frame is repeated where there are too few, and a
    frame that is shown for long may be taken more than once."""
    times_s: tuple[float, ...]
    """Holds the time at which each of `frames` is seen."""
    num_moments: int
    """Counts the different values among `times_s`."""
    grid: Grid
    rows: VideoRows
    unit_steps: tuple[int, ...]
    """Holds the number of steps in each unit."""
    is_as_asked: bool
    """Says whether the frame rate is constant and no limit has changed how many frames are taken per second."""

    @property
    def unit_tokens(self) -> tuple[int, ...]:
        return tuple(self.rows.num_rows(num_steps) for num_steps in self.unit_steps)


def cut_video(header: VideoHeader, options: MediaOptions, rules: VideoOptions) -> VideoCut:
    """Plans a video. Frames are as large as they would be without thinning out. Raises InvalidMedia for a video without
    frames, for an aspect ratio that the model refuses, and for a video that has more rows than `options.max_tokens`
    even with the fewest frames."""
    step = rules.frame.temporal_patch_size
    timeline = Timeline.of(header, options)
    asked = _sampled(timeline, dataclasses.replace(options, reduction=0), rules, rules.max_frames)
    height, width = frame_size(header, len(set(asked)), options, rules)
    grid_h, grid_w = height // rules.frame.patch_size, width // rules.frame.patch_size
    if not grid_h or not grid_w:
        raise InvalidMedia(f"a video frame of {header.width}x{header.height} pixels is too small for the model")
    rows = grid_rows((1, grid_h, grid_w), rules.frame.merge_size, options)
    most_steps = options.max_tokens // len(rows.kept) * rows.num_pooled
    if not most_steps:
        raise InvalidMedia(
            f"a frame of the video takes {len(rows.kept)} tokens, which is more than the limit of {options.max_tokens}"
        )
    slots = _sampled(timeline, options, rules, min(rules.max_frames, most_steps * step))
    grid = (len(slots) // step, grid_h, grid_w)
    num_wanted = max(int(header.seconds * options.fps) // step, 1) * step
    return VideoCut(
        frames=timeline.frames(slots),
        times_s=timeline.times_s(slots),
        num_moments=len(set(slots)),
        grid=grid,
        rows=rows,
        unit_steps=unit_steps(len(slots) // step, grid_h * grid_w, rows.num_pooled),
        is_as_asked=options.sampling == "fps" and len(slots) == num_wanted and not timeline.is_converted,
    )


def grid_rows(grid: Grid, merge_size: int, options: MediaOptions) -> VideoRows:
    """Returns how the rows of the patches `grid` are thinned."""
    return step_rows(grid[1] * grid[2] // merge_size**2, options)


def frame_size(header: VideoHeader, num_frames: int, options: MediaOptions, rules: VideoOptions) -> tuple[int, int]:
    """Returns the height and width that frames are scaled to, as the reference's video processor does for this many
    frames. One step never has more rows than `options.max_tokens`."""
    frame, side = rules.frame, rules.frame.factor
    most_of_frame = options.max_tokens * side**2
    least, most = frame.min_pixels, frame.max_pixels
    if rules.is_budget_shared:
        if rules.is_capped:
            cap = min(rules.max_video_tokens * side**2, most // num_frames)
            most = max(cap, int(least * 1.05)) * num_frames
        most = min(most, most_of_frame * num_frames)
        return _shared_size(header, num_frames, (least, most), rules)
    if rules.is_capped:
        budget = int(rules.max_video_tokens * side * side * 0.9)
        most = max(min(most, budget * frame.temporal_patch_size // num_frames), int(least * 1.05))
    return smart_resize(header.height, header.width, frame, most_pixels=min(most, most_of_frame))


def _shared_size(header: VideoHeader, num_frames: int, pixels: tuple[int, int], rules: VideoOptions) -> tuple[int, int]:
    """Returns the height and width that `smart_resize` of transformers' Qwen3VLVideoProcessor gives. `pixels` holds the
    least and the largest number of pixels of all frames together. Raises InvalidMedia for an aspect ratio above 200."""
    step, side = rules.frame.temporal_patch_size, rules.frame.factor
    height, width = header.height, header.width
    if height < side or width < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise InvalidMedia(
            f"the aspect ratio of {header.width}x{header.height} pixels is above the limit of {_MAX_ASPECT_RATIO}"
        )
    new_height, new_width = round(height / side) * side, round(width / side) * side
    # The reference refuses fewer frames than a step has, so this `max` exists only here.
    num_pixels = max(round(num_frames / step), 1) * step * new_height * new_width
    if num_pixels > pixels[1]:
        beta = math.sqrt(num_frames * height * width / pixels[1])
        new_height = max(side, math.floor(height / beta / side) * side)
        new_width = max(side, math.floor(width / beta / side) * side)
    elif num_pixels < pixels[0]:
        beta = math.sqrt(pixels[0] / (num_frames * height * width))
        new_height, new_width = math.ceil(height * beta / side) * side, math.ceil(width * beta / side) * side
    return new_height, new_width


def _sampled(timeline: Timeline, options: MediaOptions, rules: VideoOptions, max_frames: int) -> tuple[int, ...]:
    return sample_frames(
        timeline.num_frames,
        timeline.seconds,
        options,
        multiple=rules.frame.temporal_patch_size,
        min_frames=rules.min_frames,
        max_frames=max_frames,
        spacing="ends" if rules.is_budget_shared else "stride",
    )


def step_times_s(cut: VideoCut, step: int) -> tuple[float, ...]:
    """Returns, for each step, the time halfway between its first and its last frame (Qwen3VLProcessor's rule)."""
    return tuple((cut.times_s[at] + cut.times_s[at + step - 1]) / 2 for at in range(0, len(cut.times_s), step))


# ------------------------------------------------------------ patches of videos

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
            f"{item.part}: the video gives patches {cut.grid}, but {item.grid} were planned from its header",
            param=item.part,
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
        yield _patchify_step(np.stack(step), options)


def _resized(pixels: Pixels, size: tuple[int, int], resample: int) -> Pixels:
    """Returns the frame, resized to `size`, which is width and height."""
    if pixels.shape[1::-1] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, resample=resample))


def _patchify_step(frames: Pixels, options: ImageOptions) -> npt.NDArray[np.float32]:
    """Turns frames `(temporal_patch_size, height, width, 3)` into patches `(num_patches, patch_dim)`."""
    patch, merge, step = options.patch_size, options.merge_size, options.temporal_patch_size
    rows, columns = frames.shape[1] // patch, frames.shape[2] // patch
    blocks = frames.reshape(step, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    # The axes become (rows/m, columns/m, m, m, channel, step, patch, patch).
    blocks = blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    blocks = blocks.reshape(rows * columns, 3, step * patch * patch)
    values = fused_channel_values(Normalisation(options.rescale_factor, options.mean, options.std))
    return values[np.arange(3)[None, :, None], blocks].reshape(rows * columns, -1)


# ------------------------------------------------------------ the options of a checkpoint


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Describes how a picture becomes patches (transformers' Qwen2VLImageProcessor)."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resample: int
    """This is Pillow's number of the resize filter."""
    rescale_factor: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of this number."""
        return self.patch_size * self.merge_size


def read_image_options(model_dir: Path) -> ImageOptions:
    """Reads the options from processor_config.json (nested) or preprocessor_config.json, in transformers' order. Raises
    ConfigError for missing or broken files and for another kind of image processor."""
    options = read_image_processor(model_dir)
    kind = options.get("image_processor_type", "Qwen2VLImageProcessor")
    if not str(kind).startswith("Qwen2VLImageProcessor"):
        raise ConfigError(
            f"{model_dir}: the image processor {kind!r} is not supported; Weft supports Qwen2VLImageProcessor"
        )
    if not options.get("do_resize", True) or not options.get("do_convert_rgb", True):
        raise ConfigError(
            f"{model_dir}: the image processor must resize and convert to RGB; set do_resize and do_convert_rgb to true"
        )
    try:
        return _image_options(options, SizeRange(56 * 56, 28 * 28 * 1280), pixel_options(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{model_dir}: the config of the image processor is broken: {error}") from error


def _image_options(options: Mapping[str, Any], limits: SizeRange, pixels: PixelOptions) -> ImageOptions:
    """Returns the options of a processor's config; `limits` hold where the config names none. Raises TypeError or
    ValueError for values of the wrong kind."""
    size, colours = options.get("size") or {}, pixels.normalisation
    return ImageOptions(
        patch_size=int(options.get("patch_size", 14)),
        merge_size=int(options.get("merge_size", 2)),
        temporal_patch_size=int(options.get("temporal_patch_size", 2)),
        min_pixels=int(options.get("min_pixels") or size.get("shortest_edge") or limits.least),
        max_pixels=int(options.get("max_pixels") or size.get("longest_edge") or limits.most),
        resample=pixels.resample,
        rescale_factor=colours.rescale_factor,
        mean=colours.mean,
        std=colours.std,
    )


class SizeRange(NamedTuple):
    """Holds the least and the largest number of pixels."""

    least: int
    most: int


class VideoDefaults(NamedTuple):
    """Holds what a family's video processor assumes where the checkpoint gives no value."""

    processor: str
    frame_pixels: SizeRange | None = None
    """The family's processor passes this range when it is called; it holds for checkpoints without a file for
    videos."""


@dataclass(frozen=True, slots=True)
class VideoOptions:
    """Describes how a video becomes patches (transformers' Qwen2VL- and Qwen3VLVideoProcessor)."""

    frame: ImageOptions
    """Describes how one frame is cut. Its range of pixels holds for one frame, or for all frames together
    (`is_budget_shared`)."""
    min_frames: int
    max_frames: int
    is_budget_shared: bool
    """Says whether frames x height x width together stay within the range of pixels, as in Qwen3-VL."""
    is_capped: bool
    """Says whether the pixels of a frame are capped (the key `cap_pixels_per_frame`)."""
    max_video_tokens: int
    """The cap on the pixels of a frame is derived from this number of tokens."""


class _Kind(NamedTuple):
    patch_size: int
    frame_pixels: SizeRange
    mean: Channels
    std: Channels
    is_budget_shared: bool
    max_video_tokens: int


_HALF = (0.5, 0.5, 0.5)
_KINDS = {
    "Qwen2VLVideoProcessor": _Kind(14, SizeRange(128 * 28 * 28, 768 * 28 * 28), CLIP_MEAN, CLIP_STD, False, 128_000),
    "Qwen3VLVideoProcessor": _Kind(16, SizeRange(128 * 32 * 32, 768 * 32 * 32), _HALF, _HALF, True, 768),
}


def read_video_options(model_dir: Path, defaults: VideoDefaults) -> VideoOptions:
    """Reads the options of videos. Raises ConfigError for missing or broken files and for another kind of video
    processor."""
    found, is_own = read_video_processor(model_dir)
    name = str(found.get("video_processor_type", defaults.processor))
    kind = _KINDS.get(name.removesuffix("Fast"))
    if kind is None:
        known = ", ".join(_KINDS)
        raise ConfigError(f"{model_dir}: the video processor {name!r} is not supported; Weft supports {known}")
    if not found.get("do_resize", True) or not found.get("do_convert_rgb", True):
        raise ConfigError(
            f"{model_dir}: the video processor must resize and convert to RGB; set do_resize and do_convert_rgb to true"
        )
    frame_pixels = kind.frame_pixels
    if not is_own and defaults.frame_pixels is not None:
        frame_pixels = defaults.frame_pixels
        found = {key: value for key, value in found.items() if key not in ("size", "min_pixels", "max_pixels")}
    try:
        pixels = pixel_options(found, kind.mean, kind.std)
        return VideoOptions(
            frame=_image_options({"patch_size": kind.patch_size, **found}, frame_pixels, pixels),
            min_frames=int(found.get("min_frames", 4)),
            max_frames=int(found.get("max_frames", 768)),
            is_budget_shared=kind.is_budget_shared,
            is_capped=bool(found.get("cap_pixels_per_frame", False)),
            max_video_tokens=int(found.get("max_video_tokens", kind.max_video_tokens)),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{model_dir}: the config of the video processor is broken: {error}") from error
