"""`mm_processor_kwargs`: how a request wants its media sampled. Names are transformers' and vLLM's.

Checks shape and range; what the deployment's defaults are, and what a medium becomes, is the intake's.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fabric.errors import InvalidRequest
from modalities.family import MediaOptions

Sampling = Literal["fps", "uniform", "keyframe"]
MAX_FRAMES = 16_384
"""A bound on work per item; the token budget thins frames out long before."""


class MediaKwargs(BaseModel):
    """Of all videos of a request. Unknown keys would change the answer if they were honoured: refused, not ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    fps: float | None = Field(None, gt=0, le=240)
    num_frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    """So many frames, evenly spread over the video; fewer if the video or the model's own limit has not so many, or the
    budget is spent, and a multiple of what the model looks at together."""
    max_frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    sampling: Sampling | None = None
    use_audio_in_video: bool | None = None
    """Whether the model hears the sound tracks of videos; by default it does if it can."""


def check_media_kwargs(kwargs: MediaKwargs) -> None:
    """Raises InvalidRequest for two wishes that contradict each other."""
    path = "mm_processor_kwargs"
    if kwargs.num_frames is not None and kwargs.fps is not None:
        raise InvalidRequest(f"{path}: num_frames and fps exclude each other", param=f"{path}.num_frames")
    if kwargs.num_frames is not None and kwargs.max_frames is not None:
        raise InvalidRequest(f"{path}: num_frames and max_frames exclude each other", param=f"{path}.num_frames")
    if kwargs.fps is not None and kwargs.sampling not in (None, "fps"):
        raise InvalidRequest(f"{path}: fps has no part in {kwargs.sampling} sampling", param=f"{path}.fps")


def video_options(defaults: MediaOptions, kwargs: MediaKwargs | None) -> MediaOptions:
    """The deployment's defaults with the request's wishes. A number of frames means evenly spread ones, a rate means
    that rate, unless the request names the sampling itself."""
    if kwargs is None:
        return defaults
    implied = "uniform" if kwargs.num_frames is not None else "fps" if kwargs.fps is not None else defaults.sampling
    return dataclasses.replace(
        defaults,
        sampling=kwargs.sampling or implied,
        fps=defaults.fps if kwargs.fps is None else kwargs.fps,
        max_frames=kwargs.num_frames or kwargs.max_frames or defaults.max_frames,
    )
