"""Tests that configs of models are completed for vLLM: what a checkpoint has stays, and the operator goes first.
`tests/vllm` has a checkpoint of the thinker alone, and `tests/vllm_cluster` a whole model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fabric.contracts import ConfigError
from llm_workers.vllm_engine.model_overrides import CompleteConfig, needs_completion


def whole(**vision: Any) -> Any:
    thinker = SimpleNamespace(
        tie_word_embeddings=True,
        text_config=SimpleNamespace(),
        vision_config=SimpleNamespace(num_position_embeddings=2304, patch_size=16, **vision),
    )
    return SimpleNamespace(model_type="qwen3_omni_moe", thinker_config=thinker)


def test_what_transformers_takes_for_granted_is_added() -> None:
    thinker = CompleteConfig()(whole()).thinker_config
    assert thinker.vision_config.image_size == 48 * 16
    assert thinker.vision_config.apply_vit_abs_pos_embed is True
    assert thinker.text_config.tie_word_embeddings is True


def test_keys_of_a_checkpoint_stay() -> None:
    config = whole(image_size=512, apply_vit_abs_pos_embed=False)
    config.thinker_config.text_config.tie_word_embeddings = False
    thinker = CompleteConfig()(config).thinker_config
    assert thinker.vision_config.image_size == 512
    assert thinker.vision_config.apply_vit_abs_pos_embed is False
    assert thinker.text_config.tie_word_embeddings is False


def test_what_the_operator_sets_goes_first() -> None:
    overrides = {"thinker_config": {"vision_config": {"image_size": 64}}, "rope_scaling": {"factor": 2.0}}
    config = CompleteConfig(overrides)(whole(image_size=512))
    assert config.thinker_config.vision_config.image_size == 64
    assert config.rope_scaling == {"factor": 2.0}


def test_other_models_stay_as_they_are(tmp_path: Path) -> None:
    other = SimpleNamespace(model_type="qwen3_vl")
    assert CompleteConfig()(other) is other
    assert vars(other) == {"model_type": "qwen3_vl"}
    for model_type, is_completed in (
        ("qwen3_vl", False),
        ("qwen3_omni_moe", True),
        ("qwen3_omni_moe_thinker", True),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert needs_completion(str(tmp_path)) == is_completed
    with pytest.raises(ConfigError, match=r"config\.json in .*nowhere can't be read"):
        needs_completion(str(tmp_path / "nowhere"))
