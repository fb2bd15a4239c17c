"""Plans what the model sees of a video, and how much that is: frames, their size, temporal patches, rows, units.

A *step* is a temporal patch: the frames that become one plane of patches. Towers attend within a step. The module is
pure and knows nothing of the values of pixels.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from fabric.errors import InvalidMedia
from modalities.family import MediaOptions, VideoHeader
from modalities.qwen_vl.preprocess import smart_resize
from modalities.qwen_vl.video_options import VideoOptions
from modalities.sampling import Timeline, sample_frames
from modalities.video_rows import VideoRows, step_rows, unit_steps

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
        raise InvalidMedia(f"{header.width}x{header.height} pixels: too small")
    rows = grid_rows((1, grid_h, grid_w), rules.frame.merge_size, options)
    most_steps = options.max_tokens // len(rows.kept) * rows.num_pooled
    if not most_steps:
        raise InvalidMedia(f"{len(rows.kept)} rows for a frame are more than the limit of {options.max_tokens} tokens")
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


def step_times_s(cut: VideoCut, step: int) -> tuple[float, ...]:
    """Returns, for each step, the time halfway between its first and its last frame (Qwen3VLProcessor's rule)."""
    return tuple((cut.times_s[at] + cut.times_s[at + step - 1]) / 2 for at in range(0, len(cut.times_s), step))


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


def _shared_size(header: VideoHeader, num_frames: int, pixels: tuple[int, int], rules: VideoOptions) -> tuple[int, int]:
    """Returns the height and width that `smart_resize` of transformers' Qwen3VLVideoProcessor gives. `pixels` holds the
    least and the largest number of pixels of all frames together. Raises InvalidMedia for an aspect ratio above 200."""
    step, side = rules.frame.temporal_patch_size, rules.frame.factor
    height, width = header.height, header.width
    if height < side or width < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > 200:
        raise InvalidMedia(f"{header.width}x{header.height} pixels: the aspect ratio is above 200")
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
