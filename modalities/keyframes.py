"""Finding the frames at which a video changes: decodes it, in the encoders' decode processes alone.

The rule is seed 003's: about 200 frames, grey, 64x64, compared one to the next. How many frames are chosen was fixed
by the plan.
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
    """The planned frames themselves, or for `keyframe` as many others. Raises InvalidMedia for a broken file."""
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
