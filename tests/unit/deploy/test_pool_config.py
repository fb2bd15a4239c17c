"""Tests the config of a cluster with several pools of workers: how each pool sees it, what is refused by name, what
memory and GPUs the pools take, and what the record of a worker says of its pool."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from modalities_files import thinker_config, write_config

from deploy import compose, worker_pools
from deploy.cli import main
from deploy.config import ClusterConfig
from deploy.config_file import check_config
from deploy.scaling import PoolShares, ReplicaLoad, waiting_load
from deploy.sizing import budget as memory
from deploy.sizing import inbox_bytes, too_few_gpus
from deploy.sizing.budget import budget_lines, plan_budget
from deploy.sizing.device_use import GpuNeed, gpu_needs, shared_kinds
from deploy.vllm_worker import check_environment, check_options_there
from deploy.worker_pools import scaled_pools, worker_lacks, worker_record
from fabric.contracts import EMBEDDINGS, SPEECH, ConfigError, KvScheme, Member, MemberId, WaitingWork

Captured = pytest.CaptureFixture[str]
GPU = {"device": "cuda", "gpus_per_replica": 1}


def parsed(**sections: object) -> ClusterConfig:
    config, problems = check_config(json.dumps(sections))
    assert config is not None, problems
    return config


def refused(text: str) -> str:
    config, problems = check_config(text)
    assert config is None
    (problem,) = problems
    return str(problem)


# ------------------------------------------------------------ how a pool sees the config


def test_each_pool_sees_its_own_section_as_that_of_the_workers() -> None:
    whole = parsed(workers={"replicas": 2}, more_workers={"b": {"replicas": 3, "block_size": 64}, "c": {}})
    own = whole.of_pool("b")
    assert (own.workers.replicas, own.workers.block_size) == (3, 64)
    assert (own.pool, own.pool_path, own.pool_deployment) == ("b", "more_workers.b", "worker-b")
    assert set(own.more_workers) == {"main", "c"}
    assert (whole.pool, whole.pool_path, whole.pool_deployment) == ("main", "workers", "worker")
    assert [each.pool for each in whole.by_pool()] == ["main", "b", "c"]
    assert {each.pool for each in own.by_pool()} == {"main", "b", "c"}
    assert whole.of_pool("main") == whole
    assert own.of_pool("main").workers == whole.workers
    assert pickle.loads(pickle.dumps(own)).pool_path == "more_workers.b", "replicas get it by pickle"


def test_a_pool_has_defaults_of_its_own_and_nothing_of_the_first() -> None:
    whole = parsed(workers={"block_size": 64, "max_sequences": 3}, more_workers={"b": {}})
    assert whole.more_workers["b"] == ClusterConfig().workers


def test_numbers_of_workers_are_those_of_all_pools() -> None:
    scaled = {"autoscaling": {"min_replicas": 2, "max_replicas": 5}}
    whole = parsed(workers={"replicas": 2}, more_workers={"b": scaled})
    assert (whole.first_workers, whole.most_workers) == (4, 7)
    assert all(each.most_workers == 7 for each in whole.by_pool())


def test_a_scaled_pool_has_the_sizes_of_its_autoscaling_and_no_other() -> None:
    scaled = {"autoscaling": {"min_replicas": 2, "max_replicas": 5}, "replicas": 9}
    whole = parsed(encoders=scaled, workers=scaled)
    assert [(each.first_replicas, each.most_replicas) for each in (whole.encoders, whole.workers)] == [(2, 5)] * 2
    fixed = {"autoscaling": {"min_replicas": 2}, "replicas": 9}
    whole = parsed(encoders=fixed, workers=fixed)
    assert [(each.first_replicas, each.most_replicas) for each in (whole.encoders, whole.workers)] == [(9, 9)] * 2


def test_features_go_to_devices_only_if_all_pools_compute_there() -> None:
    device = {"encoders": GPU | {"arena_device": "auto"}, "workers": GPU | {"inbox_device": "auto"}}
    for more, is_on_device in ((GPU, True), ({"device": "cpu"}, False)):
        whole = parsed(**device, more_workers={"b": more})
        assert whole.is_arena_on_device == whole.is_inbox_on_device == is_on_device
        assert whole.of_pool("b").is_arena_on_device == is_on_device


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("more_workers: {b: {}, b: {}}", "line 1, column 23: (file): the file is not valid YAML: the key 'b' occurs"),
        ("more_workers: {main: {}}", "more_workers.main has the name of the pool of `workers`; choose another name"),
        ("more_workers: {B: {}}", "the value must match pattern"),
        ("more_workers: {b-: {}}", "the value must match pattern"),
        ("more_workers: {a-name-of-more-than-24-letters: {}}", "the value must match pattern"),
        ("more_workers: {b: {replica: 2}}", "more_workers.b.replica: the key is unknown; did you mean replicas?"),
        (
            "more_workers: {b: {replicas: 0}}",
            "more_workers.b.replicas: the value must be greater than or equal to 1, not 0",
        ),
        ("more_workers: {b: {name: c}}", "more_workers.b.name: the key is unknown"),
        ("more_workers: {b: {vllm: {seed: 1}}}", "more_workers.b.vllm is set, but more_workers.b.engine is weft"),
        (
            "more_workers: {b: {engine: vllm, speculation: {max_tokens: 3}}}",
            "more_workers.b.speculation.max_tokens needs more_workers.b.engine: weft; vLLM has options of its own",
        ),
        (
            "more_workers: {b: {device: cuda}}",
            "more_workers.b.device is cuda, but more_workers.b.gpus_per_replica is 0",
        ),
        ("more_workers: {b: {gpus_per_replica: 1}}", "more_workers.b.gpus_per_replica is 1, but more_workers.b.device"),
        (
            "more_workers: {b: {device: cuda, gpus_per_replica: 0.5}}",
            "more_workers.b.gpus_per_replica is 0.5, which shares a GPU; allow this with allow_shared_gpu: true",
        ),
        (
            "{workers: {engine: vllm}, more_workers: {b: {engine: vllm}}, stages: {}}",
            "speech (stages) needs workers.engine: weft, because vLLM does not hand over",
        ),
        (
            "{workers: {engine: vllm}, model: {embeddings: last}}",
            "model.embeddings is last, but vLLM gives no embeddings; a pool of workers needs engine: weft for them",
        ),
        (
            "{allow_shared_gpu: true, workers: {device: cuda, gpus_per_replica: 0.5}, "
            "more_workers: {b: {engine: vllm, device: cuda, gpus_per_replica: 0.5}}}",
            "more_workers.b and workers may share a GPU, so more_workers.b.vllm.gpu_memory_utilization must say",
        ),
    ],
)
def test_what_a_pool_may_not_say_is_refused_by_name(text: str, message: str) -> None:
    assert message in refused(text)


def test_the_model_is_checked_for_the_engine_and_the_ranks_of_each_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_config(tmp_path, thinker_config())
    monkeypatch.setattr(worker_pools, "VLLM_MEDIA_FAMILIES", ("qwen2_vl",))
    with pytest.raises(ConfigError, match=r"^more_workers\.b\.engine is vllm, which takes media of qwen2_vl here"):
        compose.load_model(parsed(more_workers={"b": {"engine": "vllm"}}), directory)
    with pytest.raises(ConfigError, match=r"^more_workers\.b\.tensor_parallel is 3, which does not divide"):
        compose.load_model(parsed(more_workers={"b": {"tensor_parallel": 3}}), directory)


def test_the_environment_and_the_options_of_each_pool_are_checked(tmp_path: Path, capsys: Captured) -> None:
    nowhere = tmp_path / "nowhere"
    whole = parsed(more_workers={"b": {"engine": "vllm", "python": str(nowhere), "vllm": {"seed": 1}}})
    with pytest.raises(ConfigError, match=rf"more_workers\.b\.engine is vllm, but {nowhere} is not there: .*"):
        check_environment(whole)
    (unchecked,) = check_options_there(whole)
    assert unchecked.startswith(f"the options in more_workers.b.vllm are not checked: {nowhere} is not on this machine")
    file = tmp_path / "weft.yaml"
    file.write_text("more_workers: {b: {engine: vllm, vllm: {block_size: 32}}}\n")
    assert main(["check", str(file)]) == 1
    assert f"{file}: more_workers.b.vllm.block_size can't be set" in capsys.readouterr().err
    assert main(["serve", "--config", str(file), "--in-process"]) == 1
    assert "serve without --in-process" in capsys.readouterr().err


# ------------------------------------------------------------ sizes


def test_workers_of_all_pools_share_the_memory_for_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**50)
    whole = parsed(workers={"replicas": 2}, more_workers={"b": {"replicas": 2}, "c": {"inbox_bytes": 77}})
    assert [inbox_bytes(each) for each in whole.by_pool()] == [memory.STAGING_BYTES // 5] * 2 + [77]


def test_gpus_of_all_pools_count() -> None:
    whole = parsed(
        workers=GPU | {"replicas": 2, "tensor_parallel": 2}, more_workers={"b": GPU | {"replicas": 3}, "c": {}}
    )
    assert gpu_needs(whole) == {"worker": GpuNeed(4, 1), "worker-b": GpuNeed(3, 1)}
    assert gpu_needs(whole.of_pool("c")).keys() == {"worker", "worker-b"}
    assert shared_kinds(gpu_needs(whole)) == [{"worker": 1}, {"worker-b": 1}]
    assert too_few_gpus(whole, 6) == ["the cluster takes 7 GPUs, but there are 6"]


def test_the_budget_has_a_process_for_each_pool(tmp_path: Path, capsys: Captured) -> None:
    directory = write_config(tmp_path, thinker_config())
    whole = parsed(
        model={"name": "tiny", "dtype": "float32"},
        workers={"num_blocks": 600, "replicas": 2},
        more_workers={"b": {"block_size": 64, "num_blocks": 500, "replicas": 3}},
    )
    budget = plan_budget(whole, compose.load_model(whole, directory), None)
    assert [(each.kind, each.num_replicas) for each in budget.processes if "worker" in each.kind] == [
        ("worker", 2),
        ("worker-b", 3),
    ]
    lines = "\n".join(budget_lines(budget))
    assert "600 blocks of 16 tokens" in lines
    assert "500 blocks of 64 tokens" in lines


def test_one_pool_that_holds_the_largest_request_is_enough(tmp_path: Path) -> None:
    directory = write_config(tmp_path, thinker_config())
    large, small = {"num_blocks": 9000}, {"num_blocks": 2}
    one_is_enough = parsed(workers=small, more_workers={"b": large})
    assert plan_budget(one_is_enough, compose.load_model(one_is_enough, directory), None).problems == ()
    both_small = parsed(workers=small, more_workers={"b": small})
    problems = plan_budget(both_small, compose.load_model(both_small, directory), None).problems
    assert any(each.startswith("workers: num_blocks x block_size is 32 tokens") for each in problems)
    assert any(each.startswith("more_workers.b: num_blocks x block_size is 32 tokens") for each in problems)


def test_check_counts_the_replicas_of_each_pool(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("workers: {replicas: 2}\nmore_workers: {b: {replicas: 3}}\n")
    assert main(["check", str(file)]) == 0
    assert "(1 router, 1 encoder, 2 worker, 3 worker-b replicas)" in capsys.readouterr().out


def test_scaled_pools_share_what_waits_by_their_largest_sizes() -> None:
    def scaled(most: int) -> dict[str, object]:
        return {"autoscaling": {"max_replicas": most}}

    whole = parsed(workers=scaled(2), more_workers={"b": scaled(6), "c": {"replicas": 9}})
    assert scaled_pools(whole) == {"main": 2, "b": 6}, "a pool that does not grow leaves all to the others"
    assert scaled_pools(whole.of_pool("b")) == {"main": 2, "b": 6}
    shares = [PoolShares(pool, scaled_pools(whole)) for pool in ("main", "b")]
    work = WaitingWork(worker_s=8.0, kv_share=4.0, encoder_s=2.0)
    assert [waiting_load("worker", [work], each) for each in shares] == [
        ReplicaLoad(2.0, 2.0, memory_use=1.0),
        ReplicaLoad(6.0, 6.0, memory_use=3.0),
    ]
    barred = WaitingWork(5.0, 1.0, barred_pools=("b", "c"))
    assert [waiting_load("worker", [work, barred], each) for each in shares] == [
        ReplicaLoad(7.0, 7.0, memory_use=2.0),
        ReplicaLoad(6.0, 6.0, memory_use=3.0),
    ]
    nobody = WaitingWork(5.0, 1.0, barred_pools=("b", "main"))
    assert [waiting_load("worker", [nobody], each) for each in shares] == [ReplicaLoad()] * 2


# ------------------------------------------------------------ records


def record_of(config: ClusterConfig, pool: str) -> Member:
    member = compose.member("worker", MemberId("w"), "a", "h", kv_scheme=KvScheme("weft-kv-1", 16))
    return worker_record(config.of_pool(pool), member)


def test_a_record_says_pool_engine_and_what_the_worker_lacks() -> None:
    whole = parsed(more_workers={"b": {"engine": "vllm"}})
    assert (record_of(whole, "main").pool, record_of(whole, "main").engine) == ("main", "weft")
    assert (record_of(whole, "b").pool, record_of(whole, "b").engine) == ("b", "vllm")
    assert record_of(whole, "main").lacks == ()
    assert set(record_of(whole, "b").lacks) == {EMBEDDINGS, SPEECH}


def test_workers_that_store_no_rows_leave_speech_to_those_that_do() -> None:
    two = {"tensor_parallel": 2}
    mixed = parsed(more_workers={"b": two}, stages={})
    assert [worker_lacks(each) for each in mixed.by_pool()] == [(), (SPEECH,)]
    assert worker_lacks(parsed(workers=two, stages={})) == (), "nobody else could take it"


def test_a_pool_of_vllm_sees_no_stages() -> None:
    mixed = parsed(more_workers={"b": {"engine": "vllm"}}, stages={})
    assert mixed.of_pool("b").stages is None
    assert mixed.of_pool("main").stages is not None


def test_a_shorter_context_is_told_where_another_pool_has_a_longer_one() -> None:
    short = {"engine": "vllm", "vllm": {"max_model_len": 2048}}
    assert record_of(parsed(workers=short), "main").max_context_tokens == 0
    mixed = parsed(more_workers={"b": short, "c": {"engine": "vllm", "vllm": {"max_model_len": 4096}}})
    assert [record_of(mixed, pool).max_context_tokens for pool in ("main", "b", "c")] == [0, 2048, 4096]
    alike = parsed(workers=short, more_workers={"b": short})
    assert record_of(alike, "b").max_context_tokens == 0


def test_costs_of_pools_are_learned_apart() -> None:
    whole = parsed(more_workers={"b": {}})
    places = [compose.member_place(each, "worker").hardware for each in whole.by_pool()]
    assert places == [f"{places[0].removesuffix(' worker')} worker", f"{places[0].removesuffix(' worker')} worker-b"]
    assert compose.member_place(ClusterConfig(), "worker").hardware == places[0].removesuffix(" worker")
