"""Tests that decoder layers with few large operations compute the same hidden states as the operations they replace."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from deploy.demo.build import demo_checkpoint
from llm_workers.compute import PagedKV, SequenceRows, register_attention
from llm_workers.compute.attention import SdpaStep
from modalities.checkpoint_tensors import shard_weights
from modalities.families.causal_lm import fused_layers as row_operations
from modalities.families.causal_lm.fused_layers import (
    FusedLayer,
    GatedMlp,
    OtherMlp,
    fused,
    native_norm,
    native_rotation,
    rotate,
    rounded_size,
    run_layers,
    run_unfused,
)
from modalities.families.causal_lm.language_model import TextModel
from modalities.families.causal_lm.projection import PackedProjection, Projection, is_packable, project
from modalities.registry import REGISTRY

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama with gelu": (LlamaForCausalLM, LlamaConfig(**SIZES, hidden_act="gelu")),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
}
NUM_TOKENS = 37


def part_of(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    kind, config = MODELS[name]
    config = copy.deepcopy(config)
    config._attn_implementation = register_attention()
    part = kind(config)
    for parameter in part.parameters():
        parameter.data = (torch.randn_like(parameter) * 0.25 + (parameter.dim() == 1)).to(dtype)
    return part.to(dtype).eval()


def hidden_of(part: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the last hidden states and logits of two prompts in one step, each processed as two chunks and one
    token."""
    model = TextModel(part)
    head_dim = part.config.hidden_size // 4 if part.config.model_type == "qwen2" else 16
    kv = PagedKV(3, 16, 8, (2, head_dim), dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 61, (2, NUM_TOKENS), generator=generator)
    tables = [np.arange(8, dtype=np.int64)[::-1].copy(), np.arange(8, 16, dtype=np.int64)]
    hidden, logits = [], []
    for start, end in ((0, 20), (20, 36), (36, 37)):
        size = end - start
        rows = [SequenceRows(place * size, start, size, table) for place, table in enumerate(tables)]
        positions = torch.arange(start, end).repeat(2)[None]
        embeddings = model.embed(ids[:, start:end].reshape(-1))
        before = embeddings.clone()
        with torch.inference_mode():
            hidden.append(model.forward(embeddings, positions, SdpaStep(kv, rows), None, None))
            logits.append(model.logits(hidden[-1]))
        assert torch.equal(embeddings, before)
    return torch.cat(hidden), torch.cat(logits)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_in_single_precision(name: str) -> None:
    part = part_of(name, torch.float32)
    expected = hidden_of(copy.deepcopy(part), torch.float32)
    assert all(isinstance(layer, FusedLayer) for layer in fused(part).model.layers)
    for ours, theirs in zip(hidden_of(part, torch.float32), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_no_further_from_the_truth(name: str) -> None:
    """The truth is what the same weights compute in single precision."""
    part = part_of(name, torch.bfloat16)
    truth, _ = hidden_of(copy.deepcopy(part).float(), torch.float32)
    theirs, _ = hidden_of(copy.deepcopy(part), torch.bfloat16)
    ours, _ = hidden_of(fused(part), torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    error, allowed = ((each.float() - truth).square().mean().sqrt().item() for each in (ours, theirs))
    assert error <= 1.25 * allowed + 1e-3


def test_what_is_not_known_stays_as_it_is() -> None:
    mlps = [fused(part_of(name, torch.float32)).model.layers[0].mlp for name in ("llama", "llama with gelu")]
    assert [type(mlp) for mlp in mlps] == [GatedMlp, OtherMlp]
    part = part_of("llama", torch.float32)
    before = list(part.model.layers)
    with shard_weights(2):
        assert list(fused(part).model.layers) == before
    part.model.layers[1] = type("SomeDecoderLayer", (nn.Identity,), {})()
    after = list(fused(part).model.layers)
    assert [isinstance(layer, FusedLayer) for layer in after] == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_wanted_alone_are_as_among_all(name: str, dtype: torch.dtype) -> None:
    """The last layer computes its result only for the wanted rows, but writes the pages of all rows."""
    part = part_of(name, dtype)
    model = TextModel(fused(part))
    ids = torch.arange(40) % 61
    rows = [SequenceRows(0, 0, 13, np.array([3, 1])), SequenceRows(13, 0, 27, np.array([0, 2, 4, 5]))]
    seen, pages, finished = [], [], []
    part.model.layers[-1].mlp.register_forward_hook(lambda module, inputs, output: finished.append(len(output)))
    for wanted in (None, torch.tensor([12, 39]), torch.arange(40)):
        kv = PagedKV(3, 8, 8, (2, part.model.layers[0].attention.head_dim), dtype, torch.device("cpu"))
        with torch.inference_mode():
            hidden = model.forward(model.embed(ids), torch.arange(40)[None], SdpaStep(kv, rows), None, None, wanted)
        seen.append(hidden)
        pages.append(torch.stack(kv.layer(2)))
    assert finished == [40, 2, 40]
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(seen[1], seen[0][[12, 39]], **tolerance)
    torch.testing.assert_close(seen[2], seen[0], **tolerance)
    assert all(torch.equal(each, pages[0]) for each in pages)


def test_rounded_steps_are_few_and_little_larger() -> None:
    sizes = [rounded_size(num_tokens) for num_tokens in range(1, 4097)]
    assert all(num_tokens <= size < num_tokens * 1.125 for num_tokens, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
    assert len(set(sizes[:1024])) < 104


@pytest.mark.skipif(not is_packable(torch.zeros(1, dtype=torch.bfloat16)), reason="no bfloat16 in oneDNN here")
def test_a_step_of_any_size_is_as_its_tokens_alone() -> None:
    """The model computes 67 tokens as 72. The padding has no effect on hidden states or pages."""
    model = TextModel(fused(part_of("qwen3", torch.bfloat16)))
    kv = PagedKV(3, 20, 8, (2, 16), torch.bfloat16, torch.device("cpu"))
    ids = torch.arange(67) % 61
    seen: list[torch.Tensor] = []
    with torch.inference_mode():
        for start, end in ((0, 67), (0, 40), (40, 67)):
            rows = [SequenceRows(0, start, end - start, np.arange(1, 10, dtype=np.int64))]
            embeddings, positions = model.embed(ids[start:end]), torch.arange(start, end)[None]
            seen.append(model.forward(embeddings, positions, SdpaStep(kv, rows), None, None))
    assert [len(hidden) for hidden in seen] == [67, 40, 27]
    torch.testing.assert_close(torch.cat(seen[1:]), seen[0], atol=0.1, rtol=0.1)
    keys, _ = kv.layer(2)
    assert not keys[:8].any()
    assert not keys[8 + 67 :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_and_what_follows_them(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(24, size, bias=has_bias, dtype=dtype) for size in (8, 40)]
    x, other = torch.randn(5, 24, dtype=dtype), torch.randn(5, 48, dtype=dtype)
    product = torch.cat([linear(x) for linear in linears], dim=1).detach().float()
    joined = project(*linears)
    assert isinstance(joined, PackedProjection if is_packable(linears[0].weight) else Projection)
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for ours, expected in (
        (joined(x), product),
        (joined.silu(x), nn.functional.silu(product)),
        (joined.times(x, other), product * other.float()),
        (joined.plus(x, other), product + other.float()),
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), expected, **tolerance)


@pytest.mark.skipif(not is_packable(torch.zeros(1, dtype=torch.bfloat16)), reason="no bfloat16 in oneDNN here")
def test_deepstack_levels_meet_their_rows_in_a_rounded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the demo model in half precision, in a rounded step, with single precision in a step that is not
    rounded."""
    family, hidden = REGISTRY.load_family(demo_checkpoint()), []
    shape = family.shape
    torch.manual_seed(1)
    ids, rows = torch.randint(300, 900, (70,)), torch.arange(5, 30)
    levels = torch.randn(shape.num_levels - 1, len(rows), shape.hidden_size)
    assert len(levels)
    for dtype in ("float32", "bfloat16"):
        model = family.load_language_model(demo_checkpoint(), "cpu", dtype, register_attention())
        monkeypatch.setattr(model, "_is_padded", dtype == "bfloat16")
        kv = PagedKV(shape.num_layers, 9, 8, (shape.num_kv_heads, shape.head_dim), model.dtype, model.device)
        step = SdpaStep(kv, [SequenceRows(0, 0, 70, np.arange(9, dtype=np.int64))])
        with torch.inference_mode():
            positions = torch.arange(70).expand(3, -1)
            hidden.append(model.forward(model.embed(ids), positions, step, rows, levels.to(model.dtype)).float())
    single, half = hidden
    assert half.shape == single.shape == (70, shape.hidden_size)
    assert torch.nn.functional.cosine_similarity(single, half).min() > 0.99


@pytest.mark.parametrize("wanted", [None, torch.tensor([29, 69])], ids=["all rows", "some rows"])
@pytest.mark.parametrize("has_last_level", [False, True])
def test_the_loop_over_fused_layers_is_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch, wanted: torch.Tensor | None, has_last_level: bool
) -> None:
    """Compares positions with three different axes, and levels after some of the layers and after all."""
    family, hidden, pages = REGISTRY.load_family(demo_checkpoint()), [], []
    shape = family.shape
    model = family.load_language_model(demo_checkpoint(), "cpu", "float32", register_attention())
    torch.manual_seed(1)
    ids, rows, positions = torch.randint(300, 900, (70,)), torch.arange(5, 30), torch.randint(0, 70, (3, 70))
    levels = torch.randn(shape.num_layers if has_last_level else shape.num_levels - 1, len(rows), shape.hidden_size)
    for run in (run_layers, run_unfused):
        monkeypatch.setattr(model, "_run", run)
        kv = PagedKV(shape.num_layers, 9, 8, (shape.num_kv_heads, shape.head_dim), model.dtype, model.device)
        step = SdpaStep(kv, [SequenceRows(0, 0, 70, np.arange(9, dtype=np.int64))])
        with torch.inference_mode():
            embeddings = model.embed(ids)
            hidden.append(model.forward(embeddings, positions, step, rows, levels, wanted))
        pages.append(torch.stack([torch.stack(kv.layer(index)) for index in range(shape.num_layers)]))
    assert hidden[0].shape == (70 if wanted is None else 2, shape.hidden_size)
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(pages[0], pages[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_norm_and_rotation_in_c_are_torchs(monkeypatch: pytest.MonkeyPatch, num_rows: int, dtype: torch.dtype) -> None:
    if row_operations._library(dtype) is None:
        pytest.skip("no compiler, or no AVX512-BF16")
    torch.manual_seed(num_rows)
    norm = Qwen2RMSNorm(96, eps=1e-6).to(dtype)
    norm.weight.data.normal_()
    x = (torch.randn(num_rows, 96) * 3).to(dtype)
    ours, expected = native_norm(x, norm.weight.detach(), norm.variance_epsilon), norm(x)
    assert ours is not None
    torch.testing.assert_close(ours, expected, atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6)
    if dtype == torch.bfloat16:
        assert (ours != expected).float().mean() < 0.01, "a sum in another order moves few values to their neighbours"
    heads = torch.randn(num_rows, 5, 64).to(dtype)[:, :4]
    angles = torch.rand(1, num_rows, 32).mul(6).repeat(1, 1, 2)
    table = (angles.cos().to(dtype), angles.sin().to(dtype))
    ours = native_rotation(heads, *(each[0] for each in table))
    assert ours is not None
    assert ours.is_contiguous()
    with monkeypatch.context() as patched:
        patched.setattr(row_operations, "_library", lambda _: None)
        expected = rotate(heads, *table)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
