"""Tests the differences between the Qwen vision families against transformers: positions, defaults of config files, and
the layouts and weight names of older and newer checkpoints. The suite of the family table tests their answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_row import FamilyRow
from family_rows_qwen_vl import END, IMAGE, QWEN2_5_OMNI, QWEN2_5_VL, QWEN2_VL, QWEN3_VL, START
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modalities_files import PREPROCESSOR, encode, picture
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, Qwen2_5_VLConfig, Qwen2_5OmniThinkerConfig, Qwen2VLConfig, Qwen3VLConfig

from fabric.contracts import ConfigError, MediaItem
from llm_workers.compute import register_attention
from modalities.families.causal_lm import language_model
from modalities.families.qwen_vl import towers as vision_encoder
from modalities.family import EncoderInput, ExpandedPrompt, Family, ImageHeader, ModelShape
from modalities.media import plan_media
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

ROWS = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN2_5_OMNI)
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "qwen2_vl": Qwen2VLConfig,
    "qwen2_5_vl": Qwen2_5_VLConfig,
    "qwen3_vl": Qwen3VLConfig,
    "qwen2_5_omni": Qwen2_5OmniThinkerConfig,
}


@pytest.fixture(scope="module", autouse=True)
def plain_layers() -> Iterator[None]:
    """Uses transformers' own layers and blocks. `test_fused_layers` and `test_fused_tower` compare the fused ones with
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "fused", lambda part: part)
        patch.setattr(vision_encoder, "fused_tower", lambda tower: tower)
        yield


@dataclass(frozen=True)
class Saved:
    row: FamilyRow
    model: Any
    directory: Path
    family: Family


@pytest.fixture(scope="module", params=ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    row: FamilyRow = request.param
    directory = tmp_path_factory.mktemp(row.name)
    model = row.build()
    model.save_pretrained(directory)
    for name, content in row.files.items():
        (directory / name).write_text(json.dumps(content))
    return Saved(row, model, directory, REGISTRY.load_family(directory))


def prompt(family: Family, sizes: list[tuple[int, int]], lengths: list[int]) -> tuple[ExpandedPrompt, list[MediaItem]]:
    """Returns a prompt with text of the given lengths around and between pictures of the given sizes. No picture is
    decoded."""
    token_ids = [(3 * i) % 100 for i in range(lengths[0])]
    media, plans = [], []
    for index, size in enumerate(sizes):
        header = ImageHeader("PNG", *size, "RGB")
        media.append(plan_media(family, b"", header, index, "p").item)
        plans.append(family.plan(header))
        token_ids += [START, IMAGE, END, *((7 * i) % 100 for i in range(lengths[index + 1]))]
    return family.expand(token_ids, plans), media


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    sizes = draw(st.lists(st.tuples(st.integers(10, 500), st.integers(10, 500)), max_size=4))
    lengths = draw(st.lists(st.integers(0, 9), min_size=len(sizes) + 1, max_size=len(sizes) + 1))
    return sizes, lengths if sizes else [lengths[0] + 1]  # The reference has no positions for an empty prompt.


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts())
def test_positions_equal_get_rope_index(saved: Saved, layout: tuple[list[tuple[int, int]], list[int]]) -> None:
    expanded, media = prompt(saved.family, *layout)
    ids = torch.tensor([expanded.token_ids])
    kwargs = {"attention_mask": torch.ones_like(ids), **saved.row.inputs_of_ids(ids)}
    rope_index = saved.model.get_rope_index if saved.row is QWEN2_5_OMNI else saved.model.model.get_rope_index
    grids = torch.tensor([item.grid for item in media]) if media else None
    want, delta = rope_index(ids, image_grid_thw=grids, **kwargs)
    found = saved.family.positions(expanded.token_ids, expanded.placeholders, media)
    np.testing.assert_array_equal(found.ids, want[:, 0].numpy())
    assert found.delta == int(delta.item())


def test_what_the_config_leaves_out_is_transformers_default(saved: Saved, tmp_path: Path) -> None:
    """The test covers the text model and the tower. The width of a feature has to be that of the text model."""
    config = CONFIGS[saved.row.name]()
    text, vision = config.text_config, config.vision_config
    is_qwen2_vl = saved.row is QWEN2_VL
    width = vision.hidden_size if is_qwen2_vl else vision.out_hidden_size
    raw = {
        "architectures": [type(saved.model).__name__],
        "text_config": {"hidden_size": width},
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options = PREPROCESSOR | {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size}
    options["feature_size"] = 128
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    family = REGISTRY.load_family(tmp_path)
    head_dim = text.head_dim if saved.row is QWEN3_VL else width // text.num_attention_heads
    assert family.shape == ModelShape(
        hidden_size=width,
        num_levels=1 + len(getattr(vision, "deepstack_visual_indexes", ())),
        num_layers=text.num_hidden_layers,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=text.vocab_size,
        max_model_len=text.max_position_embeddings,
    )
    assert family.config.image_token_id == config.image_token_id


def one_picture(family: Family) -> EncoderInput:
    plugin = REGISTRY.modality("image")
    data = encode(picture(150, 90))
    (unit,) = family.preprocess(data, plan_media(family, data, plugin.probe(data, "p"), 0, "p").item)
    return unit


def outcome(family: Family, directory: Path) -> list[torch.Tensor]:
    """Returns a feature, embeddings, their logits, and the sums of the weights: everything that depends on a
    checkpoint's weights."""
    feature = family.load_encoder(directory, "cpu", "float32", ["image"]).encode([one_picture(family)])[0]
    model = family.load_language_model(directory, "cpu", "float32", register_attention())
    parameters = [parameter.sum() for parameter in model._part.parameters()]
    embeddings = model.embed(torch.arange(9))
    return [feature, embeddings, model.logits(embeddings), torch.stack(parameters)]


def rewrite(saved: Saved, target: Path, rename: Callable[[str], str], **config: Any) -> Family:
    """Writes the checkpoint with other weight names and changes to its config, and loads its family."""
    for path in saved.directory.glob("*.json"):
        shutil.copy(path, target)
    weights = load_file(saved.directory / "model.safetensors")
    save_file({rename(name): value for name, value in weights.items()}, target / "model.safetensors", {"format": "pt"})
    found = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    return REGISTRY.load_family(target)


def new_name(name: str) -> str:
    """Returns the name that transformers 5 uses in memory."""
    if name.startswith(("visual.", "audio_tower.")):
        return "model." + name
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.", "model.audio")):
        return "model.language_model." + name.removeprefix("model.")
    return name


def old_name(name: str) -> str:
    """Returns the name in checkpoints of Qwen2-VL's time."""
    name = new_name(name)
    if name.startswith(("model.visual.", "model.audio_tower.")):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


@pytest.mark.parametrize("rename", [new_name, old_name, lambda name: "thinker." + old_name(name)])
def test_names_old_and_new_are_the_same_weights(saved: Saved, tmp_path: Path, rename: Callable[[str], str]) -> None:
    other = rewrite(saved, tmp_path, rename)
    for found, want in zip(outcome(other, tmp_path), outcome(saved.family, saved.directory), strict=True):
        assert torch.equal(found, want)


def test_the_parts_hold_all_weights_but_audio(saved: Saved) -> None:
    """Their values equal those of the reference."""
    encoder = saved.family.load_encoder(saved.directory, "cpu", "float32", ["image"])
    model = saved.family.load_language_model(saved.directory, "cpu", "float32", register_attention())
    for part, reference in (
        (encoder._tower, saved.model.model.visual),
        (model._part.model, saved.model.model.language_model),
        (model._part.lm_head, saved.model.lm_head),
    ):
        found, want = dict(part.named_parameters()), dict(reference.named_parameters())
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_missing_weight_refuses_the_start(saved: Saved, tmp_path: Path) -> None:
    for path in saved.directory.glob("*.json"):
        shutil.copy(path, tmp_path)
    weights = load_file(saved.directory / "model.safetensors")
    for ending, kind in (("blocks.1.norm1.weight", "VisionTower"), ("layers.2.mlp.up_proj.weight", "TextHalf")):
        (name,) = (name for name in weights if name.endswith(ending) and "audio" not in name)
        rest = {other: value for other, value in weights.items() if other != name}
        save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=f"lacks 1 weights of {kind}"):
            outcome(saved.family, tmp_path)


def test_the_layout_of_older_checkpoints(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Qwen2-VL and Qwen2.5-VL, as first published, have the text model's keys at the top level and M-RoPE by its old
    name."""
    for row in (QWEN2_VL, QWEN2_5_VL):
        directory, target = tmp_path_factory.mktemp("new"), tmp_path_factory.mktemp("old")
        row.build().save_pretrained(directory)
        for name, content in row.files.items():
            (directory / name).write_text(json.dumps(content))
        new = Saved(row, None, directory, REGISTRY.load_family(directory))
        text = json.loads((directory / "config.json").read_text())["text_config"]
        text.pop("model_type")
        rope = text.pop("rope_parameters")
        flat = text | {
            "text_config": None,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
            "sliding_window": 32768,
            "layer_types": None,
        }
        old = rewrite(new, target, old_name, **flat)
        assert old.shape == new.family.shape
        for found, want in zip(outcome(old, target), outcome(new.family, directory), strict=True):
            assert torch.equal(found, want)
        hidden, positions = torch.randn(12, 64), torch.arange(36).reshape(3, 12)
        models = [
            family.load_language_model(path, "cpu", "float32", register_attention())
            for family, path in ((old, target), (new.family, directory))
        ]
        cos, sin = (
            torch.stack([model._part.model.rotary_emb(hidden, positions[:, None])[i] for model in models])
            for i in range(2)
        )
        assert torch.equal(cos[0], cos[1])
        assert torch.equal(sin[0], sin[1])


def test_the_thinker_of_a_whole_omni_model(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("thinker")
    QWEN2_5_OMNI.build().save_pretrained(directory)
    for name, content in QWEN2_5_OMNI.files.items():
        (directory / name).write_text(json.dumps(content))
    alone = Saved(QWEN2_5_OMNI, None, directory, REGISTRY.load_family(directory))
    thinker = json.loads((directory / "config.json").read_text())
    rewrite(alone, tmp_path, lambda name: "thinker." + old_name(name))
    for architecture in ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"):
        config = {"architectures": [architecture], "model_type": "qwen2_5_omni", "thinker_config": thinker}
        (tmp_path / "config.json").write_text(json.dumps(config))
        whole = REGISTRY.load_family(tmp_path)
        assert whole.shape == alone.family.shape
        for found, want in zip(outcome(whole, tmp_path), outcome(alone.family, directory), strict=True):
            assert torch.equal(found, want)


def test_placeholders_of_the_chat_templates(saved: Saved) -> None:
    want = "<|IMAGE|>" if saved.row is QWEN2_5_OMNI else "<|image_pad|>"
    assert saved.family.placeholder_text("image") == want
    assert saved.family.name == saved.row.name
