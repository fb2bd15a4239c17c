"""Tests that the runner on paged KV computes the logits of one whole transformers forward pass, at every chunk size,
with features."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from worker_tiny_model import HEAD_DIM, HIDDEN, NUM_KV_HEADS, NUM_LAYERS, VOCAB, TinyModel

from fabric.contracts import MmHash, RequestId, SamplingParams, SequenceId, UnitKey
from llm_workers.compute import PagedKV, Runner, select_backend
from llm_workers.scheduling import NOT_FINITE_TOKEN, Chunk, Splice, StepPlan
from llm_workers.scheduling.step_plan import Decodes
from llm_workers.worker_config import WorkerConfig

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
NUM_LEVELS = 3


class Features(dict[UnitKey, torch.Tensor]):
    def feature(self, unit: UnitKey) -> torch.Tensor:
        return self[unit]


class Script:
    """Holds a sequence whose prompt is given: ids, positions, and runs (offset, length, unit, row)."""

    def __init__(
        self, name: str, seed: int, num_tokens: int, runs: Sequence[tuple[int, int, UnitKey, int]] = ()
    ) -> None:
        rng = np.random.default_rng(seed)
        self.sequence_id = SequenceId(RequestId(name), 0, 0)
        self.ids = rng.integers(0, VOCAB, num_tokens)
        self.positions = np.stack([np.arange(num_tokens) // (axis + 1) for axis in range(3)])
        self.runs = runs
        self.block_ids = None

    def chunk(self, start: int, end: int) -> Chunk:
        splices = []
        for offset, length, unit, row in self.runs:
            low, high = max(start, offset), min(end, offset + length)
            if low < high:
                splices.append(Splice(low - start, high - low, unit, row + low - offset))
        sampling = GREEDY if end == len(self.ids) else None
        blocks = self.block_ids[: -(-end // BLOCK_SIZE)]
        return Chunk(
            self.sequence_id,
            start,
            end - start,
            self.ids[start:end],
            self.positions[:, start:end],
            blocks,
            tuple(splices),
            sampling,
        )


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def features() -> Features:
    torch.manual_seed(3)
    return Features(
        {UnitKey(MmHash(name), 0): torch.randn(NUM_LEVELS, n, HIDDEN) for name, n in (("cat", 12), ("dog", 7))}
    )


def scripts_of(features: Features) -> list[Script]:
    cat, dog = features
    scripts = [
        Script("plain", 1, 37),
        Script("one", 2, 41, ((5, 12, cat, 0),)),
        Script("two", 3, 50, ((2, 7, dog, 0), (20, 5, cat, 0), (30, 7, cat, 5))),
        Script("short", 4, 3),
    ]
    free = np.random.default_rng(9).permutation(100).astype(np.int64)
    for script in scripts:
        needed = -(-len(script.ids) // BLOCK_SIZE)
        script.block_ids, free = free[:needed], free[needed:]
    return scripts


def runner_of(model: TinyModel, features: Features, least_s: Callable[[StepPlan], float] | None = None) -> Runner:
    kv = PagedKV(NUM_LAYERS, 100, BLOCK_SIZE, (NUM_KV_HEADS, HEAD_DIM), torch.float32, torch.device("cpu"))
    return Runner(model, kv, features, select_backend("sdpa", kv), least_s=least_s)


def last_logits(model: TinyModel, script: Script, features: Features) -> torch.Tensor:
    spliced = {offset: features[unit][:, row : row + length] for offset, length, unit, row in script.runs}
    return model.whole(torch.from_numpy(script.ids), torch.from_numpy(script.positions), spliced)[-1]


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64])
def test_chunks_of_a_mixed_batch_give_the_whole_forward(
    model: TinyModel, features: Features, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(model, "logits", lambda hidden: seen.append((hidden @ model.head.T).float()) or seen[-1])
    runner, scripts = runner_of(model, features), scripts_of(features)
    results, done = {}, dict.fromkeys(scripts, 0)
    while any(done[script] < len(script.ids) for script in scripts):
        chunks = []
        for script in scripts:
            end = min(done[script] + chunk_size, len(script.ids))
            if done[script] < end:
                chunks.append(script.chunk(done[script], end))
                done[script] = end
        before = len(seen)
        drawn = runner.execute(StepPlan(0, tuple(chunks))).token_ids
        rows = seen[before] if len(seen) > before else []
        results |= {each: (token, row) for (each, (token,)), row in zip(drawn.items(), rows, strict=True)}
    monkeypatch.undo()
    assert len(results) == len(scripts)
    for script in scripts:
        token, logits = results[script.sequence_id]
        expected = last_logits(model, script, features)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
        assert token == int(expected.argmax())


def test_features_decide_the_result(model: TinyModel, features: Features) -> None:
    """The parity test above would prove nothing if the splice had no influence."""
    script = scripts_of(features)[1]
    with_features = last_logits(model, script, features)
    for level in range(NUM_LEVELS):
        changed = Features({unit: feature.clone() for unit, feature in features.items()})
        next(iter(changed.values()))[level] += 1.0
        assert (last_logits(model, script, changed) - with_features).abs().max() > 1e-2


def test_a_slowed_step_gives_the_same_and_counts_as_forward_time(model: TinyModel, features: Features) -> None:
    script = scripts_of(features)[0]
    plan = StepPlan(0, (script.chunk(0, 37),))
    config = WorkerConfig(step_delay_s=0.02, step_delay_s_per_token=0.001, step_delay_s_per_decode=0.5)
    runner = runner_of(model, features)
    expected = runner.execute(plan).token_ids
    slowed = runner_of(model, features, lambda plan: config.least_step_s(*plan.work(inf)))
    started_s = time.perf_counter()
    assert slowed.execute(plan).token_ids == expected
    assert time.perf_counter() - started_s >= 0.02 + 37 * 0.001
    assert slowed.times.forward_s + slowed.times.inputs_s >= 0.02


def test_executing_a_plan_again_gives_the_same(model: TinyModel, features: Features) -> None:
    runner, script = runner_of(model, features), scripts_of(features)[2]
    plans = [StepPlan(0, (script.chunk(0, 33),)), StepPlan(1, (script.chunk(33, 50),))]
    first = [runner.execute(plan) for plan in plans]
    again = [runner.execute(plans[1]), runner.execute(plans[0]), runner.execute(plans[1])]
    assert first[0].token_ids == {}
    assert again[0] == again[2] == first[1]


@pytest.mark.parametrize("chunk_size", [1, 4, 16])
def test_chunks_that_are_not_drawn_from_are_marked_from_the_broken_row_on(
    model: TinyModel, features: Features, chunk_size: int
) -> None:
    """One value of one row is infinite, and only in a deeper level. The runner marks the chunk that contains the value
    and every later chunk of the sequence, but no earlier chunk and no other sequence."""
    features[UnitKey(MmHash("cat"), 0)][NUM_LEVELS - 1, 4, 2] = float("inf")
    runner, scripts = runner_of(model, features), scripts_of(features)
    broken_at = {scripts[1].sequence_id: 5 + 4, scripts[2].sequence_id: 20 + 4}
    for start in range(0, 40, chunk_size):
        chunks = tuple(
            script.chunk(start, min(start + chunk_size, len(script.ids) - 1))
            for script in scripts
            if start < len(script.ids) - 1
        )
        result = runner.execute(StepPlan(0, chunks))
        assert result.token_ids == {}
        assert result.not_finite == {
            chunk.sequence_id for chunk in chunks if chunk.end > broken_at.get(chunk.sequence_id, 1000)
        }


def test_a_broken_feature_marks_its_sequence_alone(model: TinyModel, features: Features) -> None:
    next(iter(features.values()))[0, 3, 1] = float("nan")
    runner, scripts = runner_of(model, features), scripts_of(features)
    plan = StepPlan(0, tuple(script.chunk(0, len(script.ids)) for script in scripts))
    result = runner.execute(plan)
    drawn = result.token_ids
    assert result.not_finite == {scripts[1].sequence_id, scripts[2].sequence_id}
    assert [drawn[script.sequence_id] == (NOT_FINITE_TOKEN,) for script in scripts] == [False, True, True, False]
    assert drawn[scripts[0].sequence_id] == (int(last_logits(model, scripts[0], features).argmax()),)


@pytest.mark.parametrize("value", [float("-inf"), float("inf")])
@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_an_infinite_key_in_half_precision_marks_who_wrote_it(features: Features, value: float, layer: int) -> None:
    """The value overflows when it is written to the pages, so the hidden states of its own step stay finite."""
    half = TinyModel(torch.float16)
    kv = PagedKV(NUM_LAYERS, 100, BLOCK_SIZE, (NUM_KV_HEADS, HEAD_DIM), torch.float16, torch.device("cpu"))
    features = Features({unit: feature.half() for unit, feature in features.items()})
    runner, scripts = Runner(half, kv, features, select_backend("sdpa", kv)), scripts_of(features)
    forward, overflowing = half.forward, []

    def overflow(*inputs: Any) -> torch.Tensor:
        hidden = forward(*inputs)
        assert hidden.isfinite().all()
        for slot in overflowing:
            kv.layer(layer)[0][slot, 0, 3] = value
        return hidden

    half.forward = overflow
    plan = StepPlan(0, tuple(script.chunk(0, 3) for script in scripts))
    assert runner.execute(plan).not_finite == set()
    victim = scripts[2]
    overflowing += kv.slots(victim.block_ids, 5, 6).tolist()
    later = StepPlan(1, tuple(script.chunk(3, 9) for script in scripts[:3]))
    assert runner.execute(later).not_finite == {victim.sequence_id}
    kv.layer(layer)[0][overflowing] = 0.0
    overflowing.clear()
    assert runner.execute(later).not_finite == set()

    rows = [scripts[0], victim, scripts[1]]
    decodes = Decodes(
        tuple(script.sequence_id for script in rows),
        (GREEDY,) * 3,
        np.array([script.ids[9] for script in rows]),
        np.full(3, 9),
        np.stack([script.positions[:, 9] for script in rows], axis=1),
        np.stack([script.block_ids[:3] for script in rows]),
        np.full(3, 3),
        np.zeros(3, dtype=np.int64),
    )
    overflowing += kv.slots(victim.block_ids, 9, 10).tolist()
    drawn = runner.execute(StepPlan(2, (), decodes)).token_ids
    assert [drawn[script.sequence_id] == (NOT_FINITE_TOKEN,) for script in rows] == [False, True, False]
