"""Tests quantised checkpoints: float8 weights equal those of the dequantised checkpoint, to the bit. A weight that
cannot be loaded correctly is refused by its name, and no weight is ignored without an error."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_row import FamilyRow, load_reference
from family_rows_audio import QWEN2_AUDIO
from family_rows_pictures import LLAVA
from family_rows_qwen3_omni import QWEN3_OMNI
from family_rows_qwen_vl import QWEN2_5_VL, QWEN3_VL
from family_rows_text import LLAMA, QWEN3
from quantised_files import FORMS, Pair, quantised, write_checkpoint, write_packed, write_pair
from safetensors.torch import load_file

import modalities.families.qwen_vl.towers as qwen_encoder
from deploy.sizing.stored_weights import read_stored_weights
from fabric.contracts import ConfigError
from llm_workers.compute import register_attention
from modalities.checkpoint_tensors import shard_weights
from modalities.families.causal_lm import language_model
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

ROWS = {row.name: row for row in (QWEN2_5_VL, QWEN3_VL, QWEN3_OMNI, QWEN2_AUDIO, LLAVA, LLAMA, QWEN3)}


class PlainAttention:
    """Computes causal attention over one whole prompt."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        repeats = q.shape[1] // k.shape[1]
        q, k, v = q.transpose(0, 1), k.repeat_interleave(repeats, 1).transpose(0, 1), v.repeat_interleave(repeats, 1)
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v.transpose(0, 1), is_causal=True, scale=scaling)
        return made.transpose(0, 1)


def saved(row: FamilyRow, directory: Path) -> Path:
    row.build().save_pretrained(directory)
    for name, content in row.files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module", params=ROWS, ids=str)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FamilyRow, Path]:
    row = ROWS[request.param]
    return row, saved(row, tmp_path_factory.mktemp(row.name))


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(QWEN2_5_VL, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(QWEN3, tmp_path_factory.mktemp("source"))


def text_parameters(directory: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Returns name -> value of the parameters of transformers' own layers (`test_fused_layers` compares the fused ones
    with them)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "fused", lambda part: part)
        family = REGISTRY.load_family(directory)
        model: Any = family.load_language_model(directory, "cpu", dtype, register_attention())
    return dict(model._part.named_parameters())


def parts(row: FamilyRow, directory: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Returns name -> value of all parameters of the language model and the encoders. The encoders have transformers'
    own blocks (`test_fused_tower` compares the fused ones with them)."""
    family = REGISTRY.load_family(directory)
    found = {f"text.{name}": value for name, value in text_parameters(directory, dtype).items()}
    for modality in row.modalities:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(qwen_encoder, "fused_tower", lambda tower: tower)
            encoder: Any = family.load_encoder(directory, "cpu", dtype, [modality])
        encoder = getattr(encoder, "_modality_to_encoder", {modality: encoder})[modality]
        part = getattr(encoder, "_tower", None) or encoder._part
        found |= {f"{modality}.{name}": value for name, value in part.named_parameters()}
    return found


def logits(directory: Path, dtype: str) -> torch.Tensor:
    family = REGISTRY.load_family(directory)
    model = family.load_language_model(directory, "cpu", dtype, register_attention())
    ids = [(7 * at) % 90 for at in range(40)]
    positions = torch.from_numpy(np.asarray(family.positions(ids, [], []).ids))
    hidden = model.forward(model.embed(torch.tensor(ids)), positions, PlainAttention(), None, None)
    return model.logits(hidden)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


@pytest.mark.parametrize("form", ["fp8-block", "fp8-small-block", "compressed-channel"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_that_of_the_dequantised_checkpoint(
    source: tuple[FamilyRow, Path], tmp_path: Path, form: str, dtype: str
) -> None:
    row, directory = source
    pair = write_pair(directory, tmp_path, FORMS[form])
    assert pair.num_quantised >= 14
    found, expected, original = (parts(row, at, dtype) for at in (pair.quantised, pair.plain, directory))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(found[name], original[name]) for name in expected)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_dequantised_weights(qwen2_5_vl: Path, qwen3: Path, tmp_path: Path, form: str) -> None:
    for directory in (qwen2_5_vl, qwen3):
        pair = write_pair(directory, tmp_path / directory.name, FORMS[form])
        found = logits(pair.quantised, "bfloat16")
        assert torch.equal(found, logits(pair.plain, "bfloat16"))
        assert torch.equal(logits(pair.quantised, "float32"), logits(pair.plain, "float32"))
        assert cosine(found, logits(pair.plain, "float32")) > 0.999


def test_logits_are_close_to_those_of_the_model_that_was_quantised(tmp_path: Path) -> None:
    """The weights have a usual size, because any rounding changes the results of the suite's large weights completely.
    transformers' own model agrees."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=120, hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():  # As after training, layers then add to values that are already there.
        model.model.embed_tokens.weight.mul_(10)
    model.save_pretrained(tmp_path / "source")
    pair = write_pair(tmp_path / "source", tmp_path, FORMS["fp8-block"])
    found, original = logits(pair.quantised, "bfloat16"), logits(tmp_path / "source", "bfloat16")
    assert cosine(found, original) > 0.999
    unscaled = load_file(pair.quantised / "model.safetensors")
    unscaled = {name: value.float() for name, value in unscaled.items() if not name.endswith("_scale_inv")}
    wrong = write_checkpoint(tmp_path / "source", tmp_path / "wrong", unscaled, None)
    assert cosine(logits(wrong, "bfloat16"), original) < 0.9  # Loading without the scales was an earlier error.
    reference = load_reference(pair.plain, "Qwen3ForCausalLM")
    with torch.no_grad():
        ids = torch.tensor([[(7 * at) % 90 for at in range(40)]])
        assert cosine(logits(pair.quantised, "float32"), reference(ids).logits[0]) > 0.99999


def test_what_is_not_quantised_is_taken_as_it_is(qwen2_5_vl: Path, tmp_path: Path) -> None:
    for at, names in enumerate((["visual", "lm_head"], ["re:.*visual.*"])):
        key = "modules_to_not_convert" if at == 0 else "ignore"
        base = FORMS["fp8-block"] if at == 0 else FORMS["compressed-channel"]
        form = base._replace(config={**base.config, key: names})
        pair = write_pair(qwen2_5_vl, tmp_path / key, form, left_alone=r"visual")
        found, original = parts(QWEN2_5_VL, pair.quantised, "float32"), parts(QWEN2_5_VL, qwen2_5_vl, "float32")
        towers = [name for name in found if name.startswith("image.")]
        assert towers
        assert all(torch.equal(found[name], original[name]) for name in towers)
        wrong = write_pair(qwen2_5_vl, tmp_path / key / "wrong", form)
        with pytest.raises(ConfigError, match="says that it is not quantised"):
            parts(QWEN2_5_VL, wrong.quantised, "float32")


def _load_share(rank: int, meeting: str, directories: list[Path], out: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for at, directory in enumerate(directories):
        with shard_weights(2):
            torch.save(text_parameters(directory, "bfloat16"), out / f"{rank}.{at}.pt")
    dist.destroy_process_group()


def test_a_rank_gets_its_share_of_them(tmp_path: Path) -> None:
    """The shares cut through the middle of blocks, and of experts. This process is rank 0 of both models, and one other
    process is rank 1, because a new process takes seconds to import what it needs."""
    rows, checkpoints, directories = (QWEN3, QWEN3_OMNI), [], list[Path]()
    for row in rows:
        directory = saved(row, tmp_path / row.name / "source")
        pair = write_pair(directory, tmp_path / row.name, FORMS["fp8-small-block"])
        checkpoints.append(pair)
        directories += [pair.quantised, pair.plain, directory]
    arguments = (str(tmp_path / "meeting"), directories, tmp_path)
    other = multiprocessing.get_context("spawn").Process(target=_load_share, args=(1, *arguments))
    other.start()
    _load_share(0, *arguments)
    other.join(300)
    assert other.exitcode == 0
    for at, (row, pair) in enumerate(zip(rows, checkpoints, strict=True)):
        whole = parts(row, pair.plain, "bfloat16")
        num_whole = sum(value.numel() for name, value in whole.items() if name.startswith("text."))
        for rank in range(2):
            found, expected, original = (torch.load(tmp_path / f"{rank}.{3 * at + form}.pt") for form in range(3))
            assert found.keys() == expected.keys(), row.name
            assert all(torch.equal(found[name], expected[name]) for name in expected), row.name
            assert any(not torch.equal(found[name], original[name]) for name in expected), row.name
            assert sum(value.numel() for value in found.values()) < num_whole, row.name


def load(directory: Path) -> None:
    parts(QWEN3, directory, "float32")


def test_float8_that_does_not_fit_its_config_is_refused(qwen3: Path, tmp_path: Path) -> None:
    pair = write_pair(qwen3, tmp_path, FORMS["fp8-small-block"])
    stored = load_file(pair.quantised / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    cases: list[tuple[dict[str, torch.Tensor], dict[str, Any] | None, str]] = [
        (stored, None, "no quantization_config"),
        ({key: value for key, value in stored.items() if key != f"{name}_scale_inv"}, {}, "scales are missing"),
        (
            stored | {f"{name}_scale_inv": torch.ones(3, 3)},
            {},
            r"have shape \(3, 3\), which does not fit its shape \(64, 48\)",
        ),
        (stored, {"weight_block_size": [32, 28]}, "does not fit its shape"),
        (stored | {name: stored[name].view(torch.int8)}, {}, "stored as I8"),
        (stored | {name: stored[name].float().to(torch.float8_e5m2)}, {}, "stored as F8_E5M2"),
        (stored | {name: stored[name].float()}, {}, f"1 weights that .* does not use, for example {name}_scale_inv"),
    ]
    for at, (tensors, change, match) in enumerate(cases):
        config = None if change is None else {**FORMS["fp8-small-block"].config, **change}
        with pytest.raises(ConfigError, match=match):
            load(write_checkpoint(qwen3, tmp_path / str(at), tensors, config))


def test_no_weight_is_passed_over_in_silence(source: tuple[FamilyRow, Path], tmp_path: Path) -> None:
    """The exceptions are the parts that a family names, and the buffers that old checkpoints hold."""
    row, directory = source
    weights = load_file(directory / "model.safetensors")
    extra = torch.ones(3)
    known = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3), "talker.model.norm.weight": torch.ones(3)}
    expected = parts(row, directory, "float32")
    found = parts(row, write_checkpoint(directory, tmp_path / "known", weights | known, None), "float32")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    layer = next(name for name in weights if name.endswith("layers.0.self_attn.q_proj.weight"))
    for at, name in enumerate(("unheard.of.weight", layer + "_scale", layer.replace("q_proj", "r_proj"))):
        other = write_checkpoint(directory, tmp_path / str(at), weights | {name: extra}, None)
        ending = name.rpartition(".layers.")[2] if at else name
        with pytest.raises(ConfigError, match=rf"1 weights that \w+ does not use, for example .*{ending}"):
            parts(row, other, "float32")


def test_scales_per_block_of_experts_in_one_tensor() -> None:
    """The slices of `(experts, rows, columns)` begin and end anywhere."""
    from modalities.checkpoint_tensors import FloatSlice

    form = FORMS["fp8-small-block"]
    generator = torch.Generator().manual_seed(1)
    made = [quantised(torch.randn(50, 70, generator=generator), form) for _ in range(3)]
    values, scales, expected = (torch.stack(parts) for parts in zip(*made, strict=True))
    found = FloatSlice(_Stored(values), scales, "w", form.block)
    assert found.get_shape() == [3, 50, 70]
    assert torch.equal(found[...], expected)
    assert torch.equal(found[1:3], expected[1:3])
    assert torch.equal(found[1:2, 13:49, 27:29], expected[1:2, 13:49, 27:29])
    assert torch.equal(found[:, 30:50], expected[:, 30:50])


class _Stored:
    """Returns slices as safetensors does."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def get_shape(self) -> list[int]:
        return list(self._values.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._values[index]


def test_scales_are_not_counted_as_parameters(qwen3: Path, tmp_path: Path) -> None:
    pair: Pair = write_pair(qwen3, tmp_path, FORMS["fp8-tensor"])
    packed, plain = (read_stored_weights(directory) for directory in (pair.quantised, pair.plain))
    assert packed is not None
    assert plain is not None
    assert packed._replace(packed_language=plain.packed_language) == plain
    assert 0 < packed.packed_language.nbytes == packed.packed_language.num_values < packed.num_language


# ------------------------------------------------------------ checkpoints that only vLLM serves

TOWERS = r"visual|vision_tower|audio_tower|multi_modal_projector"


def encoder_parameters(row: FamilyRow, directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    family = REGISTRY.load_family(directory)
    for modality in row.modalities:
        encoder: Any = family.load_encoder(directory, "cpu", "float32", [modality])
        encoder = getattr(encoder, "_modality_to_encoder", {modality: encoder})[modality]
        part = getattr(encoder, "_tower", None) or encoder._part
        found |= {f"{modality}.{name}": value for name, value in part.named_parameters()}
    return found


def test_towers_of_a_packed_checkpoint_are_loaded_where_they_are_not_packed(
    source: tuple[FamilyRow, Path], tmp_path: Path
) -> None:
    row, directory = source
    packed = write_packed(directory, tmp_path / "packed", TOWERS)
    found, expected = encoder_parameters(row, packed), encoder_parameters(row, directory)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match=r"\.qweight is stored as I32, because the checkpoint is quantised by awq"):
        REGISTRY.load_family(packed).load_language_model(packed, "cpu", "float32", register_attention())


def test_a_packed_tower_is_refused_by_the_name_of_its_weight(qwen2_5_vl: Path, tmp_path: Path) -> None:
    packed = write_packed(qwen2_5_vl, tmp_path / "packed")
    with pytest.raises(ConfigError, match=r"the weight \S*visual\S*\.q\w+ is stored as I32, .* quantised by awq"):
        REGISTRY.load_family(packed).load_encoder(packed, "cpu", "float32", ["image"])
