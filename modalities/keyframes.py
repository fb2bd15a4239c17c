"""Finds the frames at which a video changes. Decodes the video, so it runs only in the encoders' decode processes.

The rule is that of the article on multimodal routing in Dynamo (docs/references.md): about 200 frames, in grey at
64x64, are each compared to the one before. The plan has already fixed the number of frames to choose. This module knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from modalities.family import MediaOptions, VideoHeader
from modalities.sampling import choose_keyframes, probed_frames
from modalities.video import decode_frames

_SIDE = 64


def settled_frames(
    data: bytes, header: VideoHeader, planned: Sequence[int], options: MediaOptions, param: str
) -> tuple[int, ...]:
    """Returns the planned frames, or for `keyframe` the same number of frames at which the video changes. Raises
    InvalidMedia if the file is broken."""
    if options.sampling != "keyframe":
        return tuple(planned)
    probes = probed_frames(header)
    differences: list[float] = []
    before: np.ndarray | None = None
    for pixels in decode_frames(data, probes, header, param):
        small = cv2.resize(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), (_SIDE, _SIDE)).astype(np.float64)
        differences.append(0.0 if before is None else float(np.mean(np.abs(small - before))))
        before = small
    return choose_keyframes(header, probes, differences, len(planned))
