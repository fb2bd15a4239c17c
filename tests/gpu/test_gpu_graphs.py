"""Checks recorded decode steps against the same steps run one kernel at a time. The tests are skipped without a CUDA
device."""

from __future__ import annotations

import pytest
import torch

from deploy.demo.build import demo_checkpoint
from llm_workers.compute import PagedKV, SequenceRows, register_attention, select_backend, with_graphs
from llm_workers.compute.cuda_graphs import GraphedModel
from llm_workers.compute.varlen_attention import has_block_tables
from modalities.registry import REGISTRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not has_block_tables(), reason="this torch's kernel takes no block tables"),
]
PAGE, STEPS = 256, 6


def decoded(*, has_graphs: bool) -> list[torch.Tensor]:
    """Returns hidden states of prompts of 5, 255 and 300 tokens and of six steps after them; one sequence leaves on the
    way."""
    family = REGISTRY.load_family(demo_checkpoint())
    model = family.load_language_model(demo_checkpoint(), "cuda", "bfloat16", register_attention())
    shape = family.shape
    heads = (shape.num_kv_heads, shape.head_dim)
    kv = PagedKV(shape.num_layers, 8, PAGE, heads, model.dtype, model.device)
    for layer in range(shape.num_layers):
        for pages in kv.layer(layer):
            pages.fill_(float("nan"))  # values of a previous owner must never show
    if has_graphs:
        model = with_graphs(model, kv, 1024)
        assert isinstance(model, GraphedModel)
    backend, tables = select_backend("auto", kv), torch.randperm(6, generator=torch.Generator().manual_seed(1))
    tables = tables.view(3, 2).numpy()
    ids, lengths = torch.arange(2048, device="cuda").mul_(7).add_(3).remainder_(900), [5, 255, 300]
    seen = []
    with torch.inference_mode():
        for step in range(STEPS + 1):
            sizes = lengths if step == 0 else [1] * (3 if step < 4 else 2)
            starts = [0, 0, 0] if step == 0 else [length + step - 1 for length in lengths]
            rows, at = [], 0
            for start, size, table in zip(starts, sizes, tables, strict=False):
                rows.append(SequenceRows(at, start, size, table[: -(-(start + size) // PAGE)]))
                at += size
            places = torch.cat([torch.arange(row.start, row.context, device="cuda") for row in rows])
            hidden = model.forward(model.embed(ids[places]), places.expand(3, -1), backend(kv, rows), None, None)
            seen.append(hidden.clone())
    return seen


def test_replayed_steps_equal_steps_as_they_come(caplog: pytest.LogCaptureFixture) -> None:
    """Compares states of up to 4.3. Steps of three rows are replayed with four, and their products round differently.
    Measured on an H200 with attention over gathered pages: with and without graphs, the states of decode steps are at
    most 0.05 from those of float32, and as much from each other."""
    replayed = decoded(has_graphs=True)
    assert [record for record in caplog.records if record.name == GraphedModel.__module__] == []  # No step was refused.
    for ours, expected in zip(replayed, decoded(has_graphs=False), strict=True):
        torch.testing.assert_close(ours, expected, atol=6e-2, rtol=2e-2)
