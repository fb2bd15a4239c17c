"""Tests that the demo checkpoint, untrained and as shipped, is a model directory like any other: transformers loads
it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, Qwen3OmniMoeThinkerForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from deploy.demo.build import build_demo_checkpoint, demo_checkpoint, write_all_but_weights

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_checkpoint(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_same_seed_same_bytes_and_another_seed_other_weights(model_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # The process's own random state must have no influence.
    before = torch.get_rng_state()
    assert contents(build_demo_checkpoint(tmp_path / "again")) == contents(model_dir)
    assert torch.equal(torch.get_rng_state(), before)
    other = contents(build_demo_checkpoint(tmp_path / "other", seed=1))
    assert other.keys() == contents(model_dir).keys()
    assert other["model.safetensors"] != contents(model_dir)["model.safetensors"]


def test_no_weight_is_missing_or_left_over(model_dir: Path) -> None:
    _, info = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(model_dir, output_loading_info=True)
    assert not any(info.values()), info


def test_what_the_files_say(model_dir: Path, model: Any) -> None:
    config, tokenizer = AutoConfig.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    assert config.model_type == "qwen3_omni_moe_thinker"
    assert config.architectures == ["Qwen3OmniMoeThinkerForConditionalGeneration"]
    assert config.text_config.vocab_size >= len(tokenizer)
    assert sum(config.text_config.rope_parameters["mrope_section"]) == config.text_config.head_dim // 2
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (config.image_token_id, config.video_token_id, config.audio_token_id) == (
        tokenizer.image_token_id,
        tokenizer.video_token_id,
        tokenizer.audio_token_id,
    )
    assert tokenizer.encode("user") == [config.user_token_id]
    assert tokenizer.vision_bos_token == "<|vision_start|>"
    assert tokenizer.audio_eos_token == "<|audio_end|>"
    assert {type(layer.mlp).__name__ for layer in model.model.language_model.layers} == {
        "Qwen3OmniMoeThinkerTextMLP",
        "Qwen3OmniMoeThinkerTextSparseMoeBlock",
    }
    assert "untrained" in (model_dir / "MODEL_CARD.md").read_text()


def answer(model_dir: Path, model: Any, text: str, image: Image.Image | None = None) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    parts = [*([{"type": "image"}] if image else []), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    inputs: dict[str, Any] = {}
    if image:
        inputs = dict(Qwen2VLImageProcessorPil.from_pretrained(model_dir)([image], return_tensors="pt"))
        at = ids.index(tokenizer.image_token_id)
        num_tokens = int(inputs["image_grid_thw"].prod()) // 4
        ids[at : at + 1] = [tokenizer.image_token_id] * num_tokens
    prompt = torch.tensor([ids])
    with torch.no_grad():
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, **inputs)
    return output[0, len(ids) :].tolist()


def test_answers_differ_between_prompts_and_between_pictures(model_dir: Path, model: Any) -> None:
    gradient = np.linspace(0, 255, 96 * 128 * 3, dtype=np.uint8).reshape(96, 128, 3)
    pictures = [
        None,
        Image.new("RGB", (128, 96), "red"),
        Image.new("RGB", (128, 96), "blue"),
        Image.fromarray(gradient),
        Image.fromarray(gradient[::-1].copy()),
        Image.new("RGB", (300, 200), "red"),
    ]
    answers = [answer(model_dir, model, "What is this?", picture) for picture in pictures]
    answers += [answer(model_dir, model, text) for text in ("Hello", "Name a colour.", "Count to ten.")]
    assert len({tuple(ids) for ids in answers}) == len(answers)
    assert len({ids[0] for ids in answers}) > len(answers) // 2, "the first token depends on the prompt"


def test_the_audio_tower_takes_what_the_feature_extractor_makes(model_dir: Path, model: Any) -> None:
    extractor = WhisperFeatureExtractor.from_pretrained(model_dir)
    tones = [np.sin(np.arange(16_000) * hertz / 16_000 * 2 * np.pi).astype(np.float32) for hertz in (220.0, 880.0)]
    features = []
    for tone in tones:
        inputs = extractor(tone, sampling_rate=16_000, return_attention_mask=True, padding=True, return_tensors="pt")
        with torch.no_grad():
            output = model.get_audio_features(inputs["input_features"], inputs["attention_mask"])
        features.append(output.last_hidden_state)
    assert features[0].shape == (13, 128)
    assert not torch.allclose(features[0], features[1], atol=1e-2)


def test_the_shipped_checkpoint_has_the_files_of_the_recipe(tmp_path: Path) -> None:
    """Tokenizer and configs are those that the sources generate today; weights and card are those of the training."""
    shipped = contents(demo_checkpoint())
    write_all_but_weights(tmp_path, has_voice=True)
    made = contents(tmp_path)
    assert shipped.keys() == made.keys() | {"model.safetensors"}
    for name in made.keys() - {"MODEL_CARD.md"}:
        same = (
            json.loads(shipped[name]) == json.loads(made[name])
            if name.endswith(".json")
            else shipped[name] == made[name]
        )
        assert same, name
    assert sum(map(len, shipped.values())) < 20e6


def test_the_shipped_checkpoint_is_loaded_whole_in_bfloat16() -> None:
    model, info = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        demo_checkpoint(), output_loading_info=True
    )
    assert not any(info.values()), info
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
