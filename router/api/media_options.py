"""Reads `mm_processor_kwargs`, with which a request says how its media are sampled. The names are those of transformers
and vLLM.

It checks shape and range. The intake knows the deployment's defaults and what a medium becomes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fabric.errors import InvalidRequest
from modalities.family import MediaOptions

Sampling = Literal["fps", "uniform", "keyframe"]
MAX_FRAMES = 16_384
"""Limits the work per item; the token budget thins frames out long before this limit."""


class MediaKwargs(BaseModel):
    """Holds the options for all videos of a request. Unknown keys are refused, not ignored, because honouring them
    would change the answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    fps: float | None = Field(None, gt=0, le=240)
    num_frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    """This is the number of frames, evenly spread over the video. There are fewer if the video or the model's own limit
    has fewer, or if the budget is spent; the number is a multiple of what the model looks at together."""
    max_frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    sampling: Sampling | None = None
    use_audio_in_video: bool | None = None
    """Says whether the model gets the sound tracks of videos; by default it does if it can process sound."""


def check_media_kwargs(kwargs: MediaKwargs) -> None:
    """Raises InvalidRequest for two options that contradict each other."""
    path = "mm_processor_kwargs"
    if kwargs.num_frames is not None and kwargs.fps is not None:
        raise InvalidRequest(f"{path}: num_frames and fps exclude each other", param=f"{path}.num_frames")
    if kwargs.num_frames is not None and kwargs.max_frames is not None:
        raise InvalidRequest(f"{path}: num_frames and max_frames exclude each other", param=f"{path}.num_frames")
    if kwargs.fps is not None and kwargs.sampling not in (None, "fps"):
        raise InvalidRequest(f"{path}: fps has no part in {kwargs.sampling} sampling", param=f"{path}.fps")


def video_options(defaults: MediaOptions, kwargs: MediaKwargs | None) -> MediaOptions:
    """Returns the deployment's defaults, changed by the request's options. A number of frames implies evenly spread
    frames, and a rate implies sampling at that rate, unless the request names the sampling itself."""
    if kwargs is None:
        return defaults
    implied = "uniform" if kwargs.num_frames is not None else "fps" if kwargs.fps is not None else defaults.sampling
    return dataclasses.replace(
        defaults,
        sampling=kwargs.sampling or implied,
        fps=defaults.fps if kwargs.fps is None else kwargs.fps,
        max_frames=kwargs.num_frames or kwargs.max_frames or defaults.max_frames,
    )
