"""Defines the interface of a model family, which is the contract between a checkpoint and the rest of Weft, and what
all families share.

The values come first: what a file says about a medium, how the medium is sampled, and what it becomes. `Family` uses
them: the router calls its pure half (`plan`, `expand`), encoders call `preprocess` and `load_encoder`, and workers call
`positions` and `load_language_model`. The loaders return an `EncoderModel` and a `LanguageModel`.

A family may offer some things in addition. With `StreamsUnits` it yields units (the parts of an item that are encoded
on their own) one by one, so the first part of a long video is encoded while the rest is still being decoded. With
`HasLeastPixels` it scales small pictures up, and with `TakesFeatures` it takes features in place of a picture. With
`MelOnDevice` an encoder's device makes the spectrograms of its sounds; without it, the process that decodes a sound
also makes its spectrogram.

The functions at the end expand the placeholders of a prompt to one position for each row of features, with tokens
between the rows where a family writes some.

This module is pure. It does not import torch, whose types appear in annotations only, and it knows nothing of a
particular model, of a file format or of text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fabric.contracts import InvalidRequest, MediaItem, PlaceholderRange, UnsupportedModality

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance


# ------------------------------------------------------------ what a medium is


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Holds what the first bytes of an image say without decoding it. Width and height are those after EXIF
    rotation."""

    format: str
    width: int
    height: int
    mode: str


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """Describes an audio file or the sound track of a video. Samples are counted over packets where the container's own
    number can't be trusted."""

    format: str
    sample_rate: int
    num_channels: int
    num_samples: int
    """Counts the samples of each channel at `sample_rate`."""

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sample_rate


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Describes the pictures of a video file. Frames are counted over packets where the container's own number can't be
    trusted. Width and height are those after rotation."""

    format: str
    width: int
    height: int
    num_frames: int
    seconds: float
    sound: AudioHeader | None = None
    times_s: npt.NDArray[np.float64] | None = dataclasses.field(default=None, compare=False, repr=False)
    """Holds the time at which each frame appears, counted from the first frame, in ascending order. Has shape
    `(num_frames,)`. It is None if every frame is within half a frame of its place at the mean rate
    (`modalities.media.containers.irregular_times_s`)."""

    @property
    def fps(self) -> float:
        """Returns the mean number of frames per second."""
        return self.num_frames / self.seconds


MediaHeader = ImageHeader | VideoHeader | AudioHeader


@dataclass(frozen=True, slots=True)
class FeaturesHeader:
    """Describes the features of a picture that a client has computed itself (`image_embeds`)."""

    num_tokens: int
    grid: tuple[int, int, int] | None = None
    """Counts the patches (t, h, w) of the picture before merging, if the client states them (`image_grid_thw`)."""
    size: tuple[int, int] | None = None
    """Holds the width and height of the picture, if the client states them (`image_sizes`)."""


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Holds how one item (one medium of a request) is sampled: the deployment's defaults, the request's wishes, and the
    reductions that a retry after a failure (the degradation policy) makes. The options are a part of the item's
    identity and travel with it as `MediaItem.options`. A family may use only some of them."""

    sampling: str = "fps"
    """Names the way to choose a video's frames: `fps`, `uniform` or `keyframe`."""
    fps: float = 2.0
    """Gives the number of frames per second that are sampled, for `fps`."""
    max_frames: int = 32
    max_tokens: int = 8192
    """Limits the visual tokens of one video: frames are left out until the video fits."""
    num_pooled_frames: int = 1
    """Counts the consecutive temporal patches whose rows are averaged into one; a shorter group at the end is averaged
    too. 1 switches this off."""
    keep_fraction: float = 1.0
    """Gives the share of the rows of each temporal patch that is kept, evenly spread; 1 keeps all."""
    reduction: int = 0
    """Counts how often the item was halved. Each halving leaves half of a video's frames, or half the length of an
    image's sides. A sound is never reduced."""
    max_pixels: int = 0
    """Limits the pixels of an image that the model sees, down to the smallest form that the model takes; 0 leaves the
    limit to the model."""
    min_pixels: int = 0
    """Asks for at least so many pixels of an image, so that a smaller one is scaled up, within what the model takes; 0
    leaves this to the model. Only a family with `HasLeastPixels` follows it."""

    def encode(self) -> str:
        """Returns canonical JSON, or an empty string for the defaults."""
        if self == DEFAULT_OPTIONS:
            return ""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return json.dumps(changed, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> MediaOptions:
        """Returns the options that `encode` has written as `text`."""
        return MediaOptions(**json.loads(text)) if text else DEFAULT_OPTIONS


DEFAULT_OPTIONS = MediaOptions()


@functools.lru_cache(maxsize=256)
def canonical_options(options: DataclassInstance) -> str:
    """Returns canonical JSON of a frozen dataclass of processing options, as `Family.options` does. It keeps the text
    of each, because every item of every request asks for it."""
    return json.dumps(dataclasses.asdict(options), sort_keys=True, separators=(",", ":"))


# ------------------------------------------------------------ what a medium becomes


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Holds what a medium becomes, as known before it is decoded. The encoder's output matches it exactly."""

    modality: str
    grid: tuple[int, int, int]
    """Counts the patches (t, h, w) before merging."""
    unit_tokens: tuple[int, ...]
    cost: int
    """Counts the patches to encode."""
    geometry: tuple[int, ...]
    """Holds the decoded size: width and height, for a video also its number of frames, and for a sound its rate and
    number of samples. It is a part of the content's identity."""
    frame_times_s: tuple[float, ...] = ()
    """Holds the time at which each temporal patch of a video is seen, for families that write the time into the
    prompt."""
    row_seconds: float = 0.0
    """Holds the seconds between two temporal patches of a video, where positions depend on it, as in `MediaItem`."""
    anchor: int = -1
    """Holds, for the sound track of a video, the index of the video, as in `MediaItem`; -1 for other media. The code
    that plans a video together with its sound track sets it."""
    num_pooled_frames: int = 1
    """Counts the temporal patches of a video that are averaged into each row."""
    num_levels: int = 0
    """Has the same meaning as in `MediaItem`: it is 1 for a medium without DeepStack levels in a model that has some,
    and 0 otherwise."""


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    token_ids: list[int]
    """Holds one token for each position; placeholders are repeated."""
    placeholders: tuple[PlaceholderRange, ...]


@dataclass(frozen=True, slots=True)
class Positions:
    """Holds the rotary positions of the whole prompt: int64 `(num_axes, num_tokens)`, where num_axes is 3 for M-RoPE
    and 1 otherwise. The position of the generated token at index i is `i + delta` on every axis."""

    ids: npt.NDArray[np.int64]
    delta: int


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """Holds one unit (the smallest part of an item that is encoded on its own), ready for the encoder's forward pass.
    `pixels` is float32 and has one of three shapes: `(num_patches, patch_dim)`, whole tiles
    `(num_tiles, channels, height, width)` where the family's encoder takes tiles, or `(num_mel_frames, num_mel_bins)`
    for the log-mel spectrogram of a sound."""

    modality: str
    pixels: npt.NDArray[np.float32]
    grid: tuple[int, int, int]
    patches_per_row: int = 1
    """Counts the patches in each row of `pixels`: it is the number of patches of a tile where rows are tiles."""
    geometry: tuple[int, ...] = ()
    """Has the same meaning as in `ItemPlan`; it is set where the encoder needs it."""
    features: npt.NDArray[np.uint8] | None = None
    """Holds the bytes of the unit's feature if a client has sent them. `pixels` is then empty, and the unit needs no
    forward pass."""

    @property
    def num_patches(self) -> int:
        """Returns the number of patches to encode. Its sum over an item's units is the item's cost."""
        return len(self.pixels) * self.patches_per_row


# ------------------------------------------------------------ the family and its models


class ModelShape(NamedTuple):
    """Holds the few numbers from which memory is planned."""

    hidden_size: int
    num_levels: int
    """This is 1 + the number of DeepStack levels. A feature has shape `(num_levels, num_tokens, hidden_size)`, unless
    its item has fewer levels (`MediaItem.num_levels`)."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int


class Tokenize(Protocol):
    """A `Tokenize` returns the tokens of a text that a family writes into a prompt."""

    def __call__(self, text: str, behind: int | None = None) -> Sequence[int]:
        """Returns the tokens of a text that stands behind the control token `behind`, or else behind other text: some
        tokenizers begin a text behind a control token in another way."""
        ...


class Family(Protocol):
    """A `Family` plans, preprocesses and loads one model. There is one instance for each model directory. Its
    construction reads config files only."""

    name: str
    model_id: str
    """Holds the name of the checkpoint and the digest of its config. It is the namespace of media hashes."""
    shape: ModelShape
    max_items: Mapping[str, int]
    """Maps each supported modality to the highest number of items in a prompt."""

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        """Returns the plan of a medium, which follows from its header alone. A video's sound track is planned as a
        sound of its own. Raises InvalidMedia if the model refuses the medium (e.g. because of its aspect ratio, or
        because a video has no frames)."""
        ...

    def placeholder_text(self, modality: str) -> str:
        """Returns the text that the chat template writes for one item, e.g. `<|image_pad|>`. It is one token."""
        ...

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Tokenize | None = None,
    ) -> ExpandedPrompt:
        """Replaces each placeholder token by as many tokens as its plan counts. A plan with an anchor has no
        placeholder: its tokens are interleaved with those of the video to which it belongs. `tokenize` is for families
        that write text between frames; they raise ConfigError without it. Raises InvalidRequest if the number of
        placeholders differs from the number of plans without an anchor."""
        ...

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        """Returns the positions of the expanded prompt. They follow from the grids of the media, never from pixels."""
        ...

    def options(self, modality: str) -> str:
        """Returns the processing options of a modality as canonical JSON. They are a part of the content's identity."""
        ...

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        """Decodes an encoded file and returns the units of `item`, sampled by `item.options`. If `item` has the
        modality `audio` and `data` is a video file, its sound track is decoded. Raises InvalidMedia if the file is
        broken, or if it differs from its header by more than the tolerance of `modalities.media.plugin`. Within the
        tolerance, it is padded or trimmed."""
        ...

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        """Loads the encoder for `modalities`. Raises ConfigError if a weight is missing."""
        ...

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """Loads the language model. `attention_name` must be registered with transformers beforehand. Raises
        ConfigError if a weight is missing."""
        ...


class EncoderModel(Protocol):
    """An `EncoderModel` is an encoder with weights on a device. It has the weights of the requested modalities only."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Runs one forward pass over packed units of one modality. Returns for each unit its feature of shape
        `(num_levels, num_tokens, hidden)`, with as many levels as planned, in the model's dtype, contiguous, on the
        encoder's device."""
        ...


class LanguageModel(Protocol):
    """A `LanguageModel` is the text half of a model on a device. Its attention uses Weft's paged attention."""

    dtype: torch.dtype
    device: torch.device

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings `(num_tokens, hidden)` of the int64 tokens `(num_tokens,)`."""
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
        """Runs one step over the packed tokens of many sequences. Returns the last hidden states
        `(num_tokens, hidden)`, or with `wanted_rows` (int64, ascending, not empty) only those of these tokens:
        `(len(wanted_rows), hidden)`. The keys and values of all tokens are written in both cases.

        `embeddings` has shape `(num_tokens, hidden)`, and level 0 of the features is already spliced in. `positions`
        has shape `(num_axes, num_tokens)`. `attention` is passed on to the registered attention function as the keyword
        `weft`, or the layers themselves call it: `attend(layer, q, k, v, scaling)`, where q, k and v have shape
        `(num_tokens, heads, dim)`. `feature_rows` holds the int64 indexes of the tokens that have DeepStack levels, in
        ascending order. `feature_levels` holds these levels and has shape
        `(num_levels - 1, len(feature_rows), hidden)`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits, float32 `(n, vocab)`, of the hidden states `(n, hidden)`."""
        ...


def plan_medium(
    family: Family, header: MediaHeader | FeaturesHeader, options: MediaOptions = DEFAULT_OPTIONS
) -> ItemPlan:
    """Returns the plan of a medium, or of features that a client sends in its place. Raises what `Family.plan` and
    `TakesFeatures.plan_features` raise, and UnsupportedModality if the family takes no features."""
    if not isinstance(header, FeaturesHeader):
        return family.plan(header, options)
    if not isinstance(family, TakesFeatures):
        raise UnsupportedModality(f"the family {family.name} takes no features as input; it takes pictures")
    return family.plan_features(header)


def check_modality(family: Family, modality: str) -> None:
    """Raises UnsupportedModality for a modality that the family does not take."""
    if modality not in family.max_items:
        known = ", ".join(family.max_items) or "only text"
        raise UnsupportedModality(f"the model does not accept {modality}; it accepts {known}")


# ------------------------------------------------------------ what a family may offer in addition


@runtime_checkable
class StreamsUnits(Protocol):
    """A `StreamsUnits` preprocesses an item unit by unit. A family may offer this in addition to
    `Family.preprocess`."""

    def preprocess_units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        """Preprocesses like `preprocess`, but yields each unit as soon as it is ready. An error may follow the first
        units."""
        ...


def stream_units(family: Family, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
    """Yields the units of `item` in order. They all arrive at the end if the family only offers `preprocess`. Raises
    the same errors as `Family.preprocess`."""
    if isinstance(family, StreamsUnits):
        yield from family.preprocess_units(data, item)
    else:
        yield from family.preprocess(data, item)


@runtime_checkable
class HasLeastPixels(Protocol):
    """A `HasLeastPixels` scales a small picture up to a least number of pixels, and follows `MediaOptions.min_pixels`.
    A family may offer this in addition to `Family.plan`."""

    @property
    def pixel_range(self) -> tuple[int, int]:
        """Returns the least and the most pixels of a picture by the checkpoint's own processor. A wish for more than
        the most has the effect of a wish for the most."""
        ...


@runtime_checkable
class TakesFeatures(Protocol):
    """A `TakesFeatures` also plans pictures of which a client sends the features. A family may offer this in addition
    to `Family.plan`."""

    def plan_features(self, header: FeaturesHeader) -> ItemPlan:
        """Returns the plan of a picture with these features: one unit, at the cost 1, and with all the levels of the
        model. Raises InvalidMedia if the header lacks what the family needs to place the tokens, or if no picture that
        the model takes has these features."""
        ...

    def least_features(self) -> FeaturesHeader:
        """Returns the header of a picture with few tokens that `plan_features` takes, for examples."""
        ...


@runtime_checkable
class MelOnDevice(Protocol):
    """Splits the preprocessing of sounds between a decode process and an encoder's device. A family may offer this in
    addition to `Family.preprocess`."""

    def decode_waveform(self, data: bytes, item: MediaItem) -> Waveform:
        """Decodes the sound, which is the first half of `preprocess`. Raises InvalidMedia in the same cases."""
        ...

    def load_spectrograms(self, device: str) -> Spectrograms:
        """Loads the other half of `preprocess`, which makes spectrograms. `device` is named as in torch."""
        ...


class Spectrograms(Protocol):
    """Makes the spectrograms of one family on one device. One thread, which owns the device, uses it."""

    def units(self, waveforms: Sequence[Waveform]) -> list[list[EncoderInput]]:
        """Returns for each sound the units that `Family.preprocess` returns, equal to within 1e-4. All are computed in
        one batch, and they are in host memory."""
        ...


@dataclass(frozen=True, slots=True)
class Waveform:
    """A `Waveform` is a decoded sound, which the decode process hands to an encoder whose device makes spectrograms.
    `rate` is the family's rate, or a rate that `modalities.media.Resampling` allows for devices."""

    samples: npt.NDArray[np.float32]
    """Holds the mean of the channels. Has shape `(num_found,)`."""
    rate: int
    num_samples: int
    """Counts the planned samples at the family's rate. Samples beyond this number are dropped, and silence replaces
    missing ones."""


# ------------------------------------------------------------ the expansion of placeholders


def expand_placeholders(
    token_ids: Sequence[int], placeholder_token_ids: Mapping[str, int], plans: Sequence[ItemPlan]
) -> ExpandedPrompt:
    """Repeats the i-th placeholder token as often as `plans[i]` has rows; each unit (a part of an item that is encoded
    on its own) gets a run of its own.

    `placeholder_token_ids` maps a modality to the id of its placeholder token. Other tokens stay as they are. Raises
    InvalidRequest if the prompt's placeholders are not those of the plans' modalities, in order."""
    ids = np.asarray(token_ids, dtype=np.int64).reshape(-1)
    at = np.flatnonzero(np.isin(ids, np.fromiter(placeholder_token_ids.values(), dtype=np.int64)))
    if len(at) != len(plans):
        raise InvalidRequest(f"the prompt has {len(at)} placeholders for {len(plans)} media items")
    for index, (found, plan) in enumerate(zip(ids[at].tolist(), plans, strict=True)):
        if found != placeholder_token_ids.get(plan.modality):
            raise InvalidRequest(
                f"media item {index} is {plan.modality}, but its placeholder is that of another modality"
            )
    counts = np.ones(len(ids), dtype=np.int64)
    counts[at] = [sum(plan.unit_tokens) for plan in plans]
    starts = np.cumsum(counts) - counts
    runs: list[PlaceholderRange] = []
    for item, (plan, start) in enumerate(zip(plans, starts[at].tolist(), strict=True)):
        ends = np.cumsum(plan.unit_tokens).tolist()
        runs += [
            PlaceholderRange(offset=start + end - length, length=length, item=item, unit=unit, row=0)
            for unit, (length, end) in enumerate(zip(plan.unit_tokens, ends, strict=True))
        ]
    return ExpandedPrompt(np.repeat(ids, counts).tolist(), tuple(runs))


class FeatureRows(NamedTuple):
    """Names the rows `[first, first + length)` of an item's features."""

    item: int
    first: int
    length: int


Piece = Sequence[int] | FeatureRows
"""A `Piece` is a sequence of tokens, or rows of features."""


def expand_pieces(
    token_ids: Sequence[int],
    modality_to_token: Mapping[str, int],
    plans: Sequence[ItemPlan],
    pieces_of: Callable[[int], Sequence[Piece]],
    modality_to_row_token: Mapping[str, int] | None = None,
) -> ExpandedPrompt:
    """Replaces the placeholder of plan i by the pieces `pieces_of(i)`. A plan with an anchor (a sound track whose rows
    are among those of its video) has no placeholder. A row takes the token of its item's modality in
    `modality_to_row_token`, which is by default the placeholder token. Raises InvalidRequest if the prompt's
    placeholders are not those of the plans, in order."""
    modality_to_row_token = modality_to_row_token or modality_to_token
    known = set(modality_to_token.values())
    waiting = iter([index for index, plan in enumerate(plans) if plan.anchor < 0])
    num_wanted, num_found = sum(plan.anchor < 0 for plan in plans), sum(token in known for token in token_ids)
    if num_wanted != num_found:
        raise InvalidRequest(f"the prompt has {num_found} placeholders for {num_wanted} media items")
    ids: list[int] = []
    runs: list[PlaceholderRange] = []
    for token in token_ids:
        if token not in known:
            ids.append(token)
            continue
        index = next(waiting)
        if token != modality_to_token.get(plans[index].modality):
            raise InvalidRequest(
                f"media item {index} is {plans[index].modality}, but its placeholder is that of another modality"
            )
        for piece in pieces_of(index):
            if not isinstance(piece, FeatureRows):
                ids += piece
                continue
            runs += _runs(plans[piece.item], piece, len(ids))
            ids += [modality_to_row_token[plans[piece.item].modality]] * piece.length
    return ExpandedPrompt(ids, tuple(runs))


def _runs(plan: ItemPlan, rows: FeatureRows, offset: int) -> Iterator[PlaceholderRange]:
    """Yields a run for each unit of the rows, which begin at position `offset`."""
    begin, first, end = 0, rows.first, rows.first + rows.length
    for unit, num_tokens in enumerate(plan.unit_tokens):
        if begin <= first < begin + num_tokens and first < end:
            length = min(end, begin + num_tokens) - first
            yield PlaceholderRange(offset=offset, length=length, item=rows.item, unit=unit, row=first - begin)
            offset, first = offset + length, first + length
        begin += num_tokens
