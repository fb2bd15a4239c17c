"""Checks rate limits against the definition: in no window of any length does more pass than the rate gives in it and
the burst, a refusal takes nothing, and the time that it names is right."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, note
from hypothesis import strategies as st

from fabric.contracts import ManualClock, RateLimited
from router.router_config import RateQuota, Tenant
from router.run import Caller
from router.run.rate_limits import QuotaHold, RateBucket, RateLimiter

TOLERANCE = 1e-3
STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), min_size=1, max_size=60)


@given(per_minute=st.integers(1, 600), burst_s=st.sampled_from([1.0, 10.0, 60.0]), steps=STEPS)
def test_no_window_lets_through_more_than_rate_and_burst(
    per_minute: int, burst_s: float, steps: list[tuple[float, int]]
) -> None:
    bucket, now = RateBucket(per_minute, burst_s), 1000.0
    most_at_once = per_minute * burst_s / 60
    passed: list[tuple[float, int]] = []
    for pause_s, amount in steps:
        now += pause_s
        if not bucket.wait_s(amount, now):
            bucket.take(amount, now)
            passed.append((now, amount))
    for begin in range(len(passed)):
        total, largest = 0, 0
        for at_s, amount in passed[begin:]:
            total, largest = total + amount, max(largest, amount)
            # An amount above the burst passes once the bucket is full.
            above = max(0.0, largest - most_at_once)
            assert total <= per_minute / 60 * (at_s - passed[begin][0]) + most_at_once + above + TOLERANCE


@given(per_minute=st.integers(1, 600), burst_s=st.sampled_from([1.0, 10.0, 60.0]), steps=STEPS)
def test_a_bucket_is_a_reservoir_that_fills_at_the_rate(
    per_minute: int, burst_s: float, steps: list[tuple[float, int]]
) -> None:
    """The reference counts the other way round, in exact fractions: what is left, filled up to the burst."""
    bucket, now = RateBucket(per_minute, burst_s), 0.0
    rate, most = Fraction(per_minute, 60), Fraction(per_minute, 60) * Fraction(burst_s)
    level = most
    for pause_s, amount in steps:
        now, before = now + pause_s, now
        level = min(most, level + rate * (Fraction(now) - Fraction(before)))
        lacking = min(Fraction(amount), most) - level
        wait_s = bucket.wait_s(amount, now)
        assert abs(wait_s - max(0.0, float(lacking / rate))) < TOLERANCE
        assert abs(bucket.left(now) - max(0.0, float(level))) < TOLERANCE
        if not wait_s:
            bucket.take(amount, now)
            level -= amount


HOLD_STEPS = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.sampled_from(["take", "hold", "hold", "settle"]),
        st.integers(1, 40),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
    min_size=1,
    max_size=40,
)


@given(per_minute=st.integers(1, 600), steps=HOLD_STEPS)
def test_what_is_given_back_was_as_if_never_taken(per_minute: int, steps: list[tuple[float, str, int, float]]) -> None:
    """The reference replays the whole history without what was given back."""
    bucket, now = RateBucket(per_minute, 60.0), 1000.0
    history: list[tuple[float, float]] = []
    holds: list[tuple[int, QuotaHold]] = []
    for pause_s, action, amount, share in steps:
        now += pause_s
        if action == "take":
            bucket.take(amount, now)
            history.append((now, amount))
        elif action == "hold":
            holds.append((len(history), bucket.hold(amount, now)))
            history.append((now, amount))
        elif holds:
            index, hold = holds.pop(amount % len(holds))
            bucket.settle(hold, share, now)
            history[index] = (history[index][0], history[index][1] * (1 - share))
        replayed = RateBucket(per_minute, 60.0)
        for at_s, taken in history:
            replayed.take(taken, at_s)
        assert abs(bucket.full_in_s(now) - replayed.full_in_s(now)) < TOLERANCE


@given(
    key_limit=st.integers(1, 60),
    tenant_limit=st.integers(1, 60),
    num_routers=st.integers(1, 4),
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 50)), min_size=1, max_size=40),
)
def test_a_refusal_takes_nothing_and_a_retry_in_time_passes(
    key_limit: int, tenant_limit: int, num_routers: int, steps: list[tuple[float, int]]
) -> None:
    clock = ManualClock()
    limits = RateLimiter(60.0, clock)
    limits.share(num_routers)
    tenant = Tenant("shop", rates=RateQuota(tenant_limit, tokens_per_minute=tenant_limit * 10))
    caller = Caller(tenant, "web", "01", RateQuota(key_limit, tokens_per_minute=key_limit * 20))
    num_refused = 0
    for pause_s, num_tokens in steps:
        clock.advance(pause_s)
        before = limits.states(caller)
        wait_s = refused_for(limits, caller, num_tokens)
        if wait_s is not None:
            num_refused += 1
            assert limits.states(caller) == before
            clock.advance(wait_s * 0.99 - TOLERANCE)
            assert wait_s < 2 * TOLERANCE or refused_for(limits, caller, num_tokens) is not None
            clock.advance(wait_s * 0.01 + TOLERANCE)
            assert refused_for(limits, caller, num_tokens) is None
    note(f"{num_refused} requests were refused")


def refused_for(limits: RateLimiter, caller: Caller, num_tokens: int) -> float | None:
    """Takes a prompt of `num_tokens`, or a request if it is 0, and returns the time after which it would pass, or None
    if it passed."""
    try:
        limits.take_prompt(caller, num_tokens, 0.0) if num_tokens else limits.begin(caller)
    except RateLimited as error:
        return error.retry_after_s
    return None
