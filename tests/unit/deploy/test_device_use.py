"""Tests what shares a GPU, how much of it a worker with vLLM takes, and that a config that does not fit its GPUs is
refused with the sums."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modalities_files import thinker_config, write_config

from deploy import compose
from deploy.cli import main
from deploy.config import ClusterConfig
from deploy.sizing import budget as budgets
from deploy.sizing import too_few_gpus, worker_utilization
from deploy.sizing.budget import budget_lines, plan_budget, vllm_utilization
from deploy.sizing.device_use import (
    CONTEXT_BYTES,
    GIB,
    OTHERS_MARGIN,
    VLLM_UTILIZATION,
    GpuNeed,
    gpu_needs,
    num_gpus,
    shared_kinds,
    shared_utilization,
)
from deploy.sizing.stored_weights import PackedWeights, StoredWeights
from fabric.contracts import ConfigError

Captured = pytest.CaptureFixture[str]
SHARING = {
    "encoders": {"device": "cuda", "gpus_per_replica": 0.25},
    "workers": {"device": "cuda", "gpus_per_replica": 0.75, "engine": "vllm"},
    "allow_shared_gpu": True,
}
WEIGHTS = StoredWeights(num_encoder=GIB, num_language=4 * GIB)


def config(**sections: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": {"name": "tiny", "dtype": "bfloat16"}, **sections})


@pytest.fixture
def model(tmp_path: Path) -> compose.Model:
    return compose.load_model(config(), write_config(tmp_path, thinker_config()))


def test_processes_with_whole_gpus_have_them_alone() -> None:
    whole = config(
        encoders={"replicas": 2, "device": "cuda", "gpus_per_replica": 1},
        workers={"replicas": 3, "device": "cuda", "gpus_per_replica": 1, "tensor_parallel": 2},
    )
    needs = gpu_needs(whole)
    assert needs == {"encoder": GpuNeed(2, 1), "worker": GpuNeed(6, 1)}
    assert shared_kinds(needs) == [{"encoder": 1}, {"worker": 1}]
    assert num_gpus(needs) == 8
    assert too_few_gpus(whole, 8) == []
    assert too_few_gpus(whole, 7) == ["the cluster takes 8 GPUs, but there are 7"]
    assert gpu_needs(config()) == {}


def test_each_pipeline_stage_of_a_worker_with_vllm_has_gpus_of_its_own() -> None:
    sizes = {"replicas": 3, "device": "cuda", "gpus_per_replica": 1, "tensor_parallel": 2}
    staged = sizes | {"engine": "vllm", "vllm": {"pipeline_parallel_size": 2}}
    whole = config(workers=sizes, more_workers={"fast": staged})
    assert gpu_needs(whole) == {"worker": GpuNeed(6, 1), "worker-fast": GpuNeed(12, 1)}
    assert too_few_gpus(whole, 17) == ["the cluster takes 18 GPUs, but there are 17"]


def test_fractions_fill_one_gpu() -> None:
    assert shared_kinds(gpu_needs(config(**SHARING))) == [{"encoder": 1, "worker": 1}]
    assert shared_kinds({"encoder": GpuNeed(4, 0.25), "worker": GpuNeed(1, 0.5)}) == [{"encoder": 2, "worker": 1}]
    assert shared_kinds({"encoder": GpuNeed(1, 0.6), "worker": GpuNeed(1, 0.6)}) == [{"encoder": 1}, {"worker": 1}]
    assert shared_kinds({"encoder": GpuNeed(3, 0.1), "worker": GpuNeed(1, 1)}) == [{"worker": 1}, {"encoder": 3}]
    assert num_gpus({"encoder": GpuNeed(4, 0.25), "worker": GpuNeed(1, 0.5)}) == 2


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.builds(GpuNeed, st.integers(1, 5), st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0]))
    )
)
def test_every_kind_is_on_a_gpu_and_no_gpu_is_overbooked(needs: dict[str, GpuNeed]) -> None:
    filled = shared_kinds(needs)
    assert {kind for each in filled for kind in each} == set(needs)
    for each in filled:
        assert len(each) == 1 or sum(count * needs[kind].gpus_each for kind, count in each.items()) <= 1 + 1e-6


@given(st.integers(GIB, 200 * GIB), st.floats(0, 0.9), st.integers(1, 4))
def test_a_share_leaves_the_others_their_part(device_bytes: int, taken: float, num_workers: int) -> None:
    others = int(device_bytes * taken / OTHERS_MARGIN * 0.95)
    try:
        share = shared_utilization(device_bytes, others, num_workers)
    except ConfigError:
        assert (device_bytes - others * OTHERS_MARGIN) / num_workers < 0.011 * device_bytes
        return
    assert 0.01 <= share <= VLLM_UTILIZATION
    assert share * num_workers * device_bytes + others * OTHERS_MARGIN <= device_bytes * (1 + 1e-9)


def test_an_encoder_that_takes_the_whole_gpu_leaves_no_share() -> None:
    with pytest.raises(ConfigError, match=r"no room on a GPU of 24.0 GiB, because what shares it takes 23.0 GiB"):
        shared_utilization(24 * GIB, 23 * GIB)


def test_the_share_follows_from_the_encoder_unless_it_is_stated(
    model: compose.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "read_stored_weights", lambda directory: WEIGHTS)
    small, large = (worker_utilization(config(**SHARING), model, size * GIB) for size in (24, 80))
    assert small is not None
    assert large is not None
    # The encoder takes 2 GiB of weights, CUDA's part, and its workspace.
    assert small < 1 - OTHERS_MARGIN * 3 / 24 < large < VLLM_UTILIZATION + 0.01
    for stated in ({"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 2**30}):
        own = config(**{**SHARING, "workers": {**SHARING["workers"], "vllm": stated}})
        assert worker_utilization(own, model, 24 * GIB) is None
    alone = config(workers={"device": "cuda", "gpus_per_replica": 1, "engine": "vllm"})
    assert worker_utilization(alone, model, 24 * GIB) is None
    assert worker_utilization(config(workers={"engine": "vllm"}), model, None) is None
    with pytest.raises(ConfigError, match=r"set workers\.vllm\.gpu_memory_utilization"):
        worker_utilization(config(**SHARING), model, None)


def test_a_shared_gpu_holds_the_encoder_and_vllm(model: compose.Model) -> None:
    budget = plan_budget(config(**SHARING), model, WEIGHTS, device_bytes=24 * GIB)
    assert budget.problems == ()
    (use,) = budget.uses
    assert use.name == "encoder + worker"
    assert 0.9 * 24 * GIB < use.taken_bytes <= 24 * GIB
    (_, worker) = budget.processes
    share = vllm_utilization(config(**SHARING), budget.processes[:1], 24 * GIB)
    assert share is not None
    rows = {row.name: row for row in worker.rows}
    on_device = sum(row.nbytes or 0 for row in worker.rows if row.place == "cuda") + CONTEXT_BYTES
    assert on_device == int(24 * GIB * share)
    assert f"what gpu_memory_utilization {share:g} leaves: " in rows["KV"].note
    text = "\n".join(budget_lines(budget))
    assert "one GPU (24.0 GiB), with 1.0 GiB for CUDA itself in each process:" in text
    assert text.endswith("fits")


def test_vllm_holds_quantised_weights_as_they_are_stored(model: compose.Model) -> None:
    """The model has levels for DeepStack, so vLLM loads its encoder too."""
    packed = WEIGHTS._replace(packed_language=PackedWeights(3 * GIB, 3 * GIB))
    whole, small = (
        plan_budget(config(**SHARING), model, weights, device_bytes=80 * GIB).processes[1].rows[0].nbytes
        for weights in (WEIGHTS, packed)
    )
    assert (whole, small) == (2 * 5 * GIB, 2 * 2 * GIB + 3 * GIB)


def test_a_pipeline_stage_holds_its_layers_weights_and_keys(model: compose.Model) -> None:
    """A model that is too large for one GPU fits two, and each byte holds twice as many tokens there."""
    alone = {"device": "cuda", "gpus_per_replica": 1, "engine": "vllm"}
    staged = alone | {"vllm": {"pipeline_parallel_size": 2}}
    one, two = (
        plan_budget(config(workers=each), model, StoredWeights(0, 11 * GIB), device_bytes=24 * GIB)
        for each in (alone, staged)
    )
    assert (len(one.problems), two.problems) == (1, ())
    rows = {row.name: row for row in two.processes[1].rows}
    assert rows["weights"].nbytes == 11 * GIB
    assert rows["weights"].note.endswith("divided by 2 ranks")
    shape = model.family.shape
    assert shape.num_layers % 2 == 0
    token_bytes = 2 * (shape.num_layers // 2) * shape.num_kv_heads * shape.head_dim * 2
    assert rows["KV"].nbytes is not None
    assert f": {rows['KV'].nbytes // token_bytes} tokens" in rows["KV"].note


def test_vllm_without_room_for_the_longest_request_is_named(model: compose.Model) -> None:
    alone = {"device": "cuda", "gpus_per_replica": 1, "engine": "vllm"}
    budget = plan_budget(config(workers=alone), model, StoredWeights(0, 11 * GIB), device_bytes=24 * GIB)
    (problem,) = budget.problems
    assert problem.startswith("workers: vLLM has room for 0 tokens in its KV blocks")
    unknown = plan_budget(config(workers=alone), model, WEIGHTS)
    assert unknown.problems == ()
    assert "of a size that is not known; name it with --gpus" in "\n".join(budget_lines(unknown))


def test_blocks_follow_from_the_size_of_the_gpu(model: compose.Model) -> None:
    fitted = {"device": "cuda", "gpus_per_replica": 1, "num_blocks": "auto", "block_size": 256, "max_sequences": 1000}
    unknown, known = (
        plan_budget(config(workers=fitted), model, WEIGHTS, device_bytes=size) for size in (None, 10 * GIB)
    )
    rows = [{row.name: row for row in each.processes[1].rows} for each in (unknown, known)]
    assert rows[0]["KV"].nbytes is None
    assert rows[0]["KV"].note == "as many blocks as the GPU has room for"
    assert rows[1]["KV"].nbytes is not None
    assert "blocks of 256 tokens: what the GPU has left" in rows[1]["KV"].note
    assert known.problems == unknown.problems == ()
    assert known.uses[0].taken_bytes <= 10 * GIB


def test_a_gpu_that_does_not_hold_a_worker_is_named_with_the_sums(model: compose.Model) -> None:
    stated = {"device": "cuda", "gpus_per_replica": 1, "num_blocks": 1_000_000}
    budget = plan_budget(config(workers=stated), model, WEIGHTS, device_bytes=10 * GIB)
    (problem,) = budget.problems
    assert problem.startswith("a GPU of 10.0 GiB does not hold worker, which takes ")
    assert "\n".join(budget_lines(budget)).endswith("does not fit")


def test_the_command_takes_the_gpus_by_name(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(
        "encoders: {device: cuda, gpus_per_replica: 1}\n"
        "workers: {device: cuda, gpus_per_replica: 1, num_blocks: 600000}\n"
    )
    assert main(["check", str(file), "--gpus", "2xL4"]) == 1
    shown = capsys.readouterr()
    assert "one GPU (22.5 GiB)" in shown.out
    assert "a GPU of 22.5 GiB does not hold worker, which takes " in shown.err
    assert main(["check", str(file), "--gpus", "1xB200"]) == 1
    assert "the cluster takes 2 GPUs, but there are 1" in capsys.readouterr().err
    assert main(["check", str(file), "--gpus", "2xB200"]) == 0
    assert "worker" in capsys.readouterr().out
    assert main(["check", str(file), "--gpus", "many"]) == 1
    assert "--gpus 'many' is not written as NUMBERxSIZE or NUMBERxMODEL" in capsys.readouterr().err
