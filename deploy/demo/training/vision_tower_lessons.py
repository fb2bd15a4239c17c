"""Trains the vision tower alone, before the language model: a temporary head learns to name what each cell of a picture
or a clip shows, and is discarded afterwards.

`VisionTowerTrainer` holds the tower and the head, `VisionBatches` draws pictures and clips, and `cell_labels` computes
what each feature should say: labels per merged cell of patches, such as a figure's shape, its colour, and where it
stands. An answer at the end of a conversation says one word about a whole picture, but these labels say up to eight
things about each of its cells. After this training each feature of the tower says what stands in its cell, so the
language model has only to learn to read the features.

The module knows no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from deploy.demo.drawing import clips, scenes
from deploy.demo.drawing.figures import COLOURS, SHAPES, Figure, Rng
from deploy.demo.training.batches import vision_inputs
from deploy.demo.training.encoding import Floats, Grid, SampleEncoder, sampled_frames

SHAPE_WEIGHT = 4.0


@dataclass(slots=True)
class VisionBatch:
    inputs: dict[str, Any]
    labels: torch.Tensor
    """Gives the label of each kind for each feature. Has shape `(num_features, num_kinds_of_label)`, int64."""


class VisionTowerTrainer(nn.Module):
    """Holds the vision tower and the temporary head, which is discarded after training."""

    def __init__(self, tower: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(hidden_size, sum(NAME_TO_NUM_CLASSES.values()))

    def losses(self, seen: VisionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns for each kind of label the loss, and the share of cells that the head classifies correctly."""
        features = self.tower(**seen.inputs, return_dict=True).pooler_output
        losses, rights = [], []
        for index, logits in enumerate(self.head(features).split(list(NAME_TO_NUM_CLASSES.values()), dim=1)):
            said = seen.labels[:, index] != UNSAID
            labels = seen.labels[said, index]
            losses.append(cross_entropy(logits[said], labels) if len(labels) else logits.sum() * 0)
            rights.append((logits[said].argmax(1) == labels).float().mean() if len(labels) else torch.tensor(1.0))
        return torch.stack(losses), torch.stack(rights)

    def judge(self, seen: VisionBatch) -> tuple[torch.Tensor, float]:
        """Returns the weighted loss of a step and the share of correct predictions, over all kinds of label."""
        losses, rights = self.losses(seen)
        return losses.sum() + (SHAPE_WEIGHT - 1) * losses[0], float(rights.mean())


# ------------------------------------------------------------ pictures and clips

SCENES = (scenes.one_figure, scenes.two_figures, scenes.several_figures, scenes.placed_figure, scenes.sized_figure)
STORIES = (clips.moving, clips.changing, clips.appearing, clips.several)
SCALE_SHARES = (0.7, 0.2, 0.1)
Draw = Callable[[Rng, tuple[int, int]], scenes.Scene]


class Mix(NamedTuple):
    """Says how often each kind of picture or clip is drawn."""

    scene_shares: tuple[float, ...]
    """Gives the share of each of `SCENES`."""
    clip_share: float
    easy_part: float = 0.0
    """Gives the share of steps, at the beginning, that show one figure each."""


EVERYTHING = Mix((0.3, 0.25, 0.25, 0.1, 0.1), clip_share=0.12, easy_part=0.25)
CROWDED = Mix((0.05, 0.15, 0.8, 0.0, 0.0), clip_share=0.2)
"""This mix has many figures, which the tower learns to distinguish and to count."""


class VisionBatches(Dataset[VisionBatch]):
    """Draws the pictures and clips of each step from the random stream of (key, step)."""

    def __init__(
        self, num_steps: int, batch_size: int, key: tuple[int, ...], model_dir: Path, mix: Mix = EVERYTHING
    ) -> None:
        self._num_steps = num_steps
        self._batch_size = batch_size
        self._key = key
        self._model_dir = model_dir
        self._mix = mix
        self._encoder: SampleEncoder | None = None

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> VisionBatch:
        self._encoder = self._encoder or SampleEncoder(self._model_dir)
        rng = np.random.default_rng((*self._key, 101, step))
        shown: list[tuple[Floats, Grid]] = []
        labels: list[Ints] = []
        for _ in range(self._batch_size):
            # Single figures come first, because the tower learns shapes last of all, and fastest where there is nothing
            # else.
            is_easy = step < self._num_steps * self._mix.easy_part
            scale = int(rng.choice(3, p=SCALE_SHARES))
            if not is_easy and rng.random() < self._mix.clip_share:
                patches, grid, cells = _clip(rng, self._encoder)
            else:
                draw = scenes.one_figure if is_easy else SCENES[int(rng.choice(len(SCENES), p=self._mix.scene_shares))]
                patches, grid, cells = _picture(rng, self._encoder, draw, scale)
            shown.append((patches, grid))
            labels.append(cells)
        return VisionBatch(vision_inputs(shown), torch.from_numpy(np.concatenate(labels)))


def _picture(rng: Rng, encoder: SampleEncoder, draw: Draw, scale: int) -> tuple[Floats, Grid, Ints]:
    height, width = scenes.picture_size(rng, scale)
    scene = draw(rng, (height, width))
    patches, grid = encoder.picture(scene.picture.pixels)
    return patches, grid, cell_labels(scene.figures, height, width, grid[1] // 2, grid[2] // 2)


def _clip(rng: Rng, encoder: SampleEncoder) -> tuple[Floats, Grid, Ints]:
    story = STORIES[int(rng.integers(len(STORIES)))](rng)
    clip = clips.film(rng, story, 2.0)
    patches, grid = encoder.clip(clip)
    moments = clips.moments(2.0, len(clip.frames))
    frames: list[list[Figure]] = [story.figures(moments[at]) for at in sampled_frames(len(clip.frames), clip.fps)]
    cells = [
        cell_labels(now, story.height, story.width, grid[1] // 2, grid[2] // 2, before)
        for before, now in zip(frames[::2], frames[1::2], strict=True)
    ]
    return patches, grid, np.concatenate(cells)


# ------------------------------------------------------------ labels

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
