"""Tests quotas per minute: what passes, what a refusal says and takes, how routers share, and the headers."""

from __future__ import annotations

import pytest

from fabric.contracts import InvalidRequest, ManualClock, Overloaded, RateLimited
from router.router_config import RateQuota, RouterConfig, Tenant
from router.run import Admission, Caller, rate_headers
from router.run.rate_limits import RateLimiter, duration

SHOP = Tenant("shop", rates=RateQuota(requests_per_minute=6, tokens_per_minute=600, media_seconds_per_minute=60))
WEB = Caller(SHOP, "web", "0123", RateQuota(requests_per_minute=3))


def limiter(num_routers: int = 1, burst_s: float = 60.0) -> tuple[RateLimiter, ManualClock]:
    clock = ManualClock()
    limits = RateLimiter(burst_s, clock)
    limits.share(num_routers)
    return limits, clock


def num_passed(limits: RateLimiter, caller: Caller, tries: int = 20) -> int:
    passed = 0
    for _ in range(tries):
        try:
            limits.begin(caller)
        except RateLimited:
            break
        passed += 1
    return passed


def left(limits: RateLimiter, caller: Caller) -> dict[str, float]:
    return {state.quota: round(state.left, 6) for state in limits.states(caller)}


def test_a_key_has_its_own_quota_within_that_of_its_tenant() -> None:
    limits, clock = limiter()
    assert num_passed(limits, WEB) == 3
    with pytest.raises(RateLimited, match="the key web may use 3 requests per minute; 0 are left now") as caught:
        limits.begin(WEB)
    assert caught.value.retry_after_s == pytest.approx(20.0)
    app = Caller(SHOP, "app", "4567", RateQuota(requests_per_minute=100))
    assert num_passed(limits, app) == 3, "the tenant has 6 in all"
    with pytest.raises(RateLimited, match="the tenant shop may use 6 requests per minute"):
        limits.begin(app)
    clock.advance(10.0)
    assert num_passed(limits, app) == 1
    assert num_passed(limits, Caller(Tenant("free"))) == 20, "who has no quota is never refused"


def test_a_refused_prompt_takes_nothing_of_any_quota() -> None:
    limits, _ = limiter()
    limits.take_prompt(WEB, 500, 30.0)
    before = left(limits, WEB)
    with pytest.raises(RateLimited, match="may use 600 tokens per minute; 100 are left now, and the request needs 101"):
        limits.take_prompt(WEB, 101, 1.0)
    with pytest.raises(RateLimited, match="may use 60 seconds of media per minute; 30 are left") as caught:
        limits.take_prompt(WEB, 1, 30.5)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    assert left(limits, WEB) == before == {"requests": 3, "tokens": 100, "media_seconds": 30}


def test_answers_count_and_are_earned_before_anything_passes() -> None:
    limits, clock = limiter()
    limits.begin(WEB)
    limits.take_prompt(WEB, 600, 0.0)
    limits.spender(WEB)(100)
    assert left(limits, WEB)["tokens"] == 0
    with pytest.raises(RateLimited, match=r"600 tokens per minute; 0 are left now; try again in 10\.1 s"):
        limits.begin(WEB)
    clock.advance(10.1)
    limits.begin(WEB)


def test_texts_pass_while_media_are_used_up() -> None:
    limits, _ = limiter()
    limits.take_prompt(WEB, 10, 90.0)
    with pytest.raises(RateLimited, match="60 seconds of media per minute; 0 are left"):
        limits.take_prompt(WEB, 10, 0.5)
    limits.begin(WEB)
    limits.take_prompt(WEB, 10, 0.0)
    assert left(limits, WEB) == {"requests": 2, "tokens": 580, "media_seconds": 0}


def test_a_prompt_above_the_quota_passes_when_nothing_was_used_and_is_then_earned() -> None:
    limits, clock = limiter()
    limits.take_prompt(WEB, 1200, 0.0)
    clock.advance(119.0)
    with pytest.raises(RateLimited) as caught:
        limits.take_prompt(WEB, 1200, 0.0)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    clock.advance(1.0)
    limits.take_prompt(WEB, 1200, 0.0)


@pytest.mark.parametrize("num_routers", [1, 2, 3])
def test_routers_together_give_the_quota(num_routers: int) -> None:
    caller = Caller(Tenant("shop", rates=RateQuota(requests_per_minute=60)))
    passed = 0
    for _ in range(num_routers):
        limits, clock = limiter(num_routers)
        passed += num_passed(limits, caller, 100)
        clock.advance(30.0)
        passed += num_passed(limits, caller, 100)
        assert passed % (90 // num_routers) == 0, "a router alone gives its part"
    assert passed == 90


def test_a_change_of_the_number_of_routers_keeps_the_used_part_of_the_burst() -> None:
    limits, clock = limiter()
    caller = Caller(Tenant("shop", rates=RateQuota(requests_per_minute=60)))
    assert num_passed(limits, caller, 30) == 30
    limits.share(2)
    assert num_passed(limits, caller, 100) == 15
    limits.share(1)
    assert num_passed(limits, caller, 100) == 0
    clock.advance(1.0)
    assert num_passed(limits, caller, 100) == 1


def test_a_smaller_burst_lets_through_less_at_once() -> None:
    limits, _ = limiter(burst_s=10.0)
    assert num_passed(limits, Caller(Tenant("shop", rates=RateQuota(requests_per_minute=60))), 100) == 10
    assert num_passed(limits, Caller(Tenant("slow", rates=RateQuota(requests_per_minute=1))), 100) == 1


def test_idle_owners_are_forgotten() -> None:
    limits, clock = limiter()
    for number in range(RateLimiter.MAX_IDLE_OWNERS):
        limits.begin(Caller(Tenant("free"), "k", str(number), RateQuota(requests_per_minute=60)))
    limits.spender(Caller(Tenant("free")))(5)
    clock.advance(1.5)
    used = Caller(Tenant("free"), "k", "used", RateQuota(requests_per_minute=1))
    limits.begin(used)
    limits.begin(Caller(Tenant("free"), "k", "fresh", RateQuota(requests_per_minute=60)))
    assert len(limits._owners) == 2
    assert left(limits, used) == {"requests": 0}


# ------------------------------------------------------------ at admission


def admission(**settings: object) -> tuple[Admission, ManualClock]:
    clock = ManualClock()
    return Admission(RouterConfig("tiny", 1.0, 16, tenants=(SHOP,), **settings), clock), clock


def test_a_request_whose_prompt_is_refused_counts_for_no_quota() -> None:
    limits, _ = admission()
    first = limits.admit(WEB)
    first.take_prompt(600)
    with pytest.raises(RateLimited):
        limits.admit(WEB)
    limits, _ = admission()
    ticket = limits.admit(WEB)
    ticket.take_prompt(400)
    late = limits.admit(WEB)
    assert left(limits.rates, WEB)["requests"] == 1
    with pytest.raises(RateLimited):
        late.take_prompt(201)
    late.release()
    assert left(limits.rates, WEB) == {"requests": 2, "tokens": 200, "media_seconds": 60}
    assert limits.prompt_tokens == 400
    limits.rates.spender(WEB)(50)
    assert left(limits.rates, WEB)["tokens"] == 150


def test_several_requests_of_one_exchange_are_counted_once_and_together() -> None:
    limits, clock = admission()
    first = limits.admit(WEB)
    assert len(limits.admit_rest(WEB, 3, 2)) == 1, "two begin now, and the third takes a place later"
    assert left(limits.rates, WEB)["requests"] == 0
    assert len(limits.admit_more(WEB, 1)) == 1
    assert limits.num_in_flight == 3
    clock.advance(20.0)
    second = limits.admit(WEB)
    with pytest.raises(RateLimited, match="needs 3") as caught:
        limits.admit_rest(WEB, 3, 3)
    second.release()
    assert caught.value.retry_after_s == pytest.approx(40.0)
    assert (left(limits.rates, WEB)["requests"], limits.num_in_flight) == (1, 3)
    first.release()


@pytest.mark.parametrize(("num_routers", "most"), [(1, 3), (2, 1), (4, 1)])
def test_more_requests_than_a_full_quota_gives_are_refused_for_good(num_routers: int, most: int) -> None:
    limits, _ = admission()
    limits.share(num_routers)
    before = left(limits.rates, WEB)["requests"]
    ticket = limits.admit(WEB)
    with pytest.raises(InvalidRequest, match=f"at most {most} prompts") as caught:
        limits.admit_rest(WEB, most + 1, most + 1)
    assert (caught.value.retryable, caught.value.param) == (False, "prompt")
    ticket.release()
    assert left(limits.rates, WEB)["requests"] == before
    assert limits.admit(WEB)


def test_a_full_router_refuses_the_rest_of_an_exchange_and_counts_nothing_of_it() -> None:
    limits, _ = admission(max_in_flight=2)
    ticket = limits.admit(WEB)
    with pytest.raises(Overloaded):
        limits.admit_rest(WEB, 3, 3)
    ticket.release()
    assert (left(limits.rates, WEB)["requests"], limits.num_in_flight) == (3, 0)


def test_a_full_router_takes_nothing_of_a_quota() -> None:
    limits, _ = admission(max_in_flight=1)
    first = limits.admit(WEB)
    with pytest.raises(Overloaded):
        limits.admit(WEB)
    assert left(limits.rates, WEB)["requests"] == 2
    first.release()


def test_requests_in_flight_of_a_key_are_limited_and_shared_among_routers() -> None:
    limits, _ = admission()
    key = Caller(Tenant("shop"), "web", "0123", max_in_flight=4)
    tickets = [limits.admit(key) for _ in range(4)]
    with pytest.raises(Overloaded, match="4 requests of the key web are in flight, which may have 4"):
        limits.admit(key)
    limits.admit(Caller(Tenant("shop"), "app", "4567", max_in_flight=1)).release()
    for ticket in tickets:
        ticket.release()
    limits.share(2)
    tickets = [limits.admit(key) for _ in range(2)]
    with pytest.raises(Overloaded, match="which may have 2 at this router"):
        limits.admit(key)
    for ticket in tickets:
        ticket.release()
    limits.share(9)
    limits.admit(key).release()


def test_requests_in_flight_of_a_tenant_are_shared_among_routers() -> None:
    shop = Tenant("shop", max_in_flight=4)
    limits = Admission(RouterConfig("tiny", 1.0, 16, tenants=(shop,)), ManualClock())
    limits.share(2)
    tickets = [limits.admit(Caller(shop)) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests of the tenant shop are in flight, which may have 2"):
        limits.admit(Caller(shop))
    limits.share(1)
    limits.admit(Caller(shop)).release()
    for ticket in tickets:
        ticket.release()


# ------------------------------------------------------------ headers


def test_headers_say_what_is_left() -> None:
    limits, _ = limiter()
    limits.begin(WEB)
    limits.take_prompt(WEB, 15, 1.25)
    assert rate_headers(limits.states(WEB)) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "20s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "585",
        "x-ratelimit-reset-tokens": "1.5s",
        "x-ratelimit-limit-media-seconds": "60",
        "x-ratelimit-remaining-media-seconds": "58",
        "x-ratelimit-reset-media-seconds": "1.25s",
    }
    assert rate_headers(limits.states(Caller(Tenant("free")))) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3603, "1h0m3s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
