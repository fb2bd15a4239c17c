"""What a model family declares: the contract between a checkpoint and the rest of Weft.

Router uses the pure half (plan, expand), encoders `preprocess` and `load_encoder`, workers `positions` and
`load_language_model`. Nothing here imports torch; the torch types appear in annotations only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric.messages import MediaItem, PlaceholderRange

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the first bytes of an image say, without decoding it. Width and height are after EXIF rotation."""

    format: str
    width: int
    height: int
    mode: str


MediaHeader = ImageHeader
"""Grows by VideoHeader and AudioHeader with their plugins."""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What a medium will become, known before it is decoded. A contract that the encoder keeps exactly."""

    modality: str
    grid: tuple[int, int, int]
    """Patches (t, h, w) before merging."""
    unit_tokens: tuple[int, ...]
    cost: int
    """Patches to encode."""
    geometry: tuple[int, ...]
    """Decoded size (width, height), part of the content's identity."""


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    token_ids: list[int]
    """One per position, placeholders repeated."""
    placeholders: tuple[PlaceholderRange, ...]


@dataclass(frozen=True, slots=True)
class Positions:
    """Rotary positions of the whole prompt: int64 `(num_axes, num_tokens)`, num_axes 3 for M-RoPE, else 1.
    The position of generated token at index i is `i + delta` on every axis."""

    ids: npt.NDArray[np.int64]
    delta: int


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One unit, ready for the forward. `pixels` is float32 `(num_patches, patch_dim)`, or whole tiles
    `(num_tiles, channels, height, width)` where the family's encoder takes those."""

    modality: str
    pixels: npt.NDArray[np.float32]
    grid: tuple[int, int, int]
    patches_per_row: int = 1
    """Patches in each row of `pixels`: those of a tile, where rows are tiles."""
    geometry: tuple[int, ...] = ()
    """As in `ItemPlan`, where the encoder needs it."""

    @property
    def num_patches(self) -> int:
        """To encode: the item's cost, over its units."""
        return len(self.pixels) * self.patches_per_row


class ModelShape(NamedTuple):
    """The few numbers from which memory is planned."""

    hidden_size: int
    num_levels: int
    """1 + the number of DeepStack levels: a feature is `(num_levels, num_tokens, hidden_size)`."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int


class EncoderModel(Protocol):
    """An encoder with weights on a device; only the modalities that were asked for are loaded."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """One forward over units of one modality, packed. Returns per unit `(num_levels, num_tokens, hidden)`
        in the model's dtype, contiguous, on the encoder's device."""
        ...


class LanguageModel(Protocol):
    """The text half of a model on a device, its attention going through Weft's paged attention."""

    dtype: torch.dtype
    device: torch.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 `(num_tokens,)` -> `(num_tokens, hidden)`."""
        ...

    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        feature_rows: torch.Tensor | None,
        feature_levels: torch.Tensor | None,
    ) -> torch.Tensor:
        """One step over packed tokens of many sequences -> last hidden states `(num_tokens, hidden)`.

        `embeddings` `(num_tokens, hidden)`, level 0 of the features already spliced in. `positions`
        `(num_axes, num_tokens)`. `attention` is handed through to the registered attention function as the keyword
        `weft`. `feature_rows`: int64 indexes of visual positions among the tokens, ascending;
        `feature_levels` `(num_levels - 1, len(feature_rows), hidden)`: the DeepStack levels at these rows."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(n, hidden)` -> float32 `(n, vocab)`."""
        ...


class Family(Protocol):
    """One instance per model directory. Construction reads config files only."""

    name: str
    model_id: str
    """Name and digest of the checkpoint's config: the namespace of media hashes."""
    shape: ModelShape
    max_items: Mapping[str, int]
    """Supported modalities -> most items per prompt."""

    def plan(self, header: MediaHeader) -> ItemPlan:
        """From the header alone. Raises InvalidMedia (e.g. an aspect ratio that the model refuses)."""
        ...

    def placeholder_text(self, modality: str) -> str:
        """What the chat template writes for one item, e.g. `<|image_pad|>`; one token."""
        ...

    def expand(self, token_ids: Sequence[int], plans: Sequence[ItemPlan]) -> ExpandedPrompt:
        """Replaces the i-th placeholder token by as many as plan i counts. Raises InvalidRequest on another number
        of placeholders than plans."""
        ...

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        """Of the expanded prompt; from grids, never from pixels."""
        ...

    def options(self, modality: str) -> str:
        """Canonical JSON of the processing options: part of the content's identity."""
        ...

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        """Encoded file -> the units of `item`. Decodes. Raises InvalidMedia for a broken file or one that is not
        what its header promised."""
        ...

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        """Raises ConfigError if a weight is missing."""
        ...

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """`attention_name` is registered with transformers beforehand. Raises ConfigError if a weight is missing."""
        ...
