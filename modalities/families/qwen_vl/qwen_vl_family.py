"""Implements a Qwen vision family: what it takes, how many prompt tokens a medium takes, and where these tokens stand.

The module is pure except for `load_spectrograms`, `load_encoder` and `load_language_model`, which import torch when
they are called. It knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.contracts import InvalidMedia, MediaItem, PlaceholderRange
from modalities.families.audio_towers.sound_plans import SoundHalf
from modalities.families.qwen_vl.layout import AUDIO, IMAGE, VIDEO, Layout, read_config
from modalities.families.qwen_vl.patches import (
    check_given_grid,
    cut_video,
    image_grid,
    image_patches,
    step_times_s,
)
from modalities.families.qwen_vl.prompt_layout import audio_block, image_block, pieces, prompt_positions, video_block
from modalities.family import (
    DEFAULT_OPTIONS,
    AudioHeader,
    EncoderInput,
    EncoderModel,
    ExpandedPrompt,
    FeaturesHeader,
    ImageHeader,
    ItemPlan,
    LanguageModel,
    MediaHeader,
    MediaOptions,
    ModelShape,
    Positions,
    Spectrograms,
    Tokenize,
    VideoHeader,
    Waveform,
    canonical_options,
    check_modality,
    expand_pieces,
)

if TYPE_CHECKING:
    from modalities.families.qwen_vl.towers import Checkpoint

_MODALITY_TO_MOST = {IMAGE: 64, VIDEO: 16, AUDIO: 16}
_MODALITY_TO_BLOCK = {IMAGE: image_block, VIDEO: video_block, AUDIO: audio_block}


class QwenVLFamily:
    """Represents one checkpoint directory. It is immutable and thread-safe."""

    def __init__(self, layout: Layout, model_dir: Path, checkpoint: Callable[[], Checkpoint]) -> None:
        """Reads config files only. `checkpoint` imports the family's transformers classes when it is called. Raises
        ConfigError."""
        self.name = layout.name
        self.config = read_config(model_dir, layout)
        self.model_id = self.config.model_id
        self.shape: ModelShape = self.config.shape
        self.max_items: Mapping[str, int] = {name: _MODALITY_TO_MOST[name] for name in self.config.modality_to_token}
        self._layout, self._checkpoint = layout, checkpoint

    @property
    def pixel_range(self) -> tuple[int, int]:
        return self.config.image.min_pixels, self.config.image.max_pixels

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        """Plans one medium from its header. Raises InvalidMedia for an aspect ratio above 200, for a picture that is
        too small, for a video that `cut_video` refuses, and for a sound that is too short for one row. Raises
        UnsupportedModality for a medium that the model does not take."""
        if isinstance(header, ImageHeader):
            return self._plan_image(header, options)
        if isinstance(header, VideoHeader):
            return self._plan_video(header, options)
        return self._plan_sound(header)

    def plan_features(self, header: FeaturesHeader) -> ItemPlan:
        """Plans the features of a picture. Raises InvalidMedia if they have no grid, or none that a picture of this
        model has."""
        check_modality(self, IMAGE)
        check_given_grid(header, self.config.image)
        assert header.grid is not None
        geometry = (self.shape.num_levels, header.num_tokens, self.shape.hidden_size, *header.grid)
        return ItemPlan(IMAGE, header.grid, (header.num_tokens,), 1, geometry)

    def least_features(self) -> FeaturesHeader:
        """Returns the header of a picture of one token."""
        side = self.config.image.merge_size
        return FeaturesHeader(1, grid=(1, side, side))

    def placeholder_text(self, modality: str) -> str:
        """Returns the text of the modality's placeholder. Raises UnsupportedModality."""
        check_modality(self, modality)
        return self._layout.modality_to_placeholder[modality].text

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Tokenize | None = None,
    ) -> ExpandedPrompt:
        """Expands the placeholders of a prompt. Raises InvalidRequest if placeholders and plans do not match, and
        ConfigError for a family that writes the time between frames if there is no `tokenize`."""
        pieces_of = partial(pieces, self.config, plans, tokenize=tokenize)
        return expand_pieces(token_ids, self.config.modality_to_token, plans, pieces_of)

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        """Returns M-RoPE positions, which have three axes. Raises ProtocolError if the ranges do not fit."""
        blocks = {name: partial(_MODALITY_TO_BLOCK[name], self.config) for name in self.max_items}
        sound = self._layout.sound
        are_marks_paired = sound is not None and sound.are_marks_paired
        return prompt_positions(len(token_ids), placeholders, media, blocks, are_marks_paired)

    def options(self, modality: str) -> str:
        """Returns canonical JSON of the modality's processing options. Raises UnsupportedModality."""
        check_modality(self, modality)
        if modality == AUDIO:
            return self._sound_half().options()
        options = self.config.video if modality == VIDEO else self.config.image
        return canonical_options(options)

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        """Returns the units of a medium: a picture is one unit, and a video or sound is one or more. Raises
        InvalidMedia for a broken file or one that differs from its plan."""
        return list(self.preprocess_units(data, item))

    def preprocess_units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        """Yields the units as `modalities.family` describes."""
        check_modality(self, item.modality)
        if item.modality == VIDEO:
            from modalities.families.qwen_vl.patches import video_units

            yield from video_units(data, item, self.config.video)
        elif item.modality == AUDIO:
            yield from self._sound_half().preprocess(data, item)
        else:
            yield self._image_input(data, item)

    def decode_waveform(self, data: bytes, item: MediaItem) -> Waveform:
        """Decodes a sound as `modalities.family` describes. Raises UnsupportedModality for a model that takes no
        sound."""
        return self._sound_half().decode_waveform(data, item)

    def load_spectrograms(self, device: str) -> Spectrograms:
        """Returns the `Spectrograms` (see `modalities.family`) of this family on `device`. Raises UnsupportedModality
        for a model that takes no sound."""
        from modalities.families.audio_towers.device_spectrograms import DeviceSounds

        return DeviceSounds(self._sound_half(), device)

    def _image_input(self, data: bytes, item: MediaItem) -> EncoderInput:
        num_patches = item.grid[0] * item.grid[1] * item.grid[2]
        if item.unit_tokens != (num_patches // self.config.image.merge_size**2,):
            raise InvalidMedia(
                f"{item.part}: the grid {item.grid} of the picture does not give the planned {item.unit_tokens} rows",
                param=item.part,
            )
        wishes = MediaOptions.decode(item.options)
        pixels = image_patches(data, item.grid, self.config.image, item.part, wishes)
        return EncoderInput(IMAGE, pixels, item.grid)

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        """Loads the towers of `modalities`. Raises ConfigError if a weight is missing, and UnsupportedModality for a
        modality that the model does not take."""
        from modalities.families.qwen_vl.towers import load_encoder

        for modality in modalities:
            check_modality(self, modality)
        return load_encoder(self._checkpoint(), model_dir, self.config, (device, dtype), modalities)

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """Loads the text half. Raises ConfigError if a weight is missing."""
        from modalities.families.causal_lm.language_model import load_text_model

        load = partial(self._checkpoint().load_text_half, model_dir, self.config, device, dtype)
        return load_text_model(load, attention_name)

    def _plan_image(self, header: ImageHeader, options: MediaOptions) -> ItemPlan:
        grid = image_grid(header, self.config.image, options)
        cost = grid[0] * grid[1] * grid[2]
        num_tokens = cost // self.config.image.merge_size**2
        return ItemPlan(IMAGE, grid, (num_tokens,), cost, (header.width, header.height))

    def _plan_video(self, header: VideoHeader, options: MediaOptions) -> ItemPlan:
        check_modality(self, VIDEO)
        cut = cut_video(header, options, self.config.video)
        step, time = self.config.video.frame.temporal_patch_size, self.config.video_time
        return ItemPlan(
            modality=VIDEO,
            grid=cut.grid,
            unit_tokens=cut.unit_tokens,
            cost=cut.grid[0] * cut.grid[1] * cut.grid[2],
            geometry=(header.width, header.height, header.num_frames),
            frame_times_s=step_times_s(cut, step),
            row_seconds=time.row_seconds(cut, header, options, step),
            num_pooled_frames=cut.rows.num_pooled,
        )

    def _plan_sound(self, header: AudioHeader) -> ItemPlan:
        return self._sound_half().plan(header)

    def _sound_half(self) -> SoundHalf:
        check_modality(self, AUDIO)
        assert self.config.sound is not None
        return self.config.sound
