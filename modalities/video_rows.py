"""What becomes of the rows of a video, whatever the family: some of each step, means over several steps, units. Pure.

A *step* is what an encoder makes rows of at once and by itself: a temporal patch, or a frame. So a video may be cut
into units between any two.
"""

from __future__ import annotations

from dataclasses import dataclass

from modalities.family import MediaOptions

UNIT_PATCHES = 1024
"""About a picture of 512 x 512: a unit is encoded while the next is still being decoded, and none is much larger."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """What becomes of the rows of a video's steps."""

    num_pooled: int
    """Steps in a row whose rows are averaged."""
    kept: tuple[int, ...]
    """Rows of a step that stay, ascending."""

    def num_rows(self, num_steps: int) -> int:
        return -(-num_steps // self.num_pooled) * len(self.kept)

    def geometry(self) -> tuple[int, ...]:
        """As an encoder's input carries it."""
        return (self.num_pooled, *self.kept)

    @staticmethod
    def of_geometry(geometry: tuple[int, ...]) -> StepRows:
        return StepRows(geometry[0], geometry[1:])


def step_rows(num_rows: int, options: MediaOptions) -> StepRows:
    """Of a step's rows as the encoder makes them; at least one stays."""
    num_kept = min(max(round(num_rows * options.keep_fraction), 1), num_rows)
    kept = tuple((2 * index + 1) * num_rows // (2 * num_kept) for index in range(num_kept))
    return StepRows(max(options.num_pooled_frames, 1), kept)


def unit_steps(num_steps: int, num_patches: int, num_pooled: int) -> tuple[int, ...]:
    """Steps in each unit, a step having `num_patches`; those that are averaged stay together."""
    size = max(UNIT_PATCHES // num_patches // num_pooled, 1) * num_pooled
    whole, rest = divmod(num_steps, size)
    return (size,) * whole + ((rest,) if rest else ())
