"""Defines Qwen2-Audio as a row of the family table, and draws the sounds of the suite."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from family_row import MODALITY_TO_SAMPLE, FamilyRow, Markup, Medium, Processed, spread
from family_rows_text import TINY
from sound_files import Samples, encoded, noise
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, Qwen2Config, WhisperFeatureExtractor

AUDIO, START, END = 100, 103, 104
RATE = 16000
WINDOW_S = 2
"""This is the window of the tiny checkpoint's extractor in seconds; the real checkpoint has 30."""
MEL_ATOL = 1e-4
READ_AHEAD = 2
"""The family passes this many mel frames after those that count."""


def sound(medium: Medium) -> bytes:
    """Returns a WAV file at the models' sampling rate. The first value of `size` is its length in milliseconds; the
    second has no meaning."""
    return encoded(noise(medium.size[0] * RATE // 1000, medium.seed)[None], RATE)


MODALITY_TO_SAMPLE.setdefault("audio", sound)


def samples_of(data: bytes) -> Samples:
    """Returns the samples of a 16-bit file with one channel."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    return (np.concatenate(frames) / 32768).astype(np.float32)


def build() -> Any:
    config = Qwen2AudioConfig(
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "max_source_positions": 50 * WINDOW_S,
        },
        text_config=Qwen2Config(**TINY),
        audio_token_index=AUDIO,
    )
    return spread(Qwen2AudioForConditionalGeneration(config))


def process(directory: Path, media: Sequence[tuple[str, bytes]]) -> Processed:
    """Runs the reference's extractor. It splits a sound that is longer than a window into several windows, whose
    placeholders follow each other."""
    extractor = WhisperFeatureExtractor.from_pretrained(directory)
    windows: list[Samples] = []
    num_windows: list[int] = []
    for _, data in media:
        samples = samples_of(data)
        parts = [samples[at : at + WINDOW_S * RATE] for at in range(0, len(samples), WINDOW_S * RATE)]
        windows += parts
        num_windows.append(len(parts))
    made = extractor(windows, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    num_frames = made["attention_mask"].sum(-1)
    counts = (((num_frames - 1) // 2 + 1 - 2) // 2 + 1).split(num_windows)  # This is Qwen2AudioProcessor's formula.
    read = [
        features[:, : frames + READ_AHEAD].T.numpy()
        for features, frames in zip(made["input_features"], num_frames.tolist(), strict=True)
    ]
    ends = np.cumsum(num_windows).tolist()
    pixels = [np.concatenate(read[end - num : end]) for num, end in zip(num_windows, ends, strict=True)]
    inputs = {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
    return Processed(inputs, [int(count.sum()) for count in counts], pixels, MEL_ATOL)


def features(model: Any, processed: Processed) -> list[torch.Tensor]:
    rows = rows_of(model, **processed.inputs)
    return [part[None] for part in rows.split(processed.num_tokens)]


def rows_of(model: Any, input_features: torch.Tensor, feature_attention_mask: torch.Tensor) -> torch.Tensor:
    """Returns what the reference puts in place of placeholders, `(num_tokens, hidden)`. A hook records it where the
    reference's text model receives it."""
    lengths = model.model.audio_tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))[1]
    ids = torch.tensor([[1, *[model.config.audio_token_id] * int(lengths.sum()), 1]])
    caught: list[torch.Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: caught.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    try:
        model.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=input_features,
            feature_attention_mask=feature_attention_mask,
        )
    finally:
        hook.remove()
    return caught[0][0, 1:-1]


QWEN2_AUDIO = FamilyRow(
    name="qwen2_audio",
    build=build,
    files={
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 16,
            "chunk_length": WINDOW_S,
        }
    },
    markup={"audio": Markup((START,), AUDIO, (END,))},
    process=process,
    features=features,
    # The sounds have less than one window, exactly one window, and three windows.
    sizes=((700, 0), (2000, 0), (4513, 0)),
)
