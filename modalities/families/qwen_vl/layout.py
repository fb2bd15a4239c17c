"""Reads config.json of a Qwen vision family as plain JSON, by the `Layout` in which the family says how it differs.

`read_config` returns the settings of one checkpoint, and refuses what Weft can't run, so that every part of the cluster
refuses it at start. `VideoTime` and its four forms are a part of the layout: the times of a video's steps, as
positions, as text, and together with the sound that belongs to the video. A *step* is a temporal patch. The rules are
those of transformers' `get_rope_index` and of the families' processors.

The module is pure: it imports neither torch nor transformers, and knows nothing of weights or pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fabric.contracts import ConfigError
from modalities.checkpoint_files import model_id, read_json, section
from modalities.families.audio_towers.sound_plans import SoundHalf
from modalities.families.causal_lm.text_family import refuse_unsupported, shape_of
from modalities.families.qwen_vl.patches import (
    ImageOptions,
    VideoCut,
    VideoDefaults,
    VideoOptions,
    read_image_options,
    read_video_options,
)
from modalities.family import MediaOptions, ModelShape, VideoHeader

# ------------------------------------------------------------ how the families differ

IMAGE, VIDEO, AUDIO = "image", "video", "audio"


@dataclass(frozen=True, slots=True)
class Control:
    """Identifies a token by its key in config.json."""

    key: str
    default: int | None = None
    text: str = ""
    """Holds the text that chat templates write for the token, if the token is a placeholder."""


_VISION_START = Control("vision_start_token_id", 151652)
_VISION_END = Control("vision_end_token_id", 151653)
VISION = {
    IMAGE: Control("image_token_id", 151655, "<|image_pad|>"),
    VIDEO: Control("video_token_id", 151656, "<|video_pad|>"),
}
"""Holds the placeholders of most of the families."""


@dataclass(frozen=True, slots=True)
class SoundLayout:
    """Describes how config.json of a family that takes sound names what belongs to sounds."""

    read: Callable[[Path, Mapping[str, Any], int], SoundHalf]
    """Reads what the family does with sounds before its encoder. The parameters are the model directory,
    `audio_config`, and the width of the text model. Raises ConfigError."""
    start: Control
    end: Control
    """These two tokens (`start` and `end`) are written around a video's rows if its sound is among them."""
    are_marks_paired: bool = False
    """Has the same meaning as in `prompt_layout.prompt_positions`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes how one family differs from the others in config.json. Defaults are those of transformers 5.23."""

    name: str
    modality_to_placeholder: Mapping[str, Control]
    """Maps a modality to the one token that the chat template writes for a medium."""
    text_defaults: Mapping[str, Any]
    """Holds the values of missing keys of the text model."""
    vision_defaults: Mapping[str, Any]
    """Holds the values of missing keys of the vision tower, always including the patch and merge sizes."""
    video_time: Callable[[Mapping[str, Any]], VideoTime]
    """Derives the times of a video's steps from the model's config."""
    video: VideoDefaults
    sound: SoundLayout | None = None
    feature_size_key: str = "out_hidden_size"
    """Names the key of the vision config that holds the width of a feature."""
    whole_architectures: tuple[str, ...] = ()
    """A checkpoint of one of these architectures holds the family as its `thinker_config`, in addition to other
    parts."""
    is_text_flat: bool = False
    """Says whether older checkpoints have no `text_config`, so that its keys stand at the top level."""


# ------------------------------------------------------------ the settings of a checkpoint


@dataclass(frozen=True, slots=True)
class QwenVLConfig:
    """Holds the settings of one checkpoint of a Qwen vision family."""

    model_id: str
    is_thinker_only: bool
    """Says whether the checkpoint holds the model alone; otherwise the model is the thinker of a checkpoint that also
    has a talker and a vocoder."""
    shape: ModelShape
    modality_to_token: Mapping[str, int]
    """Maps the modalities that the family takes to their placeholder tokens."""
    marks: Marks
    num_deepstack_levels: int
    image: ImageOptions
    video: VideoOptions
    video_time: VideoTime
    sound: SoundHalf | None = field(default=None)

    @property
    def image_token_id(self) -> int:
        return self.modality_to_token["image"]


@dataclass(frozen=True, slots=True)
class Marks:
    """Holds the tokens that are written around rows; a token is None where the config does not name one."""

    vision_start: int | None = None
    vision_end: int | None = None
    audio_start: int | None = None
    audio_end: int | None = None


def _is_whole(config: Mapping[str, Any], layout: Layout) -> bool:
    """Returns whether a checkpoint holds more than the thinker. One whose architecture was registered from outside
    shows it by its `thinker_config`."""
    if not set(layout.whole_architectures).isdisjoint(config.get("architectures") or ()):
        return True
    return bool(layout.whole_architectures) and "thinker_config" in config


def read_config(model_dir: Path, layout: Layout) -> QwenVLConfig:
    """Reads the family's config from `model_dir`. Raises ConfigError for missing or broken files and for what Weft
    can't run."""
    raw, config = read_json(model_dir / "config.json")
    is_thinker_only = not _is_whole(config, layout)
    model = config if is_thinker_only else section(config, "thinker_config")
    text = _with_defaults(_text_section(model, layout), layout.text_defaults)
    vision = _with_defaults(section(model, "vision_config"), layout.vision_defaults)
    refuse_unsupported(text)
    image = read_image_options(model_dir)
    video = read_video_options(model_dir, layout.video)
    for options, name in ((image, "preprocessor"), (video.frame, "video preprocessor")):
        _check_patches(vision, options, name)
    levels = vision.get("deepstack_visual_indexes", ())
    shape = shape_of(text, num_levels=1 + len(levels))
    if (width := vision[layout.feature_size_key]) != shape.hidden_size:
        raise ConfigError(
            f"vision_config.{layout.feature_size_key} is {width}, but the hidden_size of the text model is "
            f"{shape.hidden_size}"
        )
    if len(levels) > shape.num_layers:
        raise ConfigError(
            f"vision_config.deepstack_visual_indexes names {len(levels)} DeepStack levels, but the text model has only "
            f"{shape.num_layers} layers"
        )
    tokens = {name: _token(model, control) for name, control in layout.modality_to_placeholder.items()}
    sound = layout.sound
    return QwenVLConfig(
        model_id=model_id(model_dir, raw),
        is_thinker_only=is_thinker_only,
        shape=shape,
        modality_to_token={name: token for name, token in tokens.items() if token is not None},
        marks=Marks(
            vision_start=_token(model, _VISION_START),
            vision_end=_token(model, _VISION_END),
            audio_start=_token(model, sound.start) if sound else None,
            audio_end=_token(model, sound.end) if sound else None,
        ),
        num_deepstack_levels=len(levels),
        image=image,
        video=video,
        video_time=layout.video_time(model),
        sound=sound.read(model_dir, model.get("audio_config") or {}, shape.hidden_size) if sound else None,
    )


def _check_patches(vision: Mapping[str, Any], options: ImageOptions, name: str) -> None:
    for key, mine in (
        ("patch_size", options.patch_size),
        ("spatial_merge_size", options.merge_size),
        ("temporal_patch_size", options.temporal_patch_size),
    ):
        if vision[key] != mine:
            raise ConfigError(f"vision_config.{key} is {vision[key]}, but that of the {name} is {mine}")


def _token(model: Mapping[str, Any], control: Control) -> int | None:
    """Returns the token's id, or None if there is neither the key nor a default. Keys that end in `_token_index` are
    older names of the omni families; for these the function also accepts the newer name, which ends in `_token_id`."""
    found = model.get(control.key, model.get(control.key.replace("_token_index", "_token_id"), control.default))
    return None if found is None else int(found)


def _text_section(model: Mapping[str, Any], layout: Layout) -> Mapping[str, Any]:
    if layout.is_text_flat and model.get("text_config") is None:
        return model
    return section(model, "text_config")


def _with_defaults(found: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {**defaults, **found}


# ------------------------------------------------------------ the times of a video's steps

Ints = npt.NDArray[np.int64]


class VideoTime(Protocol):
    """A `VideoTime` is one family's rule for the times of a video's steps."""

    @property
    def is_written(self) -> bool:
        """Says whether steps stand in the prompt one by one, each with its time as text before it."""
        ...

    @property
    def ends_with_sides(self) -> bool:
        """Says whether the text after a video continues at the video's start plus the longer side of a frame's merged
        grid, independent of the video's duration."""
        ...

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        """Returns the seconds from one step of `step` frames to the next; 0.0 where positions do not depend on it."""
        ...

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        """Returns the positions of the steps on the time axis, `(num_steps,)`, from 0."""
        ...


@dataclass(frozen=True, slots=True)
class CountedTime:
    """Implements Qwen2-VL's rule: each step has the next position."""

    is_written = False
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return 0.0

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        return np.arange(num_steps, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class WrittenTime:
    """Implements Qwen3-VL's rule: every step is a block of its own, after its time in words."""

    is_written = True
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return 0.0

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        return np.zeros(num_steps, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """Implements Qwen2.5-VL's rule: there are `per_second` positions per second, by the time between the frames that
    are actually taken."""

    per_second: float
    is_written = False
    ends_with_sides = True

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return step * header.seconds / cut.num_moments

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        # The reference computes in float32 and truncates, so this code does too.
        interval = np.float32(self.per_second) * np.float32(row_seconds)
        return (np.arange(num_steps, dtype=np.float32) * interval).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SharedTime:
    """Implements the Omni families' rule: pictures and sound share one clock.

    The time between two steps is the one that was asked for (the reference's `fps`), unless limits made it longer: then
    it is the time between the frames that are actually taken, since the sound continues unchanged."""

    per_second: int
    """Counts the positions per second, and for sound also the rows per second."""
    is_rounded_up: bool
    """Says whether fractions of positions are rounded up. This keeps the reference's order of video and sound rows
    (Qwen3-Omni), where positions have fractions. Otherwise fractions are cut off, as in the reference
    (Qwen2.5-Omni)."""
    chunk: int
    """Rows of video and rows of sound take turns every `chunk` positions (Qwen2.5-Omni). With 0 the rows are merged by
    position."""
    is_written = False
    ends_with_sides = False

    def row_seconds(self, cut: VideoCut, header: VideoHeader, options: MediaOptions, step: int) -> float:
        return step / options.fps if cut.is_as_asked else step * header.seconds / cut.num_moments

    def positions(self, num_steps: int, row_seconds: float) -> Ints:
        if self.is_rounded_up:
            rounded: Ints = np.ceil(np.arange(num_steps) * row_seconds * self.per_second).astype(np.int64)
            return rounded
        found = np.arange(num_steps, dtype=np.float32) * np.float32(row_seconds) * np.float32(self.per_second)
        return found.astype(np.int64)

    def woven(self, seen: Ints, num_heard: int) -> npt.NDArray[np.bool_]:
        """Returns `(len(seen) + num_heard,)`: True where a row of the video stands, and False where one of the sound
        stands. `seen` holds the positions of the video's rows, ascending; those of the sound count up from 0."""
        heard = np.arange(num_heard, dtype=np.int64)
        keys = [seen, heard] if not self.chunk else [_chunks(seen, self.chunk), _chunks(heard, self.chunk)]
        order = np.argsort(np.concatenate(keys), kind="stable")
        return order < len(seen)


def _chunks(positions: Ints, size: int) -> Ints:
    """Returns the chunk of each row: a row opens at most one chunk (`get_chunked_index` of the reference)."""
    found = np.zeros(len(positions), dtype=np.int64)
    chunk = 0
    for index, position in enumerate(positions.tolist()):
        if position >= (chunk + 1) * size:
            chunk += 1
        found[index] = chunk
    return found
