"""Provides a family and a codec that need no model directory, for tests of everything that stands before the model.

The vocabulary consists of the 256 bytes and a few special tokens. This module knows nothing of clusters, and imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fabric.contracts import ConfigError, InvalidMedia, MediaItem, PlaceholderRange
from modalities.family import (
    DEFAULT_OPTIONS,
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
    Tokenize,
    expand_placeholders,
)
from modalities.text import LETTER_TO_BYTE, ChatTemplate, TextCodec

SPECIALS = ("<|eos|>", "<|image|>", "<|turn|>", "<|end|>", "<|video|>", "<|audio|>")
EOS, IMAGE, VIDEO, AUDIO = 256, 257, 260, 261
"""These are the ids of special tokens; `IMAGE`, `VIDEO` and `AUDIO` are placeholders."""
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% elif p.type == 'video' %}<|video|>"
    "{% elif p.type == 'audio' %}<|audio|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

_NO_WEIGHTS = "the tiny family has no weights"


def tiny_codec(template: str = TEMPLATE) -> TextCodec:
    """Returns a codec with bytes 0 to 255 as ids 0 to 255, followed by the special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(LETTER_TO_BYTE), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return TextCodec(tokenizer, ChatTemplate(template, {}, datetime.now), (EOS,))


class TinyFamily:
    """A `TinyFamily` takes images, or their features, and plans one row of features per 32 x 32 pixels. It has no
    weights, so it can be planned with, but not loaded. Subclass it to plan media of your own."""

    name = "tiny"
    model_id = "tiny-0"
    max_items: Mapping[str, int] = {"image": 4}

    def __init__(self, max_model_len: int = 2048) -> None:
        self.shape = ModelShape(
            hidden_size=8,
            num_levels=1,
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=256 + len(SPECIALS),
            max_model_len=max_model_len,
        )

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        assert isinstance(header, ImageHeader)
        grid = (1, -(-header.height // 32), -(-header.width // 32))
        rows = grid[1] * grid[2]
        return ItemPlan("image", grid, (rows,), rows * 4, (header.width, header.height))

    def plan_features(self, header: FeaturesHeader) -> ItemPlan:
        """Plans the features of a picture. Raises InvalidMedia if they have a grid that is not theirs, or more than 64
        tokens."""
        grid = header.grid or (1, 1, header.num_tokens)
        if math.prod(grid) != header.num_tokens or header.num_tokens > 64:
            raise InvalidMedia(f"the grid {grid} must have {header.num_tokens} patches, and at most 64")
        return ItemPlan("image", grid, (header.num_tokens,), 1, (header.num_tokens, *grid))

    def least_features(self) -> FeaturesHeader:
        return FeaturesHeader(1)

    def placeholder_text(self, modality: str) -> str:
        return "<|image|>"

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Tokenize | None = None,
    ) -> ExpandedPrompt:
        return expand_placeholders(token_ids, {"image": IMAGE}, plans)

    def options(self, modality: str) -> str:
        return "{}"

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        return Positions(np.arange(len(token_ids), dtype=np.int64)[None], 0)

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        raise ConfigError(_NO_WEIGHTS)

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        raise ConfigError(_NO_WEIGHTS)

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        raise ConfigError(_NO_WEIGHTS)
