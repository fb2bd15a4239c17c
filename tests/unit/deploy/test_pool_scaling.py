"""The size of a pool: what each need asks for, how slowly a pool shrinks, and what a replica's load is."""

from __future__ import annotations

import pytest

from deploy.scaling import EncoderMeter, PoolScaler, ReplicaLoad, ScalingDecision, ScalingRules, WorkerMeter, WorkRate
from fabric.contracts import (
    ArenaStats,
    DeviceStats,
    EncoderReport,
    EngineStats,
    FeatureStats,
    ItemStats,
    MemberId,
    WorkerReport,
)

RULES = ScalingRules(1, 10, slo_ttft_s=2.0, interval_s=5.0, downscale_delay_s=30.0, startup_s=20.0)


def decide_all(scaler: PoolScaler, target: int, rounds: list[list[ReplicaLoad | None]]) -> list[ScalingDecision]:
    made = []
    for number, values in enumerate(rounds):
        loads = {f"r{index}": value for index, value in enumerate(values)}
        made.append(scaler.decide(number * 5.0, target, loads))
        target = made[-1].num_replicas
    return made


def test_the_largest_need_decides_and_is_named() -> None:
    by_work = decide_all(PoolScaler(RULES), 1, [[ReplicaLoad(0.1, 2.0)]])[0]
    assert (by_work.num_replicas, by_work.reason) == (3, "work")
    by_queue = decide_all(PoolScaler(RULES), 1, [[ReplicaLoad(60.0, 1.0)]])[0]
    assert (by_queue.num_replicas, by_queue.reason) == (4, "queue")
    by_memory = decide_all(PoolScaler(RULES), 2, [[ReplicaLoad(0.0, 0.1, 0.95)] * 2])[0]
    assert (by_memory.num_replicas, by_memory.reason) == (3, "memory")
    at_most = decide_all(PoolScaler(RULES), 1, [[ReplicaLoad(900.0, 30.0)]])[0]
    assert (at_most.num_replicas, at_most.reason) == (10, "bounds")
    assert "go from 1 to 10 (bounds)" in at_most.told()


def test_replicas_that_are_starting_answer_the_shortage() -> None:
    scaler = PoolScaler(RULES)
    made = decide_all(scaler, 1, [[ReplicaLoad(10.0 + 20.0 * n, 5.0)] for n in range(4)])
    assert [each.num_replicas for each in made] == [10] * 4
    assert made[1].terms.num_starting == 9


def test_a_queue_that_stays_over_its_limit_asks_for_one_more() -> None:
    made = decide_all(PoolScaler(RULES), 2, [[ReplicaLoad(0.8, 0.5)] * 2, [ReplicaLoad(0.8, 0.5)] * 2])
    assert [each.num_replicas for each in made] == [2, 3]
    assert made[1].reason == "queue"


def test_a_pool_shrinks_by_a_quarter_after_each_delay() -> None:
    scaler, target, sizes = PoolScaler(RULES), 10, []
    for number in range(29):
        target = scaler.decide(number * 5.0, target, dict.fromkeys(map(str, range(target)), ReplicaLoad())).num_replicas
        sizes.append(target)
    changes = [number for number in range(1, 29) if sizes[number] != sizes[number - 1]]
    assert changes == [6, 13, 20, 27]
    assert [sizes[number] for number in changes] == [8, 6, 5, 4]


def test_one_busy_moment_puts_the_shrinking_off() -> None:
    idle: list[ReplicaLoad | None] = [ReplicaLoad()] * 2
    rounds = [idle] * 6 + [[ReplicaLoad(0.0, 0.6)] * 2] + [idle] * 8
    sizes = [each.num_replicas for each in decide_all(PoolScaler(RULES), 2, rounds)]
    assert sizes == [2] * 13 + [1, 1]


def test_replicas_that_never_start_do_not_keep_the_pool_large() -> None:
    made = decide_all(PoolScaler(RULES), 6, [[ReplicaLoad(0.0, 0.1)]] * 20)
    assert made[-1].num_replicas < 6
    assert {each.reason for each in made} == {"waiting to shrink", "less work"}


def test_the_time_of_a_start_is_learned() -> None:
    scaler = PoolScaler(RULES)
    busy, idle = ReplicaLoad(0.1, 1.2), ReplicaLoad(0.1, 0.6)
    decide_all(scaler, 1, [[busy], [busy], [idle] * 2])
    assert scaler.decide(15.0, 2, {"r0": idle, "r1": idle}).terms.startup_s == pytest.approx(15.0)


def test_a_load_that_does_not_change_becomes_silent() -> None:
    scaler = PoolScaler(RULES)
    assert scaler.hear(0.0, ["a", "b"], {"a": 1.0}) == {"a"}
    assert scaler.hear(10.0, ["a", "b"], {"a": 1.0, "b": 7.0}) == {"a", "b"}
    assert scaler.hear(20.0, ["a", "b"], {"a": 1.0, "b": 8.0}) == {"b"}
    assert scaler.hear(21.0, ["b"], {"a": 2.0, "b": 8.0}) == {"b"}


def test_bounds_without_a_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="min_replicas is 3 and max_replicas is 2"):
        ScalingRules(3, 2)


# ------------------------------------------------------------ loads of replicas


def test_the_rate_of_work_counts_what_was_done_and_what_waits() -> None:
    rate = WorkRate(10.0)
    assert rate.observe(0.0, 5.0, 0.0) == 0.0
    assert rate.observe(5.0, 7.5, 0.0) == pytest.approx(0.5)
    assert rate.observe(10.0, 12.5, 5.0) == pytest.approx(1.25)
    assert rate.observe(15.0, 17.5, 5.0) == pytest.approx(1.5)
    assert rate.observe(20.0, 17.5, 0.0) == 0.0  # The queue was given up.


def encoder_report(forward_s: float, queued_s: float = 0.0, **fields: object) -> EncoderReport:
    base = {"items": ItemStats(), "device": DeviceStats(forward_s=forward_s), "arena": ArenaStats(total_bytes=100)}
    return EncoderReport(MemberId("e"), 1, 1, (), **{**base, "queued_s": queued_s, **fields})


def test_the_slower_stage_of_an_encoder_counts() -> None:
    meter = EncoderMeter(10.0)
    meter.load(encoder_report(1.0), 0.0)
    decoding = {"items": ItemStats(decode_s=16.0), "decode_queue_s": 8.0, "num_decode_processes": 2}
    load = meter.load(encoder_report(3.0, 1.0, forward_left_s=0.5, num_items_pending=3, **decoding), 10.0)
    assert load == ReplicaLoad(queue_s=4.0, work_rate=pytest.approx(1.2), num_open=3.0)


def test_an_encoder_that_waits_for_workers_counts_no_queue() -> None:
    full = ArenaStats(used_bytes=95, total_bytes=100)
    assert EncoderMeter(10.0).load(encoder_report(1.0, 30.0, arena=full, busy_fraction=0.1), 0.0).queue_s == 0.0
    assert EncoderMeter(10.0).load(encoder_report(1.0, 30.0, arena=full, busy_fraction=0.9), 0.0).queue_s == 30.0


def worker_report(work_s: float, engine: EngineStats) -> WorkerReport:
    return WorkerReport(
        MemberId("w"),
        1,
        1,
        (),
        engine,
        FeatureStats(),
        prefill_s_per_token=0.001,
        step_overhead_s=0.02,
        decode_s_per_sequence=0.002,
        max_step_tokens=1000,
        work_s=work_s,
    )


def test_a_worker_that_only_decodes_is_no_busier_than_its_tokens_make_it() -> None:
    meter = WorkerMeter(10.0, slo_tpot_s=0.1)
    meter.load(worker_report(0.0, EngineStats(num_decoding=1)), 0.0)
    load = meter.load(worker_report(2.0, EngineStats(num_decoding=1, num_running=1)), 10.0)
    assert load == ReplicaLoad(queue_s=0.0, work_rate=pytest.approx(0.25), memory_use=0.0, num_open=1.0)


def test_the_queue_of_a_worker_is_the_time_of_the_steps_that_compute_it() -> None:
    engine = EngineStats(queued_tokens=2500, queued_weighted_tokens=3000.0, num_decoding=10, num_running=12)
    load = WorkerMeter(10.0, 0.1).load(worker_report(0.0, engine), 0.0)
    assert load.queue_s == pytest.approx(3.0 + 3 * (0.02 + 10 * 0.002))


def test_blocks_of_sequences_that_wait_for_features_do_not_count_as_used() -> None:
    engine = EngineStats(num_running=4, num_at_doorstep=3, kv_blocks_used=80, kv_blocks_total=100)
    assert WorkerMeter(10.0, 0.1).load(worker_report(0.0, engine), 0.0).memory_use == pytest.approx(0.2)
