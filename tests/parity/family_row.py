"""What a row of the family table says, and what the suite makes of it: a checkpoint, both models, prompts.

Rows stand in `family_table.py`. A row is everything the suite has to know of a family that the family itself, and
`transformers`, do not say.
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
"""Text of the suite's prompts is made of the ids below; rows keep their control tokens above."""


FILM = "film"
"""A video with its sound track: one part of a prompt, two media items."""


class Medium(NamedTuple):
    modality: str
    """Or FILM."""
    seed: int
    size: tuple[int, int] = (160, 96)
    """Width and height in pixels; what is not a picture may read it otherwise."""


class Markup(NamedTuple):
    """Token ids that a chat template writes around the one placeholder of a medium."""

    before: tuple[int, ...]
    placeholder: int
    after: tuple[int, ...]


class Processed(NamedTuple):
    """What the reference's own processor makes of media, in order."""

    inputs: dict[str, Any]
    """Keywords of the reference's `generate`."""
    num_tokens: list[int]
    """Placeholders per medium, as the reference's processor counts them."""
    pixels: list[np.ndarray]
    """Values per medium, in the order of the family's units."""
    atol: float = 0.0
    """How far values may be off: not at all, but for spectrograms."""
    modalities: tuple[str, ...] = ()
    """Of the media, where a row has several."""


@dataclass(frozen=True)
class FamilyRow:
    name: str
    build: Callable[[], Any]
    """A tiny random reference model from the family's own config class; the suite saves it with `files`."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """JSON files beside the weights, e.g. `preprocessor_config.json`."""
    markup: Mapping[str, Markup] = field(default_factory=dict)
    """Modalities of the family, FILM besides."""
    process: Callable[[Path, Sequence[tuple[str, bytes]]], Processed] | None = None
    """Checkpoint and (modality, file) of media -> what the reference's processor makes of them."""
    features: Callable[[Any, Processed], list[torch.Tensor]] | None = None
    """Reference model and its inputs -> per medium `(num_levels, num_tokens, hidden)`."""
    inputs_of_ids: Callable[[torch.Tensor], dict[str, Any]] = lambda ids: {}
    """Keywords of `generate` that follow from the token ids `(1, num_tokens)`."""
    sizes: tuple[tuple[int, int], ...] = ((160, 96), (96, 96), (70, 200))
    """Of the pictures in the suite's prompts: small ones, and one for each way in which the family cuts them."""
    kind_to_sizes: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Of other media, as they read them; three at least."""

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.markup if kind != FILM)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Modalities, and FILM."""
        return tuple(self.markup)

    def sizes_of(self, kind: str) -> tuple[tuple[int, int], ...]:
        return self.kind_to_sizes.get(kind, self.sizes)

    def __str__(self) -> str:
        return self.name


MODALITY_TO_SAMPLE: dict[str, Callable[[Medium], bytes]] = {
    "image": lambda medium: png(picture(medium.seed, *medium.size)),
}
"""How a medium of the suite is drawn; a modality adds its own."""


def spread(model: torch.nn.Module, std: float = 0.2, seed: int = 0) -> Any:
    """Weights so large that a wrong position, neighbour or feature changes the greedy tokens, and so seldom a near
    tie. Returns the model, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std, generator=generator)
            elif "bias" in name:
                parameter.normal_(std=0.05, generator=generator)
    return model.eval()


def load_reference(directory: Path, architecture: str) -> Any:
    """transformers' own model, float32, without an end token: every sequence gets its full length."""
    model = getattr(transformers, architecture).from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def pictures(media: Sequence[tuple[str, bytes]]) -> list[Image.Image]:
    """The images among media, decoded, in order."""
    return [Image.open(io.BytesIO(data)).convert("RGB") for modality, data in media if modality == "image"]
