"""Saves tiny audio towers of each family, and computes with transformers what the tests expect for the same sounds.

It knows nothing of the encoder service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from family_row import spread
from family_rows_audio import rows_of
from sound_files import Samples, write_preprocessor
from transformers import (
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
    _get_feat_extract_output_lengths as qwen2_5_omni_lengths,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths as qwen3_omni_lengths,
)

from modalities.families.audio_towers import qwen2_5_omni_tower as qwen2_5_omni
from modalities.families.audio_towers import qwen2_audio_tower as qwen2_audio
from modalities.families.audio_towers import qwen3_omni_tower as qwen3_omni
from modalities.families.audio_towers.sound_encoder import SoundEncoder
from modalities.families.audio_towers.sound_plans import (
    SoundHalf,
    qwen2_5_omni_sound,
    qwen2_audio_sound,
    qwen3_omni_sound,
)

HIDDEN = 48
PLACE = ("cpu", "float32")
_TINY = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16}
_TEXT = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT |= {"num_key_value_heads": 2, "vocab_size": 200}
_QWEN3 = _TINY | {"output_dim": HIDDEN, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 200}
_QWEN2_5 = _TINY | {"output_dim": HIDDEN, "n_window": 20}
_QWEN2 = _TINY | {"max_source_positions": 100}


@dataclass(frozen=True)
class Tower:
    """Holds one family's audio tower: the whole model of transformers, and this project's two halves of the tower."""

    model: Any
    sound: SoundHalf
    encoder: SoundEncoder
    extractor: WhisperFeatureExtractor
    padding: str | bool
    num_tokens: Callable[[int], int]
    """Maps a number of mel frames to the number of tokens, as the reference's processor counts them."""

    def spectrograms(self, sounds: Sequence[Samples]) -> list[torch.Tensor]:
        """Returns one spectrogram `(num_bins, num_frames)` per sound, made by transformers' extractor. It contains only
        the frames that the extractor's mask keeps."""
        found = []
        for samples in sounds:
            made = self.extractor(
                samples,
                sampling_rate=16000,
                padding=self.padding,
                truncation=False,
                return_attention_mask=True,
                return_tensors="pt",
            )
            found.append(made["input_features"][0][:, made["attention_mask"][0].bool()])
        return found

    def expected(self, sounds: Sequence[Samples]) -> list[torch.Tensor]:
        """Returns rows `(num_tokens, hidden)` per sound. The reference's own tower computes them, one sound at a
        time."""
        with torch.inference_mode():
            return [self._reference(samples) for samples in sounds]

    def _reference(self, samples: Samples) -> torch.Tensor:
        if isinstance(self.model, Qwen2AudioForConditionalGeneration):
            made = self.extractor(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
            return rows_of(self.model, made["input_features"], made["attention_mask"])
        (mel,) = self.spectrograms([samples])
        mask = torch.ones((1, mel.shape[1]), dtype=torch.long)
        return self.model.get_audio_features(mel[None], feature_attention_mask=mask).last_hidden_state


def _saved(directory: Path, model: Any, **preprocessor: Any) -> Any:
    model.save_pretrained(directory)
    write_preprocessor(directory, **preprocessor)
    return model


def build_qwen3_omni(directory: Path, width: int = 32, dtype: str = "float32") -> Tower:
    audio = _QWEN3 | {"d_model": width}
    config = Qwen3OmniMoeThinkerConfig(
        audio_config=dict(audio),
        text_config={**_TEXT, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": HIDDEN,
        },
    )
    model = _saved(directory, spread(Qwen3OmniMoeThinkerForConditionalGeneration(config)))
    sound = qwen3_omni_sound(directory, audio, HIDDEN)
    encoder = qwen3_omni.load_encoder(directory, model.config.audio_config, sound, ("cpu", dtype))
    return Tower(
        model,
        sound,
        encoder,
        WhisperFeatureExtractor.from_pretrained(directory),
        True,
        lambda frames: qwen3_omni_lengths(frames, 50),
    )


def build_qwen2_5_omni(directory: Path, dtype: str = "float32") -> Tower:
    config = Qwen2_5OmniThinkerConfig(
        audio_config=dict(_QWEN2_5),
        text_config=dict(_TEXT),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": HIDDEN,
        },
    )
    model = _saved(directory, spread(Qwen2_5OmniThinkerForConditionalGeneration(config)), chunk_length=10)
    encoder = qwen2_5_omni.load_encoder(directory, model.config.audio_config, ("cpu", dtype))
    return Tower(
        model,
        qwen2_5_omni_sound(directory, _QWEN2_5, HIDDEN),
        encoder,
        WhisperFeatureExtractor.from_pretrained(directory),
        "max_length",
        qwen2_5_omni_lengths,
    )


def build_qwen2_audio(directory: Path, dtype: str = "float32") -> Tower:
    config = Qwen2AudioConfig(audio_config=dict(_QWEN2), text_config=dict(_TEXT), audio_token_index=150)
    model = _saved(directory, spread(Qwen2AudioForConditionalGeneration(config)), chunk_length=2)
    return Tower(
        model,
        qwen2_audio_sound(directory, _QWEN2),
        qwen2_audio.load_encoder(directory, ("cpu", dtype)),
        WhisperFeatureExtractor.from_pretrained(directory),
        "max_length",
        lambda frames: ((frames - 1) // 2 + 1 - 2) // 2 + 1,
    )


BUILDERS: dict[str, Callable[..., Tower]] = {
    "qwen3_omni": build_qwen3_omni,
    "qwen2_5_omni": build_qwen2_5_omni,
    "qwen2_audio": build_qwen2_audio,
}
