"""Computes what each feature of a picture should say: labels per merged cell of patches. It knows no model and no text.

The labels train the vision tower alone, before the language model: a figure's shape, its colour, where it stands. An
answer at the end of a conversation says one word about a whole picture, but these labels say up to eight things about
each of its cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from deploy.demo.drawing import COLOURS, SHAPES, Figure

UNSAID = -100
"""A cell has this label where there is nothing to say about it."""
NAME_TO_NUM_CLASSES: Mapping[str, int] = {
    "shape": len(SHAPES),
    "colour": len(COLOURS) + 1,
    "centres": 5,
    "total": 6,
    "row": 3,
    "column": 3,
    "size": 2,
    "motion": 5,
}
"""Maps each kind of label to its number of classes. The last class of colour is that of the background. `centres`
counts the figures whose centre lies in the cell, and `total` counts the figures in the whole picture. `row` and
`column` are thirds of the picture. `motion` is left, right, up, down or none."""
SMALL, LARGE = 0.19, 0.33
"""A figure is small if its radius, divided by the shorter side of the picture, is at most `SMALL`, and large if it is
at least `LARGE`."""
_POINTS = (np.arange(4) + 0.5) / 4
_LEAST_SHARE = 0.5

Ints = npt.NDArray[np.int64]


def cell_labels(
    figures: Sequence[Figure], height: int, width: int, rows: int, columns: int, before: Sequence[Figure] | None = None
) -> Ints:
    """Returns the labels of a picture of `height` x `width` pixels, cells in row-major order. Has shape `(rows *
    columns, len(NAME_TO_NUM_CLASSES))`. `before` holds the same figures, in the same order, as they stood in the
    previous frame."""
    labels = np.full((rows, columns, len(NAME_TO_NUM_CLASSES)), UNSAID, np.int64)
    shares = _shares(figures, height, width, rows, columns)
    covering = shares.max(0, initial=0.0)
    is_ground = covering == 0
    labels[is_ground, 1] = len(COLOURS)
    labels[:, :, 2], labels[:, :, 3] = 0, len(figures)
    for index, figure in enumerate(figures):
        row, column = _cell(figure, height, width, rows, columns)
        labels[row, column, 2] += 1
        is_its = (shares[index] >= _LEAST_SHARE) & (shares[index] >= covering)
        is_its |= shares[index] == shares[index].max()
        own = (SHAPES.index(figure.shape), COLOURS.index(figure.colour))
        size = figure.radius / min(height, width)
        thirds = (int(3 * figure.y / height), int(3 * figure.x / width))
        labels[is_its, 0], labels[is_its, 1] = own
        labels[is_its, 4], labels[is_its, 5] = thirds
        if not SMALL < size < LARGE:
            labels[is_its, 6] = int(size >= LARGE)
        if before is not None and index < len(before):
            labels[is_its, 7] = _motion(before[index], figure)
    np.minimum(labels[:, :, 2], 4, out=labels[:, :, 2])
    return labels.reshape(rows * columns, -1)


def _shares(figures: Sequence[Figure], height: int, width: int, rows: int, columns: int) -> npt.NDArray[np.float64]:
    """Returns which share of each cell lies in each figure's circle. Has shape `(num_figures, rows, columns)`."""
    y = ((np.arange(rows)[:, None] + _POINTS) / rows * height)[None, :, None, :, None]
    x = ((np.arange(columns)[:, None] + _POINTS) / columns * width)[None, None, :, None, :]
    centre_y, centre_x, radius = (
        np.array([getattr(f, name) for f in figures]).reshape(-1, 1, 1, 1, 1) for name in ("y", "x", "radius")
    )
    shares: npt.NDArray[np.float64] = ((x - centre_x) ** 2 + (y - centre_y) ** 2 < radius**2).mean((3, 4))
    return shares


def _cell(figure: Figure, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    return int(figure.y / height * rows), int(figure.x / width * columns)


def _motion(before: Figure, now: Figure) -> int:
    across, down = now.x - before.x, now.y - before.y
    if max(abs(across), abs(down)) < 0.3 * now.radius:
        return 4
    return int(across > 0) if abs(across) > abs(down) else 2 + int(down > 0)
