"""Properties of the decision about the size of a pool: bounds, monotonicity, stability, and silence."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from loaded_replicas import Load, LoadedReplicas

from deploy.scaling import PoolScaler, ScalingDecision, ScalingRules

RULES = ScalingRules(1, 12, slo_ttft_s=2.0, interval_s=5.0, downscale_delay_s=30.0, startup_s=20.0)


def rules() -> st.SearchStrategy[ScalingRules]:
    return st.builds(
        lambda low, more, queue_s, use, delay_s, startup_s: ScalingRules(
            low, low + more, 2.0, queue_s, use, 0.85, 5.0, delay_s, startup_s
        ),
        st.integers(1, 4),
        st.integers(0, 12),
        st.floats(0.05, 5.0),
        st.floats(0.3, 0.9),
        st.sampled_from((0.0, 10.0, 60.0)),
        st.floats(1.0, 120.0),
    )


def loads(most: float = 20.0) -> st.SearchStrategy[Load]:
    return st.builds(Load, st.floats(0, most), st.floats(0, most), st.floats(0, 1))


@given(rules(), st.lists(st.lists(st.none() | loads(), max_size=8), min_size=1, max_size=30))
def test_every_decision_is_within_the_bounds(given_rules: ScalingRules, rounds: list[list[Load | None]]) -> None:
    scaler, target, replicas = PoolScaler(given_rules), given_rules.min_replicas, LoadedReplicas()
    for number, values in enumerate(rounds):
        decision = scaler.decide(number * given_rules.interval_s, target, replicas.after(5.0, values))
        assert given_rules.min_replicas <= decision.num_replicas <= given_rules.max_replicas
        target = decision.num_replicas


@given(rules(), st.lists(loads(), min_size=1, max_size=6), st.integers(0, 5), loads(5.0))
def test_more_load_never_gives_fewer_replicas(
    given_rules: ScalingRules, values: list[Load], which: int, more: Load
) -> None:
    heavier = list(values)
    one = values[which % len(values)]
    heavier[which % len(values)] = Load(*(a + b for a, b in zip(one, more, strict=True)))
    target = min(max(len(values), given_rules.min_replicas), given_rules.max_replicas)
    without_delay = replace(given_rules, downscale_delay_s=0.0)
    sizes = []
    for each in (values, heavier):
        scaler, replicas = PoolScaler(without_delay), LoadedReplicas()
        scaler.decide(0.0, target, replicas.after(0.0, each))
        sizes.append(scaler.decide(5.0, target, replicas.after(5.0, each)).num_replicas)
    assert sizes[0] <= sizes[1]


def run_constant(given_rules: ScalingRules, work_rate: float, num_first: int, num_rounds: int) -> list[ScalingDecision]:
    """Returns the decisions under a constant load that the replicas share equally; replicas start at once."""
    scaler, target, made, replicas = PoolScaler(given_rules), num_first, [], LoadedReplicas()
    for number in range(num_rounds):
        each = work_rate / target
        queue_s = 0.1 * each / (1 - each) if each < 0.95 else 5.0
        made.append(scaler.decide(number * 5.0, target, replicas.after(5.0, [Load(queue_s, each)] * target)))
        target = made[-1].num_replicas
    return made


@given(rules(), st.floats(0.0, 10.0), st.integers(0, 12))
def test_a_constant_load_never_makes_the_pool_swing(given_rules: ScalingRules, work_rate: float, num_more: int) -> None:
    first = min(given_rules.min_replicas + num_more, given_rules.max_replicas)
    sizes = [each.num_replicas for each in run_constant(given_rules, work_rate, first, 260)]
    directions = [b - a for a, b in zip([first, *sizes], sizes, strict=False) if a != b]
    assert all(step > 0 for step in directions) or all(step < 0 for step in directions), sizes
    assert len(set(sizes[-20:])) == 1, sizes


@given(rules(), st.lists(loads(), max_size=6), st.integers(1, 4), st.integers(1, 40))
def test_a_pool_with_a_silent_replica_never_shrinks(
    given_rules: ScalingRules, values: list[Load], num_silent: int, num_rounds: int
) -> None:
    scaler, silent, replicas = PoolScaler(given_rules), [None] * num_silent, LoadedReplicas()
    target = given_rules.max_replicas
    for number in range(num_rounds):
        decision = scaler.decide(number * 5.0, target, replicas.after(5.0, [*values, *silent]))
        assert decision.num_replicas == target
        assert decision.reason in ("silence", "bounds")


@given(rules(), st.integers(1, 12))
def test_a_pool_that_is_silent_altogether_stays_as_it_is(given_rules: ScalingRules, size: int) -> None:
    scaler, replicas = PoolScaler(given_rules), LoadedReplicas()
    target = min(max(size, given_rules.min_replicas), given_rules.max_replicas)
    for number in range(30):
        assert scaler.decide(number * 5.0, target, replicas.after(5.0, [None] * target)).num_replicas == target
        assert scaler.decide(number * 5.0 + 1, target, {}).num_replicas == target


@given(st.floats(0.3, 0.65), st.floats(4.0, 6.0), st.floats(0.0, 1.0))
def test_a_burst_is_answered_within_two_intervals(each: float, factor: float, share: float) -> None:
    """The burst begins when this share of an interval is left."""
    scaler, target, at_s, queue_s, replicas = PoolScaler(RULES), 2, 0.0, 0.0, LoadedReplicas()
    work_rate = 2 * each
    for _ in range(6):
        decision = scaler.decide(at_s, target, replicas.after(5.0, [Load(0.05, each)] * 2))
        at_s += 5.0
    assert decision.num_replicas == 2
    for part in (share, 1.0):
        burst = work_rate * (1 + (factor - 1) * part)
        queue_s += max(burst - 2, 0.0) * 5.0
        decision = scaler.decide(at_s, target, replicas.after(5.0, [Load(queue_s / 2, burst / 2)] * 2))
        target, at_s = decision.num_replicas, at_s + 5.0
    assert target > 2
    decision = scaler.decide(at_s, target, replicas.after(5.0, [Load(queue_s / 2, burst / 2)] * 2))
    assert decision.num_replicas >= min(work_rate * factor, RULES.max_replicas)
