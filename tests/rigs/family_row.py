"""Defines a row of the family table, and builds from it what the suite needs: a checkpoint, both models, prompts.

The rows stand in `family_table.py`. A row holds everything that the suite has to know of a family and that neither the
family itself nor `transformers` provides.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from chat_media import picture, png
from PIL import Image

NUM_TEXT_TOKENS = 90
"""The texts of the suite's prompts consist of ids below this one; the rows place their control tokens above it."""


FILM = "film"
"""Names a video with its sound track: it is one part of a prompt and two media items."""


class Medium(NamedTuple):
    modality: str
    """Names a modality, or is FILM."""
    seed: int
    size: tuple[int, int] = (160, 96)
    """Holds width and height in pixels; a medium that is not a picture may read it differently."""


class Markup(NamedTuple):
    """Holds the token ids that a chat template writes around the one placeholder of a medium."""

    before: tuple[int, ...]
    placeholder: int
    after: tuple[int, ...]


class Processed(NamedTuple):
    """Holds what the reference's own processor computes from media, in the order of the media."""

    inputs: dict[str, Any]
    """Holds the keyword arguments for the reference's `generate`."""
    num_tokens: list[int]
    """Holds the number of placeholders per medium, as the reference's processor counts them."""
    pixels: list[np.ndarray]
    """Holds the values per medium, in the order of the family's units."""
    atol: float = 0.0
    """Limits how far values may differ. It is 0 except for spectrograms."""
    modalities: tuple[str, ...] = ()
    """Holds the modality of each medium, for rows that have several modalities."""


@dataclass(frozen=True)
class FamilyRow:
    name: str
    build: Callable[[], Any]
    """Builds a tiny random reference model from the family's own config class; the suite saves it with `files`."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Holds JSON files that are saved with the weights, e.g. `preprocessor_config.json`."""
    markup: Mapping[str, Markup] = field(default_factory=dict)
    """Holds the markup of each modality of the family, and of FILM."""
    process: Callable[[Path, Sequence[tuple[str, bytes]]], Processed] | None = None
    """Takes the checkpoint and the (modality, file) pairs of media, and returns what the reference's processor
    computes."""
    features: Callable[[Any, Processed], list[torch.Tensor]] | None = None
    """Takes the reference model and its inputs, and returns `(num_levels, num_tokens, hidden)` per medium."""
    inputs_of_ids: Callable[[torch.Tensor], dict[str, Any]] = lambda ids: {}
    """Returns keyword arguments of `generate` that follow from the token ids `(1, num_tokens)`."""
    sizes: tuple[tuple[int, int], ...] = ((160, 96), (96, 96), (70, 200))
    """Holds the sizes of the pictures in the suite's prompts. They are small, and there is one for each way in which
    the family cuts pictures."""
    kind_to_sizes: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Holds the sizes of other media, as those media read them; each kind has at least three."""

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.markup if kind != FILM)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns the modalities, and FILM if the row has it."""
        return tuple(self.markup)

    def sizes_of(self, kind: str) -> tuple[tuple[int, int], ...]:
        return self.kind_to_sizes.get(kind, self.sizes)

    def __str__(self) -> str:
        return self.name


MODALITY_TO_SAMPLE: dict[str, Callable[[Medium], bytes]] = {
    "image": lambda medium: png(picture(medium.seed, *medium.size)),
}
"""Maps a modality to the function that draws a medium of the suite. Each modality adds its own function."""


def spread(model: torch.nn.Module, std: float = 0.2, seed: int = 0) -> Any:
    """Gives the model weights so large that a wrong position, neighbour or feature changes the greedy tokens, and that
    near ties are rare. Returns the model in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std, generator=generator)
            elif "bias" in name:
                parameter.normal_(std=0.05, generator=generator)
    return model.eval()


def load_reference(directory: Path, architecture: str) -> Any:
    """Loads transformers' own model in float32, without an end token, so that every sequence gets its full length."""
    model = getattr(transformers, architecture).from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def pictures(media: Sequence[tuple[str, bytes]]) -> list[Image.Image]:
    """Returns the images among the media, decoded and in order."""
    return [Image.open(io.BytesIO(data)).convert("RGB") for modality, data in media if modality == "image"]
