"""Compares Qwen3-Omni's parts with transformers' own thinker on tiny random weights: positions, encoder, text model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modalities_files import AUDIO_CONFIG, PREPROCESSOR, TEXT_CONFIG, TOKENS, VISION_CONFIG, encode, picture
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from fabric.contracts import ConfigError, MediaItem
from modalities.families.causal_lm import language_model
from modalities.families.causal_lm.language_model import TextModel
from modalities.families.qwen3_omni import Qwen3OmniFamily
from modalities.families.qwen_vl import towers as vision_encoder
from modalities.families.qwen_vl.towers import VisionEncoder
from modalities.family import EncoderInput, ExpandedPrompt
from modalities.media import plan_media
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

IMAGE, START, END = TOKENS["image_token_id"], TOKENS["vision_start_token_id"], TOKENS["vision_end_token_id"]
CAUSAL = "modalities_test_causal"
SIZES = [(200, 130), (64, 64), (90, 250)]


def causal(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, weft: list[Any], **_: Any) -> Any:
    """Computes plain causal attention, and records which layer called it with which mask."""
    weft.append((module.layer_idx, mask))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(CAUSAL, causal)


@pytest.fixture(scope="module", autouse=True)
def plain_layers() -> Iterator[None]:
    """Uses transformers' own layers and blocks. `test_fused_layers` and `test_fused_tower` compare the fused ones with
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "fused", lambda part: part)
        patch.setattr(vision_encoder, "fused_tower", lambda tower: tower)
        yield


@pytest.fixture(scope="module")
def reference() -> Qwen3OmniMoeThinkerForConditionalGeneration:
    config = Qwen3OmniMoeThinkerConfig(
        text_config=dict(TEXT_CONFIG), vision_config=dict(VISION_CONFIG), audio_config=dict(AUDIO_CONFIG), **TOKENS
    )
    torch.manual_seed(0)
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()
    with torch.no_grad():  # The initial weights are so small that the tolerance would hide a missing level.
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return model


@pytest.fixture(scope="module")
def model_dir(reference: Qwen3OmniMoeThinkerForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinker")
    reference.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return path


@pytest.fixture(scope="module")
def family(model_dir: Path) -> Qwen3OmniFamily:
    loaded = REGISTRY.load_family(model_dir)
    assert isinstance(loaded, Qwen3OmniFamily)
    return loaded


@pytest.fixture(scope="module")
def encoder(family: Qwen3OmniFamily, model_dir: Path) -> VisionEncoder:
    loaded = family.load_encoder(model_dir, "cpu", "float32", ["image"])
    assert isinstance(loaded, VisionEncoder)
    return loaded


@pytest.fixture(scope="module")
def text_model(family: Qwen3OmniFamily, model_dir: Path) -> TextModel:
    loaded = family.load_language_model(model_dir, "cpu", "float32", CAUSAL)
    assert isinstance(loaded, TextModel)
    return loaded


def request(
    family: Qwen3OmniFamily, sizes: list[tuple[int, int]], lengths: list[int]
) -> tuple[ExpandedPrompt, list[MediaItem], list[EncoderInput]]:
    """Returns a prompt with text of the given lengths around and between pictures of the given sizes."""
    plugin = REGISTRY.modality("image")
    token_ids = [(3 * i) % 100 for i in range(lengths[0])]
    media, inputs = [], []
    for index, (width, height) in enumerate(sizes):
        data = encode(picture(width, height, seed=index))
        media.append(plan_media(family, data, plugin.probe(data, "p"), index, "p").item)
        inputs += family.preprocess(data, media[-1])
        token_ids += [START, IMAGE, END, *((7 * i) % 100 for i in range(lengths[index + 1]))]
    plans = [family.plan(plugin.probe(encode(picture(*size)), "p")) for size in sizes]
    return family.expand(token_ids, plans), media, inputs


def grids(media: list[MediaItem]) -> torch.Tensor:
    return torch.tensor([item.grid for item in media])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    sizes = draw(st.lists(st.tuples(st.integers(20, 300), st.integers(20, 300)), max_size=4))
    return sizes, draw(st.lists(st.integers(0, 9), min_size=len(sizes) + 1, max_size=len(sizes) + 1))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts())
def test_positions_equal_get_rope_index(
    reference: Qwen3OmniMoeThinkerForConditionalGeneration,
    family: Qwen3OmniFamily,
    layout: tuple[list[tuple[int, int]], list[int]],
) -> None:
    sizes, lengths = layout
    if not sizes:
        lengths = [lengths[0] + 1]  # The reference has no positions for an empty prompt.
    expanded, media, _ = request(family, sizes, lengths)
    ids = torch.tensor([expanded.token_ids])
    want, delta = reference.get_rope_index(
        ids, image_grid_thw=grids(media) if media else None, attention_mask=torch.ones_like(ids)
    )
    found = family.positions(expanded.token_ids, expanded.placeholders, media)
    np.testing.assert_array_equal(found.ids, want[:, 0].numpy())
    assert found.delta == int(delta.item())


def test_features_equal_get_image_features(
    reference: Qwen3OmniMoeThinkerForConditionalGeneration, family: Qwen3OmniFamily, encoder: VisionEncoder
) -> None:
    _, media, inputs = request(family, SIZES, [1] * 4)
    with torch.no_grad():
        pixels = torch.from_numpy(np.concatenate([unit.pixels for unit in inputs]))
        want = reference.get_image_features(pixels, image_grid_thw=grids(media), return_dict=True)
    features = encoder.encode(inputs)
    for index, (feature, item) in enumerate(zip(features, media, strict=True)):
        assert feature.shape == (family.shape.num_levels, item.num_tokens, family.shape.hidden_size)
        assert feature.is_contiguous()
        assert feature.dtype == torch.float32
        levels = [want.pooler_output[index], *(level[index] for level in want.deepstack_features)]
        assert torch.equal(feature, torch.stack(levels))
        assert all(level.abs().max() > 0.01 for level in feature)


def test_a_batch_equals_one_by_one(family: Qwen3OmniFamily, encoder: VisionEncoder) -> None:
    _, _, inputs = request(family, SIZES, [1] * 4)
    for unit, feature in zip(inputs, encoder.encode(inputs), strict=True):
        (alone,) = encoder.encode([unit])
        torch.testing.assert_close(feature, alone, atol=1e-5, rtol=1e-5)
    assert encoder.encode([]) == []


def spliced(
    text_model: TextModel, expanded: ExpandedPrompt, features: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the embeddings with level 0 in place, the visual rows, and the other levels."""
    embeddings = text_model.embed(torch.tensor(expanded.token_ids))
    rows = torch.cat([torch.arange(run.offset, run.end) for run in expanded.placeholders])
    levels = torch.cat(features, dim=1)
    embeddings[rows] = levels[0]
    return embeddings, rows, levels[1:]


def test_logits_equal_the_thinkers(
    reference: Qwen3OmniMoeThinkerForConditionalGeneration,
    family: Qwen3OmniFamily,
    encoder: VisionEncoder,
    text_model: TextModel,
) -> None:
    expanded, media, inputs = request(family, SIZES, [5, 3, 1, 6])
    ids = torch.tensor([expanded.token_ids])
    pixels = torch.from_numpy(np.concatenate([unit.pixels for unit in inputs]))
    with torch.no_grad():
        want = reference(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, image_grid_thw=grids(media)
        ).logits[0]
    embeddings, rows, levels = spliced(text_model, expanded, encoder.encode(inputs))
    positions = torch.from_numpy(family.positions(expanded.token_ids, expanded.placeholders, media).ids)
    calls: list[Any] = []
    logits = text_model.logits(text_model.forward(embeddings, positions, calls, rows, levels))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
    assert calls == [(layer, None) for layer in range(family.shape.num_layers)]
    for changed in (levels * 0, levels.flip(0)):  # Every DeepStack level has an effect of its own.
        other = text_model.logits(text_model.forward(embeddings, positions, [], rows, changed))
        assert (other - want).abs().max() > 1e-2


def test_logits_of_text_alone(
    reference: Qwen3OmniMoeThinkerForConditionalGeneration, family: Qwen3OmniFamily, text_model: TextModel
) -> None:
    ids = torch.arange(40)[None] * 2
    with torch.no_grad():
        want = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    positions = torch.from_numpy(family.positions(ids[0].tolist(), [], []).ids)
    hidden = text_model.forward(text_model.embed(ids[0]), positions, [], None, None)
    torch.testing.assert_close(text_model.logits(hidden), want, atol=1e-5, rtol=1e-5)


def test_the_text_half_holds_no_encoder(
    reference: Qwen3OmniMoeThinkerForConditionalGeneration, encoder: VisionEncoder, text_model: TextModel
) -> None:
    towers = [reference.model.visual, reference.model.audio_tower]
    num_all = sum(p.numel() for p in reference.parameters())
    num_towers = sum(p.numel() for tower in towers for p in tower.parameters())
    assert sum(p.numel() for p in text_model._part.parameters()) == num_all - num_towers
    assert sum(p.numel() for p in encoder._tower.parameters()) == sum(p.numel() for p in towers[0].parameters())


def test_a_whole_checkpoint_gives_the_same_parts(
    family: Qwen3OmniFamily, model_dir: Path, encoder: VisionEncoder, text_model: TextModel, tmp_path: Path
) -> None:
    """The weights have names under `thinker.`, and the file also holds a talker and a code2wav that the family does not
    use."""
    weights = {f"thinker.{name}": value for name, value in load_file(model_dir / "model.safetensors").items()}
    weights |= {"talker.model.norm.weight": torch.ones(3), "code2wav.code_embedding.weight": torch.ones(3, 3)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    thinker = json.loads((model_dir / "config.json").read_text())
    whole = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe"}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"thinker_config": thinker}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    other = REGISTRY.load_family(tmp_path)
    assert other.shape == family.shape
    expanded, media, inputs = request(family, SIZES[:1], [4, 4])
    (feature,) = other.load_encoder(tmp_path, "cpu", "float32", ["image"]).encode(inputs)
    assert torch.equal(feature, encoder.encode(inputs)[0])
    embeddings, rows, levels = spliced(text_model, expanded, [feature])
    positions = torch.from_numpy(other.positions(expanded.token_ids, expanded.placeholders, media).ids)
    second = other.load_language_model(tmp_path, "cpu", "float32", CAUSAL)
    assert torch.equal(second.embed(torch.arange(9)), text_model.embed(torch.arange(9)))
    found, want = (model.forward(embeddings, positions, [], rows, levels) for model in (second, text_model))
    assert torch.equal(found, want)
    assert torch.equal(second.logits(found), text_model.logits(want))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("visual.merger_list.1.mlp.0.weight", "encoder"),
        ("visual.blocks.2.attn.qkv.bias", "encoder"),
        ("model.layers.3.mlp.up_proj.weight", "text"),
        ("model.layers.1.mlp.experts.2.down_proj.weight", "text"),
        ("lm_head.weight", "text"),
        ("model.embed_tokens.weight", "text"),
    ],
)
def test_a_missing_weight_refuses_the_start(model_dir: Path, tmp_path: Path, name: str, part: str) -> None:
    for path in model_dir.glob("*.json"):
        shutil.copy(path, tmp_path)
    weights = load_file(model_dir / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    family = REGISTRY.load_family(tmp_path)
    if part == "encoder":
        family.load_language_model(tmp_path, "cpu", "float32", CAUSAL)
        with pytest.raises(ConfigError, match="lacks 1 weights of VisionTower"):
            family.load_encoder(tmp_path, "cpu", "float32", ["image"])
    else:
        family.load_encoder(tmp_path, "cpu", "float32", ["image"])
        with pytest.raises(ConfigError, match="TextHalf"):
            family.load_language_model(tmp_path, "cpu", "float32", CAUSAL)


def test_tied_embeddings_need_no_head(
    reference: Qwen3OmniMoeThinkerForConditionalGeneration, model_dir: Path, text_model: TextModel, tmp_path: Path
) -> None:
    for path in model_dir.glob("*.json"):
        shutil.copy(path, tmp_path)
    config = json.loads((model_dir / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(model_dir / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tied = REGISTRY.load_family(tmp_path).load_language_model(tmp_path, "cpu", "float32", CAUSAL)
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(tied.logits(hidden), hidden @ text_model.embed(torch.arange(200)).T)


def test_dtypes_and_names_are_checked(family: Qwen3OmniFamily, model_dir: Path) -> None:
    half = family.load_encoder(model_dir, "cpu", "bfloat16", ["image"])
    _, _, inputs = request(family, SIZES[:1], [1, 1])
    assert half.encode(inputs)[0].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="int8"):
        family.load_encoder(model_dir, "cpu", "int8", ["image"])
    with pytest.raises(ConfigError, match="not registered"):
        family.load_language_model(model_dir, "cpu", "float32", "unheard_of")
    with pytest.raises(ConfigError, match="mask function"):
        family.load_language_model(model_dir, "cpu", "float32", "sdpa")
    assert CAUSAL in ALL_ATTENTION_FUNCTIONS


def test_a_tokens_experts_do_not_depend_on_its_company(text_model: TextModel) -> None:
    """The mixture of a token is the same whether it is computed alone or in a batch with others."""
    experts = text_model._part.model.layers[1].mlp
    torch.manual_seed(1)
    hidden = torch.randn(1, 33, 64)
    with torch.no_grad():
        together = experts(hidden)
        for row in range(33):
            torch.testing.assert_close(experts(hidden[:, row : row + 1]), together[:, row : row + 1], atol=1e-6, rtol=0)
