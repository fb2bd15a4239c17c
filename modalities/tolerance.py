"""How far a decoded medium may be from its planned length; what is within is padded or trimmed, what is beyond refused.

Containers with honest headers are exact. Encoders' delays, variable frame rates and broken indexes are not. Pure.
"""

from __future__ import annotations

FRAMES = 1
"""Frames of a video that may be missing at its end (the last one is repeated) or be left over (dropped)."""
AUDIO_S = 0.1
"""Seconds of sound that may be missing (silence stands in) or left over (dropped): a few windows of the mel."""
