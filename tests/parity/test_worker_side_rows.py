"""Tests that rows of hidden layers, stored in pages in any chunks, equal those of one whole transformers forward
pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_worker_runner import BLOCK_SIZE, Features, Script
from worker_tiny_model import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, TinyModel

from fabric.contracts import ConfigError
from llm_workers.compute import PagedKV, Runner, make_side_rows, select_backend
from llm_workers.compute.paged_kv import SideRows
from llm_workers.own_engine import read_rows
from llm_workers.scheduling import StepPlan


class LayeredTiny(TinyModel):
    def layer(self, index: int) -> torch.nn.Module:
        return self._model.layers[index]


@pytest.fixture(scope="module")
def model() -> LayeredTiny:
    return LayeredTiny()


def runner_of(model: LayeredTiny) -> tuple[Runner, SideRows]:
    kv = PagedKV(NUM_LAYERS, 100, BLOCK_SIZE, (NUM_KV_HEADS, HEAD_DIM), torch.float32, torch.device("cpu"))
    side = make_side_rows(model, kv, (("low", 0), ("high", 2)))
    assert side is not None
    return Runner(model, kv, Features(), select_backend("sdpa", kv), side), side


def scripts(*lengths: int) -> list[Script]:
    free = np.random.default_rng(5).permutation(100).astype(np.int64)
    made = []
    for number, length in enumerate(lengths):
        script = Script(f"s{number}", number, length)
        script.block_ids, free = free[: -(-length // BLOCK_SIZE)], free[-(-length // BLOCK_SIZE) :]
        made.append(script)
    return made


def whole_layer(model: LayeredTiny, script: Script, layer: int) -> torch.Tensor:
    """Returns a layer's rows `(num_tokens, hidden)`, computed with transformers' own attention."""
    seen: list[torch.Tensor] = []
    hook = model.reference.layers[layer].register_forward_hook(
        lambda module, inputs, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    model.whole(torch.from_numpy(script.ids), torch.from_numpy(script.positions), {})
    hook.remove()
    return seen[0][0]


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_rows_are_those_of_the_whole_forward(model: LayeredTiny, chunk_size: int) -> None:
    runner, side = runner_of(model)
    asking, plain, other = scripts(23, 30, 9)
    names = {asking: frozenset({"low", "high"}), plain: frozenset(), other: frozenset({"low"})}
    for start in range(0, 30, chunk_size):
        chunks = [
            replace(script.chunk(start, min(start + chunk_size, len(script.ids))), side_names=names[script])
            for script in (plain, asking, other)
            if start < len(script.ids)
        ]
        runner.execute(StepPlan(0, tuple(chunks)))
    for script, name, layer in ((asking, "low", 0), (asking, "high", 2), (other, "low", 0)):
        found = side.rows(name, script.block_ids, 0, len(script.ids))
        torch.testing.assert_close(found, whole_layer(model, script, layer), atol=2e-4, rtol=1e-4)
    assert not side.rows("low", plain.block_ids, 0, 30).any()
    assert not side.rows("high", other.block_ids, 0, 9).any()


def test_rows_go_along_when_their_block_is_copied(model: LayeredTiny) -> None:
    runner, side = runner_of(model)
    num_shared = 2 * BLOCK_SIZE + 2
    script, other = scripts(num_shared + 1, BLOCK_SIZE)
    names = frozenset({"low"})
    runner.execute(StepPlan(0, (replace(script.chunk(0, num_shared), side_names=names),)))
    own = script.block_ids.copy()
    own[2] = other.block_ids[0]
    one = replace(script.chunk(num_shared, num_shared + 1), side_names=names)
    runner.execute(StepPlan(1, (replace(one, block_ids=own, copied_from=int(script.block_ids[2])),)))
    found = side.rows("low", own, 0, num_shared + 1)
    torch.testing.assert_close(found, whole_layer(model, script, 0), atol=2e-4, rtol=1e-4)
    assert not side.rows("low", script.block_ids, num_shared, num_shared + 1).any(), "the shared block was written to"


def test_who_does_not_ask_pays_nothing(model: LayeredTiny) -> None:
    runner, side = runner_of(model)
    (plain,) = scripts(12)
    runner.execute(StepPlan(0, (plain.chunk(0, 12),)))
    assert not side._name_to_pages
    assert not any(model.layer(index)._forward_hooks for index in range(NUM_LAYERS))


def test_hooks_leave_with_a_step_that_fails(model: LayeredTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = runner_of(model)
    (script,) = scripts(8)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute(StepPlan(0, (replace(script.chunk(0, 8), side_names=frozenset({"low"})),)))
    assert not model.layer(0)._forward_hooks


def test_a_row_that_is_stored_and_not_finite_marks_its_chunk(model: LayeredTiny) -> None:
    """What the last layer computes from the spoilt value after its attention reaches no other row."""
    runner, _ = runner_of(model)
    chunks = tuple(replace(script.chunk(0, 20), side_names=frozenset({"high"})) for script in scripts(20, 20))

    def spoil(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(1, torch.tensor([25]), float("inf"))

    with model.layer(NUM_LAYERS - 1).register_forward_hook(spoil):
        result = runner.execute(StepPlan(0, chunks))
    assert result.not_finite == {chunks[1].sequence_id}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_next_stage_gets_rows_without_a_loss(model: LayeredTiny, dtype: torch.dtype) -> None:
    kv = PagedKV(NUM_LAYERS, 100, BLOCK_SIZE, (NUM_KV_HEADS, HEAD_DIM), dtype, torch.device("cpu"))
    side = make_side_rows(model, kv, (("high", 2),))
    assert side is not None
    (script,) = scripts(11)
    side._pages("high", 6).normal_()
    expected = side.rows("high", script.block_ids, 3, 11)
    found = torch.from_numpy(read_rows(side, script.block_ids, 3, 11))
    assert (found.element_size(), found.shape) == (2 if dtype is torch.bfloat16 else 4, (8, 6))
    rows = found.view(torch.bfloat16) if dtype is torch.bfloat16 else found
    assert torch.equal(rows.float(), expected.float())


def test_a_layer_that_is_not_there_is_refused(model: LayeredTiny) -> None:
    kv = PagedKV(NUM_LAYERS, 4, BLOCK_SIZE, (NUM_KV_HEADS, HEAD_DIM), torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="layers that the model does not have"):
        make_side_rows(model, kv, (("deep", 99),))
    with pytest.raises(ConfigError, match="layers that the model does not have"):
        make_side_rows(TinyModel(), kv, (("low", 0),))
    assert make_side_rows(TinyModel(), kv, ()) is None
