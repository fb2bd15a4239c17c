"""The size of a pool: what each need asks for, how slowly a pool shrinks, and what a replica's load is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from loaded_replicas import Load, LoadedReplicas

from deploy.scaling import (
    ArrivedWork,
    EncoderMeter,
    PoolScaler,
    ReplicaLoad,
    ScalingDecision,
    ScalingRules,
    WaitingBoard,
    WorkerMeter,
    waiting_load,
)
from deploy.scaling.waiting_board import FORGET_S
from fabric.contracts import (
    ArenaStats,
    DeviceStats,
    EncoderReport,
    EngineStats,
    FeatureStats,
    ItemStats,
    MemberId,
    WaitingWork,
    WorkerReport,
)

RULES = ScalingRules(1, 10, slo_ttft_s=2.0, interval_s=5.0, downscale_delay_s=30.0, startup_s=20.0)


def decide_all(
    scaler: PoolScaler, target: int, rounds: Sequence[Sequence[Load | None]], begins_at_s: float = 0.0
) -> list[ScalingDecision]:
    """Returns the decisions of rounds of loads; the pool first sees replicas to which nothing has arrived yet."""
    replicas = LoadedReplicas()
    scaler.decide(begins_at_s - 5.0, target, replicas.after(0.0, [Load()] * len(rounds[0])))
    made = []
    for number, loads in enumerate(rounds):
        made.append(scaler.decide(begins_at_s + number * 5.0, target, replicas.after(5.0, loads)))
        target = made[-1].num_replicas
    return made


def test_the_largest_need_decides_and_is_named() -> None:
    by_work = decide_all(PoolScaler(RULES), 1, [[Load(0.1, 2.0)]])[0]
    assert (by_work.num_replicas, by_work.reason) == (3, "work")
    by_queue = decide_all(PoolScaler(RULES), 1, [[Load(60.0, 1.0)]])[0]
    assert (by_queue.num_replicas, by_queue.reason) == (4, "queue")
    by_memory = decide_all(PoolScaler(RULES), 2, [[Load(0.0, 0.1, 0.9)] * 2])[0]
    assert (by_memory.num_replicas, by_memory.reason) == (3, "memory")
    full = decide_all(PoolScaler(RULES), 4, [[Load(0.0, 0.1, 0.96)] * 4])[0]
    assert (full.num_replicas, full.reason) == (6, "memory")
    at_most = decide_all(PoolScaler(RULES), 1, [[Load(900.0, 30.0)]])[0]
    assert (at_most.num_replicas, at_most.reason) == (10, "bounds")
    assert "go from 1 to 10 (bounds)" in at_most.told()


def test_the_busier_stage_counts() -> None:
    scaler = PoolScaler(RULES)
    scaler.decide(0.0, 1, {"a": ReplicaLoad()})
    loads = {"a": ReplicaLoad(arrived_s=2.0, arrived_beside_s=10.0)}
    assert scaler.decide(5.0, 1, loads).terms.work_rate == pytest.approx(2.0)


def test_work_that_goes_to_a_new_replica_counts_once() -> None:
    """The new replica has begun with nothing, so what it has is what has arrived."""
    scaler = PoolScaler(RULES)
    scaler.decide(0.0, 1, {"a": ReplicaLoad(arrived_s=100.0)})
    assert scaler.decide(5.0, 2, {"a": ReplicaLoad(arrived_s=104.0)}).terms.work_rate == pytest.approx(0.8)
    both = {"a": ReplicaLoad(arrived_s=104.0), "b": ReplicaLoad(arrived_s=4.0)}
    assert scaler.decide(10.0, 2, both).terms.work_rate == pytest.approx(0.8)


def test_work_that_is_given_up_is_taken_back() -> None:
    scaler = PoolScaler(RULES)
    for at_s, arrived_s in ((0.0, 100.0), (5.0, 110.0), (10.0, 103.0), (15.0, 100.0)):
        decision = scaler.decide(at_s, 1, {"a": ReplicaLoad(arrived_s=arrived_s)})
        assert decision.terms.work_rate == pytest.approx({0.0: 0.0, 5.0: 2.0, 10.0: 0.3, 15.0: 0.0}[at_s])


def decide_waiting(waiting: ReplicaLoad, memory_use: float = 0.0) -> ScalingDecision:
    """Returns the decision about two idle replicas when something begins to wait at the routers."""
    scaler, replicas = PoolScaler(RULES), LoadedReplicas()
    scaler.decide(0.0, 2, replicas.after(0.0, [Load()] * 2))
    return scaler.decide(5.0, 2, replicas.after(5.0, [Load(memory_use=memory_use)] * 2), waiting)


def test_what_waits_at_the_routers_is_in_every_need() -> None:
    assert decide_waiting(ReplicaLoad()).num_replicas == 2
    by_work = decide_waiting(ReplicaLoad(arrived_s=12.0))
    assert (by_work.num_replicas, by_work.reason, by_work.terms.for_work) == (4, "work", 12.0 / 5.0 / 0.7)
    by_queue = decide_waiting(ReplicaLoad(queue_s=90.0))
    assert (by_queue.num_replicas > 2, by_queue.reason, by_queue.terms.queue_s) == (True, "queue", 90.0)
    by_memory = decide_waiting(ReplicaLoad(arrived_s=1.0, memory_use=1.4), 0.9)
    assert (by_memory.num_replicas, by_memory.reason) == (4, "memory")
    assert by_memory.terms.for_memory == pytest.approx((2 * 0.9 + 1.4) / RULES.target_memory_use)
    assert "1.00 s of work, and memory of 1.40 replicas, wait at the routers" in by_memory.told()


def test_prompts_wait_for_workers_and_media_wait_for_no_encoder() -> None:
    work = WaitingWork(worker_s=12.0, kv_share=1.4, encoder_s=9.0)
    assert waiting_load("worker", [work]) == ReplicaLoad(queue_s=12.0, arrived_s=12.0, memory_use=1.4)
    assert waiting_load("encoder", [work]) == ReplicaLoad(arrived_s=9.0)


def test_work_that_leaves_the_routers_for_a_worker_counts_once() -> None:
    scaler, waiting = PoolScaler(RULES), ReplicaLoad(6.0, 6.0)
    scaler.decide(0.0, 1, {"a": ReplicaLoad()})
    kept = scaler.decide(5.0, 1, {"a": ReplicaLoad()}, waiting)
    sent = scaler.decide(10.0, 1, {"a": ReplicaLoad(6.0, 6.0)})
    assert kept.terms.work_rate == pytest.approx(6.0 / 5.0)
    assert sent.terms.work_rate == pytest.approx(6.0 / 10.0)


def test_a_pool_with_work_at_the_routers_does_not_shrink() -> None:
    scaler, target = PoolScaler(RULES), 4
    loads = {name: ReplicaLoad() for name in "abcd"}
    for number in range(20):
        target = scaler.decide(5.0 * number, target, loads, ReplicaLoad(memory_use=3.0)).num_replicas
    assert target == 4
    for number in range(20, 40):
        target = scaler.decide(5.0 * number, target, {name: loads[name] for name in "abcd"[:target]}).num_replicas
    assert target < 4


def test_what_routers_tell_is_summed_and_forgotten_when_they_are_gone() -> None:
    board = WaitingBoard()
    barred = WaitingWork(4.0, 0.5, 1.0, ("small",))
    assert board.total(0.0) == ()
    board.tell(MemberId("router-0"), [WaitingWork(9.0, 9.0, 9.0)], 0.0)
    board.tell(MemberId("router-0"), [WaitingWork(1.0, 0.5, 2.0), barred], 1.0)
    board.tell(MemberId("router-1"), [WaitingWork(2.0, 0.25, 0.0)], 3.0)
    assert board.total(4.0) == (WaitingWork(3.0, 0.75, 2.0), barred)
    assert board.total(1.0 + FORGET_S) == (WaitingWork(3.0, 0.75, 2.0), barred)
    assert board.total(1.5 + FORGET_S) == (WaitingWork(2.0, 0.25, 0.0),)
    assert board.total(3.5 + FORGET_S) == ()


def test_replicas_that_are_starting_answer_the_shortage() -> None:
    made = decide_all(PoolScaler(RULES), 1, [[Load(10.0 + 20.0 * n, 5.0)] for n in range(4)])
    assert [each.num_replicas for each in made] == [10] * 4
    assert made[1].terms.num_starting == 9


def test_a_queue_that_stays_over_its_limit_asks_for_one_more() -> None:
    made = decide_all(PoolScaler(RULES), 2, [[Load(0.8, 0.5)] * 2, [Load(0.8, 0.5)] * 2])
    assert [each.num_replicas for each in made] == [2, 3]
    assert made[1].reason == "queue"


def test_a_pool_shrinks_by_a_quarter_after_each_delay() -> None:
    scaler, target, sizes = PoolScaler(RULES), 10, []
    for number in range(29):
        target = scaler.decide(number * 5.0, target, dict.fromkeys(map(str, range(target)), ReplicaLoad())).num_replicas
        sizes.append(target)
    changes = [number for number in range(1, 29) if sizes[number] != sizes[number - 1]]
    assert changes == [8, 15, 22]
    assert [sizes[number] for number in changes] == [8, 6, 5]


def test_one_busy_moment_puts_the_shrinking_off() -> None:
    idle = [Load()] * 2
    rounds = [idle] * 5 + [[Load(0.0, 0.6)] * 2] + [idle] * 9
    sizes = [each.num_replicas for each in decide_all(PoolScaler(RULES), 2, rounds)]
    assert sizes == [2] * 13 + [1, 1]


def test_replicas_that_never_start_do_not_keep_the_pool_large() -> None:
    made = decide_all(PoolScaler(RULES), 6, [[Load(0.0, 0.1)]] * 20)
    assert made[-1].num_replicas < 6
    assert {each.reason for each in made} == {"waiting to shrink", "less work"}


def test_the_time_of_a_start_is_learned() -> None:
    scaler = PoolScaler(RULES)
    made = decide_all(scaler, 1, [[Load(0.1, 1.2)], [Load(0.1, 1.2)], [Load(0.1, 0.6)] * 2, [Load(0.1, 0.6)] * 2])
    assert made[-1].terms.startup_s == pytest.approx(15.0)


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


def test_the_work_that_has_arrived_was_done_or_is_left() -> None:
    work = ArrivedWork()
    assert work.arrived_s(5.0, 0.0, 0.5) == pytest.approx(10.0)
    assert work.arrived_s(7.0, 3.0, 1.0) == pytest.approx(15.0)  # The new estimate holds for the last two seconds.
    assert work.arrived_s(7.0, 0.0, 1.0) == pytest.approx(12.0)


def encoder_report(forward_s: float, queued_s: float = 0.0, **fields: object) -> EncoderReport:
    base = {"items": ItemStats(), "device": DeviceStats(forward_s=forward_s), "arena": ArenaStats(total_bytes=100)}
    return EncoderReport(MemberId("e"), 1, 1, (), **{**base, "queued_s": queued_s, **fields})


def test_both_stages_of_an_encoder_are_measured() -> None:
    decoding = {"items": ItemStats(decode_s=16.0), "decode_queue_s": 8.0, "num_decode_processes": 2}
    queue = {"forward_left_s": 0.5, "num_items_pending": 3, "queued_cost": 900, "encode_s_per_cost": 0.001}
    load = EncoderMeter(0.5).load(encoder_report(3.0, 1.0, **queue, **decoding))
    assert load == ReplicaLoad(4.0, pytest.approx(3.9), pytest.approx(12.0), 0.0, 3.0)


def test_the_fixed_part_of_forward_passes_is_no_work_but_takes_capacity() -> None:
    """Twenty passes with 0.25 s of contents are the same work as forty with half of that."""
    arrived = []
    for num_batches, forward_s in ((20, 20 * 0.35), (40, 40 * 0.225)):
        device = DeviceStats(num_batches=num_batches, forward_s=forward_s)
        queue = {"queued_cost": 1000, "encode_s_per_cost": 0.001}
        arrived.append(EncoderMeter(0.5).load(encoder_report(0.0, device=device, batch_overhead_s=0.1, **queue)))
    assert [each.arrived_s for each in arrived] == [pytest.approx((5.0 + 1.0) / 0.8)] * 2


def test_an_encoder_that_waits_for_workers_counts_no_queue() -> None:
    full = ArenaStats(used_bytes=95, total_bytes=100)
    assert EncoderMeter(0.5).load(encoder_report(1.0, 30.0, arena=full, busy_fraction=0.1)).queue_s == 0.0
    assert EncoderMeter(0.5).load(encoder_report(1.0, 30.0, arena=full, busy_fraction=0.9)).queue_s == 30.0


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
    load = WorkerMeter(slo_tpot_s=0.1).load(worker_report(2.0, EngineStats(num_decoding=1, num_running=1)))
    assert load == ReplicaLoad(queue_s=0.0, arrived_s=pytest.approx(2.5), num_open=1.0)


def test_the_queue_of_a_worker_is_the_time_of_the_steps_that_compute_it() -> None:
    engine = EngineStats(queued_tokens=2500, queued_weighted_tokens=3000.0, num_decoding=10, num_running=12)
    load = WorkerMeter(0.1).load(worker_report(0.0, engine))
    assert load.queue_s == pytest.approx(3.0 + 3 * (0.02 + 10 * 0.002))


def test_tokens_behind_a_feature_have_arrived_and_wait_for_no_worker() -> None:
    engine = EngineStats(behind_tokens=2000, behind_weighted_tokens=2000.0, num_running=1, num_at_doorstep=1)
    load = WorkerMeter(0.1).load(worker_report(0.0, engine))
    assert (load.queue_s, load.arrived_s) == (0.0, pytest.approx(2.5))


def test_blocks_of_sequences_that_wait_for_features_do_not_count_as_used() -> None:
    engine = EngineStats(num_running=4, num_at_doorstep=3, kv_blocks_used=80, kv_blocks_total=100)
    assert WorkerMeter(0.1).load(worker_report(0.0, engine)).memory_use == pytest.approx(0.2)
