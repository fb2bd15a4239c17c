"""Completes the configs of models for vLLM, where checkpoints leave out what transformers does not ask for.

vLLM's class for Qwen3-Omni reads three keys that transformers' config class does not have, so a checkpoint that
transformers has written lacks them; published checkpoints hold them. It also knows the thinker only as a part of the
whole model, so a config of the thinker alone is put into one of the whole model. A key that a checkpoint has is never
changed. vLLM calls `CompleteConfig` when it has read a config, also in the processes of its ranks.

This module imports neither vLLM nor transformers until a thinker's config is put into that of a whole model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabric.contracts import ConfigError

WHOLE_TYPE, THINKER_TYPE = "qwen3_omni_moe", "qwen3_omni_moe_thinker"
WHOLE_CLASS = "Qwen3OmniMoeForConditionalGeneration"


@dataclass(frozen=True)
class CompleteConfig:
    """Is vLLM's option `hf_overrides` for models whose configs are completed. `overrides` holds what the operator has
    set for that option, which goes first."""

    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, config: Any) -> Any:
        """Returns the completed config. A config of another model is returned with the operator's overrides alone."""
        _override(config, self.overrides)
        if config.model_type == THINKER_TYPE:
            config = _whole_config(config)
        if config.model_type == WHOLE_TYPE:
            _complete_thinker(config.thinker_config)
        return config


def needs_completion(model_dir: str) -> bool:
    """Returns whether vLLM needs a completed config for the model in this directory. Raises ConfigError if it has no
    config."""
    try:
        described = json.loads((Path(model_dir) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json in {model_dir} can't be read: {error}") from error
    return described.get("model_type") in (WHOLE_TYPE, THINKER_TYPE)


def _override(config: Any, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        part = getattr(config, key, None)
        if isinstance(value, Mapping) and part is not None and not isinstance(part, dict):
            _override(part, value)
        else:
            setattr(config, key, value)


def _whole_config(thinker: Any) -> Any:
    """Returns the config of a whole model that has this thinker. vLLM loads no other part of it."""
    from transformers import Qwen3OmniMoeConfig

    whole = Qwen3OmniMoeConfig(thinker_config=thinker.to_dict(), enable_audio_output=False)
    whole.architectures, whole.dtype = [WHOLE_CLASS], thinker.dtype
    return whole


def _complete_thinker(thinker: Any) -> None:
    """Adds what transformers takes for granted: the tower of vision has one learned position for each patch of a square
    picture, and adds it to the patch; the text model shares its embeddings with its head if the thinker says so."""
    vision, text = thinker.vision_config, thinker.text_config
    if not hasattr(vision, "image_size"):
        vision.image_size = math.isqrt(vision.num_position_embeddings) * vision.patch_size
    if not hasattr(vision, "apply_vit_abs_pos_embed"):
        vision.apply_vit_abs_pos_embed = True
    if not hasattr(text, "tie_word_embeddings"):
        text.tie_word_embeddings = thinker.tie_word_embeddings
