"""Implements Qwen2-Audio: it takes text and sounds and returns text.

A sound is encoded in windows of 30 s. `Qwen2AudioFamily` says which tokens and positions the prompt has for a sound;
`modalities.families.audio_towers` plans and encodes it, as for the other families that take sounds.

The module is pure except for `load_spectrograms`, `load_encoder` and `load_language_model`, which import torch when
they are called. It knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fabric.contracts import MediaItem, PlaceholderRange, UnsupportedModality
from modalities.checkpoint_files import model_id, read_json, section
from modalities.families.audio_towers.sound_plans import qwen2_audio_sound
from modalities.families.causal_lm.text_family import running_positions, text_shape
from modalities.family import (
    DEFAULT_OPTIONS,
    AudioHeader,
    EncoderInput,
    EncoderModel,
    ExpandedPrompt,
    Family,
    ItemPlan,
    LanguageModel,
    MediaHeader,
    MediaOptions,
    Positions,
    Spectrograms,
    Tokenize,
    Waveform,
    check_modality,
    expand_placeholders,
)

ARCHITECTURES = ("Qwen2AudioForConditionalGeneration",)
_AUDIO = "audio"
_AUDIO_TOKEN_ID = 151646
"""This is transformers' default id of the placeholder token."""


def load(model_dir: Path) -> Family:
    """Returns the family of the checkpoint in `model_dir`. Raises ConfigError if Weft can't use its config files."""
    return Qwen2AudioFamily(model_dir)


class Qwen2AudioFamily:
    """A `Qwen2AudioFamily` stands for one checkpoint directory. It is immutable and thread-safe."""

    name = "qwen2_audio"

    def __init__(self, model_dir: Path) -> None:
        """Reads only config files. Raises ConfigError if Weft can't use them."""
        raw, config = read_json(model_dir / "config.json")
        self.model_id = model_id(model_dir, raw)
        self.shape = text_shape({"model_type": "qwen2", **section(config, "text_config")})
        self.sound = qwen2_audio_sound(model_dir, section(config, "audio_config"))
        self.max_items: Mapping[str, int] = {_AUDIO: 64}
        self._token_id = int(config.get("audio_token_index", config.get("audio_token_id", _AUDIO_TOKEN_ID)))

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        """Plans a sound from its header. Raises InvalidMedia for a sound that is too short to become a row, and
        UnsupportedModality for another medium."""
        if not isinstance(header, AudioHeader):
            raise UnsupportedModality(f"{self.name} accepts only sounds")
        return self.sound.plan(header)

    def placeholder_text(self, modality: str) -> str:
        """Returns the placeholder of a sound. Raises UnsupportedModality for another modality."""
        check_modality(self, modality)
        return "<|AUDIO|>"

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Tokenize | None = None,
    ) -> ExpandedPrompt:
        """Repeats each placeholder once per row of its sound. Raises InvalidRequest if placeholders and plans do not
        match."""
        return expand_placeholders(token_ids, {_AUDIO: self._token_id}, plans)

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        """Returns positions on one axis."""
        return running_positions(len(token_ids))

    def options(self, modality: str) -> str:
        """Returns canonical JSON of the processing options. Raises UnsupportedModality for another modality."""
        check_modality(self, modality)
        return self.sound.options()

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        """Returns one unit for each window. Raises InvalidMedia for a broken file and for one that differs from its
        plan."""
        check_modality(self, item.modality)
        return self.sound.preprocess(data, item)

    def decode_waveform(self, data: bytes, item: MediaItem) -> Waveform:
        """Decodes a sound without computing its spectrogram, as `modalities.family` describes."""
        check_modality(self, item.modality)
        return self.sound.decode_waveform(data, item)

    def load_spectrograms(self, device: str) -> Spectrograms:
        """Returns the `Spectrograms` (see `modalities.family`) of this family on `device`."""
        from modalities.families.audio_towers.device_spectrograms import DeviceSounds

        return DeviceSounds(self.sound, device)

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        """Loads the audio tower and the projector. Raises ConfigError if a weight is missing, and UnsupportedModality
        for another modality."""
        from modalities.families.audio_towers.qwen2_audio_tower import load_encoder

        for modality in modalities:
            check_modality(self, modality)
        return load_encoder(model_dir, (device, dtype))

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """Loads the language model. Raises ConfigError if a weight is missing."""
        from modalities.families.causal_lm.language_model import load_causal_lm

        return load_causal_lm(model_dir, device, dtype, attention_name)
