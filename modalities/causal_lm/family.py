"""Implements the family of a language model without media. It is pure except for the loader, which imports torch when
it is called. It knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fabric.errors import ConfigError, InvalidRequest, UnsupportedModality
from fabric.messages import MediaItem, PlaceholderRange
from modalities.causal_lm.config import text_shape
from modalities.causal_lm.positions import running_positions
from modalities.family import (
    DEFAULT_OPTIONS,
    EncoderInput,
    EncoderModel,
    ExpandedPrompt,
    ItemPlan,
    LanguageModel,
    MediaHeader,
    MediaOptions,
    Positions,
)
from modalities.json_files import model_id, read_json


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
        raise _no_media(type(header).__name__)

    def placeholder_text(self, modality: str) -> str:
        raise _no_media(modality)

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Callable[[str], Sequence[int]] | None = None,
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
        raise ConfigError(f"{self.name} takes text alone: serve it without encoders (`encoders.replicas: 0`)")

    def load_language_model(self, model_dir: Path, device: str, dtype: str, attention_name: str) -> LanguageModel:
        """Loads the language model. Raises ConfigError if a weight is missing."""
        from modalities.causal_lm.language_model import load_causal_lm

        return load_causal_lm(model_dir, device, dtype, attention_name)


def _no_media(modality: str) -> UnsupportedModality:
    return UnsupportedModality(f"the model takes no {modality}")
