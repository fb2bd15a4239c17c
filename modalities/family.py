"""What a model family declares: the contract between a checkpoint and the rest of Weft.

Router uses the pure half (plan, expand), encoders `preprocess` and `load_encoder`, workers `positions` and
`load_language_model`. Nothing here imports torch; the torch types appear in annotations only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """A file of sound, or the sound track of a video. Samples are counted over packets where the container's own
    number can't be trusted."""

    format: str
    sample_rate: int
    num_channels: int
    num_samples: int
    """Per channel, at `sample_rate`."""

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sample_rate


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Moving pictures in a container. Frames are counted over packets where the container's own number can't be
    trusted. Width and height are after rotation."""

    format: str
    width: int
    height: int
    num_frames: int
    seconds: float
    sound: AudioHeader | None = None
    times_s: npt.NDArray[np.float64] | None = dataclasses.field(default=None, compare=False, repr=False)
    """`(num_frames,)`: when each frame appears, counted from the first one, ascending. None where every frame is
    within half a frame of its place at the mean rate (`modalities.packets.irregular_times_s`)."""

    @property
    def fps(self) -> float:
        """Mean frames per second."""
        return self.num_frames / self.seconds


MediaHeader = ImageHeader | VideoHeader | AudioHeader


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How one item is sampled: the deployment's defaults, what its request wishes, and what the failure ladder took
    away. Part of the item's identity; travels with it as `MediaItem.options`. A family may look at less."""

    sampling: str = "fps"
    """Of a video's frames: `fps`, `uniform` or `keyframe`."""
    fps: float = 2.0
    """Frames looked at per second, for `fps`."""
    max_frames: int = 32
    max_tokens: int = 8192
    """Most visual tokens of one video: its frames are thinned out until it fits."""
    num_pooled_frames: int = 1
    """Rows of so many temporal patches in a row are averaged into one (a shorter rest, into one too); 1 is off."""
    keep_fraction: float = 1.0
    """Of the rows of each temporal patch, so many are kept, evenly spread; 1 keeps all."""
    reduction: int = 0
    """How often the item was halved: every other frame of a video, half the side of an image. A sound has none."""
    max_pixels: int = 0
    """Of an image: most pixels that the model looks at, down to the smallest form that it takes; 0 leaves it to the
    model's own limit."""

    def encode(self) -> str:
        """Canonical JSON; empty for the defaults."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return json.dumps(changed, sort_keys=True, separators=(",", ":")) if changed else ""

    @staticmethod
    def decode(text: str) -> MediaOptions:
        """Inverse of `encode`."""
        return MediaOptions(**json.loads(text)) if text else DEFAULT_OPTIONS


DEFAULT_OPTIONS = MediaOptions()


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
    """Decoded size (width, height; of a video also its frames, of a sound its rate and samples), part of the
    content's identity."""
    frame_times_s: tuple[float, ...] = ()
    """Of a video: when each temporal patch is seen, for families that write the time into the prompt."""
    row_seconds: float = 0.0
    """As in `MediaItem`."""
    anchor: int = -1
    """As in `MediaItem`; set by whoever plans a video together with its sound track."""
    num_pooled_frames: int = 1
    """Of a video: temporal patches behind each row."""
    num_levels: int = 0
    """As in `MediaItem`: 1 for a medium without DeepStack levels in a model that has some, 0 otherwise."""


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
    `(num_tiles, channels, height, width)` where the family's encoder takes those, or of a sound its log-mel
    spectrogram `(num_mel_frames, num_mel_bins)`."""

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
    """1 + the number of DeepStack levels: a feature is `(num_levels, num_tokens, hidden_size)`, unless its item has
    fewer levels (`MediaItem.num_levels`)."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int


class EncoderModel(Protocol):
    """An encoder with weights on a device; only the modalities that were asked for are loaded."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """One forward over units of one modality, packed. Returns per unit `(num_levels, num_tokens, hidden)`, levels
        as planned, in the model's dtype, contiguous, on the encoder's device."""
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
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step over packed tokens of many sequences -> last hidden states `(num_tokens, hidden)`, or with
        `wanted_rows` (int64, ascending, not empty) those of these tokens alone: `(len(wanted_rows), hidden)`. The keys
        and values of all tokens are written either way.

        `embeddings` `(num_tokens, hidden)`, level 0 of the features already spliced in. `positions`
        `(num_axes, num_tokens)`. `attention` is handed through to the registered attention function as the keyword
        `weft`, or asked by the layers themselves: `attend(layer, q, k, v, scaling)`, all `(num_tokens, heads, dim)`.
        `feature_rows`: int64 indexes of the tokens that have DeepStack levels, ascending; `feature_levels`
        `(num_levels - 1, len(feature_rows), hidden)`: these levels."""
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

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        """From the header alone. A video's sound track is planned as a sound of its own. Raises InvalidMedia (e.g. an
        aspect ratio that the model refuses, a video of no frames)."""
        ...

    def placeholder_text(self, modality: str) -> str:
        """What the chat template writes for one item, e.g. `<|image_pad|>`; one token."""
        ...

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> ExpandedPrompt:
        """Replaces each placeholder token by as many as its plan counts. Plans with an anchor have no placeholder:
        they are woven into the one of the video that they belong to. `tokenize` is for families that write text
        between frames (they raise ConfigError without it). Raises InvalidRequest on another number of placeholders
        than plans."""
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
        """Encoded file -> the units of `item`, sampled by `item.options`. Decodes; `item` of modality `audio` with a
        video's file means its sound track. Raises InvalidMedia for a broken file or one that is not what its header
        promised (beyond the tolerance of `modalities.tolerance`, within which it is padded or trimmed)."""
        ...

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        """Raises ConfigError if a weight is missing."""
        ...

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """`attention_name` is registered with transformers beforehand. Raises ConfigError if a weight is missing."""
        ...
