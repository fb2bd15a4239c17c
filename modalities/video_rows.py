"""Defines which feature rows of a video remain, for all families: it keeps some rows of each step, averages them over
several steps, and divides steps into units. This module is pure, and knows nothing of tensors.

A *step* is a temporal patch or a frame: the rows that an encoder makes at once and independently of other steps. So a
video may be cut into units (the parts that are encoded on their own) between any two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from modalities.family import MediaOptions

UNIT_PATCHES = 1024
"""Limits the patches of a unit, approximately: it is about a picture of 512 x 512. A unit is encoded while the next is
still being decoded, and no unit is much larger than this."""


@dataclass(frozen=True, slots=True)
class VideoRows:
    """Says which rows of a video's steps remain and how many steps are averaged."""

    num_pooled: int
    """Counts the consecutive steps whose rows are averaged."""
    kept: tuple[int, ...]
    """Lists the rows of a step that are kept, in ascending order."""

    def num_rows(self, num_steps: int) -> int:
        return -(-num_steps // self.num_pooled) * len(self.kept)

    def geometry(self) -> tuple[int, ...]:
        """Returns the numbers in the form in which an encoder's input carries them."""
        return (self.num_pooled, *self.kept)

    @staticmethod
    def of_geometry(geometry: tuple[int, ...]) -> VideoRows:
        return VideoRows(geometry[0], geometry[1:])


def step_rows(num_rows: int, options: MediaOptions) -> VideoRows:
    """Returns which rows of a step are kept, out of the `num_rows` rows that the encoder makes; at least one row is
    kept."""
    num_kept = min(max(round(num_rows * options.keep_fraction), 1), num_rows)
    kept = tuple((2 * index + 1) * num_rows // (2 * num_kept) for index in range(num_kept))
    return VideoRows(max(options.num_pooled_frames, 1), kept)


def unit_steps(num_steps: int, num_patches: int, num_pooled: int) -> tuple[int, ...]:
    """Returns the number of steps in each unit, where a step has `num_patches` patches. Steps that are averaged stay
    together."""
    size = max(UNIT_PATCHES // num_patches // num_pooled, 1) * num_pooled
    whole, rest = divmod(num_steps, size)
    return (size,) * whole + ((rest,) if rest else ())
