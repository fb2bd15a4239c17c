"""Tests the differences between the tiled families against transformers: weight names of all versions, defaults of
config files, counts at the sizes of real checkpoints, and pictures in every mode. The suite of the family table tests
their answers."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_row import FamilyRow
from family_rows_pictures import END, IMAGE, INTERNVL, LLAVA, LLAVA_ONEVISION, START, build_llava
from hypothesis import given, settings
from hypothesis import strategies as st
from modalities_files import encode, picture
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlavaForConditionalGeneration, Qwen2Config, Qwen3Config
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from fabric.contracts import ConfigError, InvalidMedia, InvalidRequest
from llm_workers.compute import register_attention
from modalities.families.causal_lm import language_model
from modalities.families.causal_lm.text_family import text_shape
from modalities.family import EncoderInput, Family, ImageHeader, MediaOptions, ModelShape
from modalities.media import plan_media
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

ROWS = (LLAVA, LLAVA_ONEVISION, INTERNVL)
NAME_TO_PROCESSOR: dict[str, Any] = {
    "llava": CLIPImageProcessorPil,
    "llava_onevision": LlavaOnevisionImageProcessorPil,
    "internvl": GotOcr2ImageProcessorPil,
}


@pytest.fixture(scope="module", autouse=True)
def plain_layers() -> Iterator[None]:
    """Uses transformers' own decoder layers. `test_fused_layers` compares the fused ones with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "fused", lambda part: part)
        yield


@dataclass(frozen=True)
class Saved:
    row: FamilyRow
    model: Any
    directory: Path
    family: Family


def save(row: FamilyRow, model: Any, directory: Path) -> Saved:
    model.save_pretrained(directory)
    for name, content in row.files.items():
        (directory / name).write_text(json.dumps(content))
    return Saved(row, model, directory, REGISTRY.load_family(directory))


@pytest.fixture(scope="module", params=ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, request.param.build(), tmp_path_factory.mktemp(request.param.name))


def one_picture(family: Family) -> EncoderInput:
    plugin = REGISTRY.modality("image")
    data = encode(picture(150, 90))
    (unit,) = family.preprocess(data, plan_media(family, data, plugin.probe(data, "p"), 0, "p").item)
    return unit


def test_the_encoder_reads_no_value_of_the_device(saved: Saved) -> None:
    """Tensors of the device `meta` have no values, so an encoder that reads one fails there. On CUDA it would wait."""
    encoder: Any = saved.family.load_encoder(saved.directory, "cpu", "float32", ["image"])
    units = [one_picture(saved.family)] * 2
    expected = encoder.encode(units)
    encoder._part.to("meta")
    found = encoder.encode(units)
    assert [each.device.type for each in found] == ["meta", "meta"]
    assert [each.shape for each in found] == [each.shape for each in expected]


def outcome(family: Family, directory: Path) -> list[torch.Tensor]:
    """Returns a feature, embeddings, their logits, and the sums of the weights: everything that depends on a
    checkpoint's weights."""
    feature = family.load_encoder(directory, "cpu", "float32", ["image"]).encode([one_picture(family)])[0]
    model = family.load_language_model(directory, "cpu", "float32", register_attention())
    parameters = [parameter.sum() for parameter in model._part.parameters()]
    embeddings = model.embed(torch.arange(9))
    return [feature, embeddings, model.logits(embeddings), torch.stack(parameters)]


def rewrite(saved: Saved, target: Path, weights: dict[str, torch.Tensor], **config: Any) -> Family:
    """Writes the checkpoint with other weights and changes to its config, and loads its family."""
    for path in saved.directory.glob("*.json"):
        shutil.copy(path, target)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    found = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(found))
    return REGISTRY.load_family(target)


def old_name(name: str) -> str:
    """Returns the name from before transformers 4.52: `language_model.model.`, `language_model.lm_head.`, and
    `vision_tower.` at the top level."""
    name = name.removeprefix("model.")
    if name.startswith("language_model.") and not name.startswith(("language_model.model.", "language_model.lm_head.")):
        name = name.replace("language_model.", "language_model.model.", 1)
    return "language_model." + name if name.startswith("lm_head.") else name


def test_weight_names_of_every_age(saved: Saved, tmp_path: Path) -> None:
    """The names are those of the model itself, those of the first checkpoints, and those of the saved file."""
    weights = load_file(saved.directory / "model.safetensors")
    own = {name: value.clone() for name, value in saved.model.state_dict().items()}
    old = {old_name(name): value for name, value in own.items()}
    if saved.row is LLAVA:  # CLIP's tower had one more level in its names.
        old = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in old.items()}
    assert not own.keys() & old.keys()
    want = outcome(saved.family, saved.directory)
    for number, names in enumerate((own, old, weights)):
        target = tmp_path / str(number)
        target.mkdir()
        for found, expected in zip(outcome(rewrite(saved, target, names), target), want, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("half", "pattern"), [("encoder", "multi_modal_projector"), ("text", "layers.1.self_attn.q")])
def test_a_missing_weight_refuses_the_start(saved: Saved, tmp_path: Path, half: str, pattern: str) -> None:
    weights = load_file(saved.directory / "model.safetensors")
    is_text = half == "text"
    kept = {name: w for name, w in weights.items() if pattern not in name or is_text != ("language_model" in name)}
    assert len(kept) < len(weights)
    family = rewrite(saved, tmp_path, kept)
    load = partial(family.load_encoder, modalities=["image"])
    if is_text:
        load = partial(family.load_language_model, attention_name=register_attention())
    with pytest.raises(ConfigError, match="lacks"):
        load(tmp_path, "cpu", "float32")


def test_halves_hold_nothing_twice(saved: Saved) -> None:
    encoder = saved.family.load_encoder(saved.directory, "cpu", "bfloat16", ["image"])
    model = saved.family.load_language_model(saved.directory, "cpu", "bfloat16", register_attention())
    counts = [sum(p.numel() for p in part.parameters()) for part in (encoder._part, model._part, saved.model)]
    assert counts[0] + counts[1] == counts[2]
    (feature,) = encoder.encode([one_picture(saved.family)])
    assert feature.dtype == model.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="int8"):
        saved.family.load_encoder(saved.directory, "cpu", "int8", ["image"])
    with pytest.raises(ConfigError, match="not registered"):
        saved.family.load_language_model(saved.directory, "cpu", "float32", "unheard_of")
    with pytest.raises(ConfigError, match="mask function"):
        saved.family.load_language_model(saved.directory, "cpu", "float32", "sdpa")


def test_a_tied_head(saved: Saved, tmp_path: Path) -> None:
    weights = load_file(saved.directory / "model.safetensors")
    (head,) = [name for name in weights if name.endswith("lm_head.weight")]
    kept = {name: value for name, value in weights.items() if name != head}
    family = rewrite(saved, tmp_path, kept, tie_word_embeddings=True)
    model = family.load_language_model(tmp_path, "cpu", "float32", register_attention())
    hidden = torch.randn(3, family.shape.hidden_size)
    table = model.embed(torch.arange(family.shape.vocab_size))
    torch.testing.assert_close(model.logits(hidden), hidden @ table.T)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_what_a_text_config_leaves_out_is_transformers_default(kind: Any) -> None:
    config = kind()
    assert text_shape({"model_type": config.model_type}) == ModelShape(
        hidden_size=config.hidden_size,
        num_levels=1,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
    )


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "L", "1", "I;16", "CMYK"])
def test_pictures_in_every_mode(saved: Saved, mode: str) -> None:
    image = picture(101, 67, mode)
    data = encode(image, "TIFF" if mode == "CMYK" else "PNG")
    plugin = REGISTRY.modality("image")
    (unit,) = saved.family.preprocess(data, plan_media(saved.family, data, plugin.probe(data, "p"), 0, "p").item)
    kind = NAME_TO_PROCESSOR[saved.row.name]
    options = {"crop_to_patches": True} if saved.row is INTERNVL else {}
    made = kind.from_pretrained(saved.directory)([Image.open(io.BytesIO(data))], return_tensors="np", **options)
    np.testing.assert_array_equal(unit.pixels.reshape(-1), np.asarray(made["pixel_values"]).reshape(-1))


def test_a_picture_that_is_not_what_was_planned_is_refused(saved: Saved) -> None:
    plugin = REGISTRY.modality("image")
    data, other = encode(picture(150, 90)), encode(picture(50, 190))
    item = plan_media(saved.family, data, plugin.probe(data, "p"), 0, "messages.0.content.1").item
    with pytest.raises(InvalidMedia, match="truncated") as caught:
        saved.family.preprocess(data[: len(data) // 2], item)
    assert caught.value.param == "messages.0.content.1"
    if saved.row is not LLAVA:  # All pictures of LLaVA take the same number of rows.
        with pytest.raises(InvalidMedia, match="were planned from its header"):
            saved.family.preprocess(other, item)


@pytest.mark.parametrize("size", [(150, 90), (90, 151), (28, 28)])
def test_a_picture_shown_smaller(saved: Saved, size: tuple[int, int]) -> None:
    """The feature has the planned size, never more rows than the whole picture's, and fewer where the picture has
    less."""
    data, header = encode(picture(*size)), ImageHeader("PNG", *size, "RGB")
    half = plan_media(saved.family, data, header, 0, "p", options=MediaOptions(reduction=1)).item
    whole = saved.family.plan(header)
    assert half.cost <= whole.cost
    assert sum(half.unit_tokens) <= sum(whole.unit_tokens)
    if size[0] > 28 and saved.row is not LLAVA:
        assert half.cost < whole.cost
    (unit,) = saved.family.preprocess(data, half)
    (found,) = saved.family.load_encoder(saved.directory, "cpu", "float32", ["image"]).encode([unit])
    assert (found.shape[1],) == half.unit_tokens


@pytest.mark.parametrize("change", [{"vision_feature_select_strategy": "full"}, {"vision_feature_layer": [0, -2]}])
def test_llava_with_other_features(tmp_path: Path, change: dict[str, Any]) -> None:
    config = build_llava().config
    for key, value in change.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    whole = save(LLAVA, LlavaForConditionalGeneration(config).eval(), tmp_path)
    unit = one_picture(whole.family)
    (found,) = whole.family.load_encoder(tmp_path, "cpu", "float32", ["image"]).encode([unit])
    with torch.no_grad():
        (want,) = whole.model.get_image_features(torch.from_numpy(unit.pixels), return_dict=True).pooler_output
    torch.testing.assert_close(found[0], want)
    plan = whole.family.plan(ImageHeader("PNG", 150, 90, "RGB"))
    assert plan.unit_tokens == (len(want),)


def test_internvl_puts_its_marks_around_each_picture(tmp_path: Path) -> None:
    family = save(INTERNVL, INTERNVL.build(), tmp_path).family
    plans = [family.plan(ImageHeader("PNG", *size, "RGB")) for size in ((200, 80), (28, 28))]
    expanded = family.expand([7, IMAGE, 8, IMAGE], plans)
    marks = SimpleNamespace(start_image_token="<", image_token="x", end_image_token=">", image_seq_length=4)
    num_tiles = {"num_patches": [plan.grid[0] for plan in plans]}
    texts = [InternVLProcessor.replace_image_token(marks, num_tiles, index) for index in range(2)]
    ids = {"<": START, "x": IMAGE, ">": END}
    assert expanded.token_ids == [7, *(ids[c] for c in texts[0]), 8, *(ids[c] for c in texts[1])]
    assert [expanded.token_ids[run.offset : run.end] for run in expanded.placeholders] == [
        [IMAGE] * plan.unit_tokens[0] for plan in plans
    ]
    with pytest.raises(InvalidRequest, match="1 placeholders for 2"):
        family.expand([IMAGE], plans)


def real(directory: Path, row: FamilyRow, vision: dict[str, Any], processor: dict[str, Any]) -> Family:
    """Writes the config files of a checkpoint of ordinary size, without weights, and loads its family."""
    files = dict(row.files) | {
        "preprocessor_config.json": processor,
        "config.json": {
            "architectures": [type(row.build()).__name__],
            "text_config": {"model_type": "qwen2"},
            "vision_config": vision,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return REGISTRY.load_family(directory)


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Has 384 pixels, 36 canvases and anyres_max_9, as the released checkpoints have."""
    vision = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    processor = {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 384, "width": 384}}
    return real(tmp_path_factory.mktemp("onevision"), LLAVA_ONEVISION, vision, processor)


@pytest.fixture(scope="module")
def internvl(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Has 448 pixels and up to 12 tiles, as the released checkpoints have."""
    processor = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}}
    return real(tmp_path_factory.mktemp("internvl"), INTERNVL, {}, processor)


SIDES = st.one_of(st.integers(1, 3000), st.integers(1, 40), st.sampled_from([384, 448, 768, 896, 1152, 2304, 9000]))


@settings(deadline=None, max_examples=400)
@given(width=SIDES, height=SIDES)
def test_llava_onevision_counts_at_real_sizes(onevision: Family, width: int, height: int) -> None:
    processor = SimpleNamespace(
        image_processor=LlavaOnevisionImageProcessorPil(), num_image_tokens=729, vision_aspect_ratio="anyres_max_9"
    )
    processor._get_unpadded_features = partial(LlavaOnevisionProcessor._get_unpadded_features, processor)
    want = LlavaOnevisionProcessor._get_number_of_features(processor, height, width, 384, 384)
    plan = onevision.plan(ImageHeader("JPEG", width, height, "RGB"))
    assert plan.unit_tokens == (want,)
    assert plan.grid[1:] == (27, 27)
    assert plan.cost == plan.grid[0] * 729


@settings(deadline=None, max_examples=400)
@given(width=SIDES, height=SIDES)
def test_internvl_counts_at_real_sizes(internvl: Family, width: int, height: int) -> None:
    processor = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    num_tiles = processor.get_number_of_image_patches(height, width)
    plan = internvl.plan(ImageHeader("JPEG", width, height, "RGB"))
    assert (plan.grid, plan.unit_tokens) == ((num_tiles, 32, 32), (num_tiles * 256,))
