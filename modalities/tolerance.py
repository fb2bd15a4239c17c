"""Defines how far a decoded medium may be from its planned length. A medium within the tolerance is padded or trimmed,
and one beyond it is refused.

Containers with correct headers are exact, but encoders' delays, variable frame rates and broken indexes are not. This
module is pure: it knows nothing of formats.
"""

from __future__ import annotations

FRAMES = 1
"""Limits the frames of a video that may be missing at its end (the last one is repeated) or be left over (they are
dropped)."""
AUDIO_S = 0.1
"""Limits the seconds of sound that may be missing (silence replaces them) or left over (they are dropped). It equals a
few windows of the mel spectrogram."""
