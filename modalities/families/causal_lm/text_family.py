"""Implements the family of a language model without media, and reads the config of a text model.

`TextFamily` answers a `Family`'s questions for a checkpoint of text alone. The functions after it serve every family
with a causal text half. `text_shape`, `shape_of` and `refuse_unsupported` read the text model's config as plain JSON,
alone or as a section of a larger config. Missing keys take the values that transformers 5.23 gives them. They refuse
what Weft can't run, so that every part of the cluster refuses it at start. `running_positions` gives the positions of
models with one axis.

The module is pure except for the loader, which imports torch when it is called. It knows nothing of requests, media or
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fabric.contracts import ConfigError, InvalidRequest, MediaItem, PlaceholderRange, UnsupportedModality
from modalities.checkpoint_files import model_id, read_json
from modalities.family import (
    DEFAULT_OPTIONS,
    EncoderInput,
    EncoderModel,
    ExpandedPrompt,
    ItemPlan,
    LanguageModel,
    MediaHeader,
    MediaOptions,
    ModelShape,
    Positions,
    Tokenize,
)


class TextFamily:
    """Represents one checkpoint directory. It is immutable and thread-safe. All methods for media raise
    UnsupportedModality, and loading an encoder raises ConfigError."""

    def __init__(self, model_dir: Path) -> None:
        """Reads config.json only. Raises ConfigError."""
        raw, config = read_json(model_dir / "config.json")
        self.shape = text_shape(config)
        self.name = str(config["model_type"])
        self.model_id = model_id(model_dir, raw)
        self.max_items: Mapping[str, int] = {}

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        raise _no_media(type(header).__name__.removesuffix("Header").lower())

    def placeholder_text(self, modality: str) -> str:
        raise _no_media(modality)

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Tokenize | None = None,
    ) -> ExpandedPrompt:
        """Returns the prompt unchanged. Raises InvalidRequest if there are plans."""
        if plans:
            raise InvalidRequest(f"the prompt has no placeholders for {len(plans)} media items")
        return ExpandedPrompt(list(token_ids), ())

    def positions(
        self, token_ids: Sequence[int], placeholders: Sequence[PlaceholderRange], media: Sequence[MediaItem]
    ) -> Positions:
        """Returns positions with one axis."""
        return running_positions(len(token_ids))

    def options(self, modality: str) -> str:
        raise _no_media(modality)

    def preprocess(self, data: bytes, item: MediaItem) -> list[EncoderInput]:
        raise _no_media(item.modality)

    def load_encoder(self, model_dir: Path, device: str, dtype: str, modalities: Sequence[str]) -> EncoderModel:
        """Raises ConfigError, because a text model has no encoder."""
        raise ConfigError(f"{self.name} accepts only text; serve it without encoders (`encoders.replicas: 0`)")

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """Loads the language model. Raises ConfigError if a weight is missing."""
        from modalities.families.causal_lm.language_model import load_causal_lm

        return load_causal_lm(model_dir, device, dtype, attention_name)


def _no_media(modality: str) -> UnsupportedModality:
    return UnsupportedModality(f"the model accepts only text, not {modality}")


# ------------------------------------------------------------ positions


def running_positions(num_tokens: int) -> Positions:
    """Returns int64 positions `(1, num_tokens)`. A token's position is its index, also for rows of media."""
    return Positions(np.arange(num_tokens, dtype=np.int64)[None], 0)


# ------------------------------------------------------------ the config of a text model

_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "head_dim": None,
}
MODEL_TYPE_TO_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, "num_key_value_heads": None, "vocab_size": 32000, "max_position_embeddings": 2048},
    "qwen2": {
        **_COMMON,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "qwen3": {
        **_COMMON,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
# The frequencies of these kinds follow the longest position of the batch, so one sequence would change another's
# result.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def text_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a text model with one feature level. Raises ConfigError for another kind of model, and for
    any feature that Weft's paged attention, which is causal and full, would compute wrongly without notice."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPE_TO_DEFAULTS:
        known = ", ".join(MODEL_TYPE_TO_DEFAULTS)
        raise ConfigError(f"the text model {kind!r} is not supported; Weft supports {known}")
    text = {**MODEL_TYPE_TO_DEFAULTS[kind], **config}
    refuse_unsupported(text)
    return shape_of(text, num_levels=1)


def shape_of(text: Mapping[str, Any], num_levels: int) -> ModelShape:
    """Returns the shape that a text model's config describes; no key but `head_dim` may be missing. Raises ConfigError
    for impossible values."""
    try:
        hidden_size, num_heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        return ModelShape(
            hidden_size=hidden_size,
            num_levels=num_levels,
            num_layers=int(text["num_hidden_layers"]),
            num_kv_heads=int(text["num_key_value_heads"] or num_heads),
            head_dim=int(text.get("head_dim") or hidden_size // num_heads),
            vocab_size=int(text["vocab_size"]),
            max_model_len=int(text["max_position_embeddings"]),
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"the config of the text model is broken: {error}") from error


def refuse_unsupported(text: Mapping[str, Any]) -> None:
    """Raises ConfigError for a kind of attention or of rotation that Weft does not have. Weft's paged attention is
    causal and full, and rotates each token by its own position alone; without this check any other kind would silently
    be computed in that way. A window counts as used unless the config says otherwise."""
    _refuse_attention(text)
    _refuse_rope(text)


def _refuse_attention(text: Mapping[str, Any]) -> None:
    kinds = text.get("layer_types")
    if other := sorted({str(kind) for kind in kinds or ()} - {"full_attention"}):
        raise ConfigError(
            f"attention layers of type {', '.join(other)} are not supported; Weft supports full_attention"
        )
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    is_windowed = window is not None and (text.get("max_window_layers") or 0) < text["num_hidden_layers"]
    if is_windowed and kinds is None:
        raise ConfigError(f"sliding-window attention is not supported, but the config has sliding_window {window}")
    if text.get("is_causal", True) is not True or text.get("use_bidirectional_attention"):
        raise ConfigError("bidirectional text attention is not supported")
    if text.get("add_cross_attention"):
        raise ConfigError("cross attention is not supported")


def _refuse_rope(text: Mapping[str, Any]) -> None:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters of the text model must be an object, not {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _BATCH_DEPENDENT_ROPE:
        raise ConfigError(f"the rope type {kind!r} is not supported, because its rotation depends on the whole batch")
