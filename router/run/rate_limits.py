"""Limits what API keys and tenants use in a minute: requests, tokens, and seconds of sound and video.

`RateBucket` is the generic cell rate algorithm (ITU-T I.371): it keeps one number, the time at which everything that
was taken is earned again. `RateLimiter` holds the buckets of all keys and tenants of one router. What a request uses is
taken in steps: the request itself before its body is read, its prompt and media before any member is asked, and its
answer as it is made. A step that does not fit is refused with the time after which it fits, and takes nothing. What a
prompt took is given back if the prompt was not computed (`QuotaHold`).

Several routers share a quota: each of N routers gives one part in N of it. The module has no clock of its own, and
knows nothing of HTTP or of members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

from fabric.contracts import Clock, RateLimited
from router.router_config import RateQuota, Tenant
from router.run.key_book import MAX_KEYS, Caller

SLACK_S = 1e-6
"""This time absorbs rounding: what is earned within it counts as earned already."""
QUOTAS = ("requests", "tokens", "media_seconds")


class QuotaHold:
    """A `QuotaHold` is an amount of a bucket that may be given back later. It measures in seconds, like the bucket."""

    __slots__ = ("least_s", "taken_s")

    def __init__(self, taken_s: float) -> None:
        self.taken_s = taken_s
        self.least_s = math.inf
        """Was the shortest time to a full bucket at which the bucket gave something, between this hold and the next."""


class RateBucket:
    """A `RateBucket` lets through `per_minute` in every minute, and up to `burst_s` seconds of that at once.

    In a window of `t` seconds it lets through at most `per_minute / 60 * (burst_s + t)`, as long as no amount is larger
    than the burst and nothing is taken unasked. A larger amount passes when the bucket is full, and what was taken
    unasked (an answer) has no limit; both are then earned before anything else passes. So the average always holds."""

    def __init__(self, per_minute: float, burst_s: float) -> None:
        self.per_minute = per_minute
        self._burst_s = burst_s
        self._earned_at_s = -math.inf
        """By this time everything that was taken is earned again."""
        self._num_sharing = 1
        self._holds: list[QuotaHold] = []
        """Lists the open holds, the oldest first."""

    def share(self, num_routers: int) -> None:
        """Sets how many routers share the quota. The time until everything is earned stays, so the share of the burst
        that is used stays too."""
        self._num_sharing = max(1, num_routers)

    def wait_s(self, amount: float, now: float) -> float:
        """Returns the time until `amount` would pass; 0 if it passes now."""
        takes_s = min(amount * self._each_s, self._burst_s)
        wait_s = max(self._earned_at_s, now) + takes_s - self._burst_s - now
        return wait_s if wait_s > SLACK_S else 0.0

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, whether it passes or not; a negative amount gives back what was taken before."""
        if self._holds:
            newest = self._holds[-1]
            newest.least_s = min(newest.least_s, self.full_in_s(now))
        self._earned_at_s = max(self._earned_at_s, now) + amount * self._each_s

    def hold(self, amount: float, now: float) -> QuotaHold:
        """Takes `amount`, whether it passes or not. Returns a hold, which the caller must `settle`."""
        self.take(amount, now)
        hold = QuotaHold(amount * self._each_s)
        self._holds.append(hold)
        return hold

    def settle(self, hold: QuotaHold, share: float, now: float) -> None:
        """Ends a hold and gives `share` of it back, from 0 to 1. The bucket is then as if that share had not been
        taken: what the bucket would have earned in vain, being full without it, is not given back."""
        index = self._holds.index(hold)
        later = self._holds[index:]
        missing_s = min(self.full_in_s(now), *(each.least_s for each in later), math.inf)
        given_s = min(hold.taken_s * share, missing_s)
        self._earned_at_s -= given_s
        for each in later:
            each.least_s -= given_s
        if index:
            before = self._holds[index - 1]
            before.least_s = min(before.least_s, hold.least_s)
        del self._holds[index]

    @property
    def most(self) -> float:
        """Returns how much passes at once when the bucket is full."""
        return self._burst_s / self._each_s

    def left(self, now: float) -> float:
        """Returns how much would pass now; 0 if more was taken than the burst."""
        return max(0.0, self._burst_s - self.full_in_s(now)) / self._each_s

    def full_in_s(self, now: float) -> float:
        """Returns the time until everything that was taken is earned again."""
        return max(0.0, self._earned_at_s - now)

    @property
    def _each_s(self) -> float:
        """Returns the time in which an amount of 1 is earned at this router."""
        return 60.0 * self._num_sharing / self.per_minute


class QuotaState(NamedTuple):
    """A `QuotaState` is what a response header says of one quota: the share of the whole cluster per minute, what this
    router would let through now, and the time until the whole burst is there again."""

    quota: str
    """Names one of `QUOTAS`."""
    per_minute: float
    left: float
    full_in_s: float


class _Owner(NamedTuple):
    """An `_Owner` is a key or a tenant with its buckets. A quota without a limit has no bucket."""

    title: str
    buckets: Mapping[str, RateBucket]


class RateLimiter:
    """A `RateLimiter` holds the buckets of a router: two for each quota that a caller is limited by, of its key and of
    its tenant. A key that was removed from the file is forgotten once its buckets are full again."""

    MAX_IDLE_OWNERS = 4 * MAX_KEYS
    """Owners that are idle are dropped when there are more owners than this. A file has fewer keys, so this happens
    only after keys were exchanged for new ones."""

    def __init__(self, burst_s: float, clock: Clock) -> None:
        self._burst_s = burst_s
        self._clock = clock
        self._num_routers = 1
        self._owners: dict[tuple[str, str, RateQuota], _Owner] = {}

    def share(self, num_routers: int) -> None:
        """Sets the number of routers among which every quota is divided."""
        if num_routers != self._num_routers:
            self._num_routers = num_routers
            for owner in self._owners.values():
                for bucket in owner.buckets.values():
                    bucket.share(num_routers)

    def begin(self, caller: Caller, count: int = 1) -> None:
        """Takes `count` requests. Raises RateLimited if a quota of requests has no room for them, or if a quota of
        tokens is used up already, so that no prompt is made in vain; then nothing is taken."""
        self._check(caller, {"requests": count, "tokens": 1})
        self._take(caller, {"requests": count})

    def most_requests(self, caller: Caller) -> float:
        """Returns how many requests can pass together at best; infinity if nothing limits them. One always can."""
        limits = [owner.buckets["requests"].most for owner in self._of(caller) if "requests" in owner.buckets]
        return max(1, math.floor(min(limits) + SLACK_S)) if limits else math.inf

    def undo_begin(self, caller: Caller, count: int = 1) -> None:
        """Gives requests back, because they were refused later."""
        self._take(caller, {"requests": -count})

    def take_prompt(self, caller: Caller, num_tokens: int, media_s: float) -> Callable[[int], None]:
        """Takes the tokens of a prompt and the seconds of its media. Returns a function that the owner of the prompt
        must call once, with the number of tokens that count in the end: the others are given back, and the media too
        if no token counts. Raises RateLimited if one of the amounts does not fit; then nothing is taken."""
        amounts = {"tokens": num_tokens, "media_seconds": media_s}
        self._check(caller, amounts)
        now = self._clock.now()
        holds = [
            (quota, bucket, bucket.hold(amount, now))
            for owner in self._of(caller)
            for quota, bucket in owner.buckets.items()
            if (amount := amounts.get(quota, 0))
        ]

        def keep(num_kept: int) -> None:
            unused = 1 - min(1.0, num_kept / max(1, num_tokens))
            for quota, bucket, hold in holds:
                share = unused if quota == "tokens" else float(not num_kept)
                bucket.settle(hold, share, self._clock.now())

        return keep

    def spender(self, caller: Caller) -> Callable[[int], None]:
        """Returns a function that takes tokens of an answer, which exist already. It is called for each frame of an
        answer, so it looks up no bucket."""
        buckets = [owner.buckets["tokens"] for owner in self._of(caller) if "tokens" in owner.buckets]

        def spend(num_tokens: int) -> None:
            now = self._clock.now()
            for bucket in buckets:
                bucket.take(num_tokens, now)

        return spend if buckets else _spend_nothing

    def states(self, caller: Caller) -> list[QuotaState]:
        """Returns the state of each quota that limits the caller. Of a key and its tenant, the one that has less left
        counts."""
        now = self._clock.now()
        states: list[QuotaState] = []
        for quota in QUOTAS:
            own = [owner.buckets[quota] for owner in self._of(caller) if quota in owner.buckets]
            if own:
                least = min(own, key=lambda bucket: bucket.left(now))
                states.append(QuotaState(quota, least.per_minute, least.left(now), least.full_in_s(now)))
        return states

    # ------------------------------------------------------------ helpers

    def _check(self, caller: Caller, amounts: Mapping[str, float]) -> None:
        """Raises RateLimited if one of the amounts does not pass. The refusal names the quota that takes longest."""
        now = self._clock.now()
        refusals = [
            (wait_s, _refusal(owner.title, quota, amounts[quota], bucket, wait_s, now))
            for owner in self._of(caller)
            for quota, bucket in owner.buckets.items()
            if amounts.get(quota) and (wait_s := bucket.wait_s(amounts[quota], now))
        ]
        if refusals:
            raise max(refusals, key=itemgetter(0))[1]

    def _take(self, caller: Caller, amounts: Mapping[str, float]) -> None:
        now = self._clock.now()
        for owner in self._of(caller):
            for quota, bucket in owner.buckets.items():
                if amount := amounts.get(quota, 0):
                    bucket.take(amount, now)

    def _of(self, caller: Caller) -> list[_Owner]:
        """Returns the buckets of the caller's key and of its tenant, and makes those that are missing. Nothing is made
        for what has no limit."""
        owners: list[_Owner] = []
        tenant: Tenant = caller.tenant
        if not tenant.rates.is_unlimited:
            owners.append(self._owner("tenant", tenant.name, tenant.name, tenant.rates))
        if not caller.rates.is_unlimited:
            owners.append(self._owner("key", caller.key_id, caller.key_name, caller.rates))
        return owners

    def _owner(self, kind: str, identity: str, name: str, rates: RateQuota) -> _Owner:
        owner = self._owners.get((kind, identity, rates))
        if owner is None:
            self._drop_idle()
            owner = self._owners[kind, identity, rates] = _Owner(f"{kind} {name}", self._buckets(rates))
        return owner

    def _buckets(self, rates: RateQuota) -> dict[str, RateBucket]:
        limits = {
            "requests": rates.requests_per_minute,
            "tokens": rates.tokens_per_minute,
            "media_seconds": rates.media_seconds_per_minute,
        }
        buckets = {quota: RateBucket(limit, self._burst_s) for quota, limit in limits.items() if limit is not None}
        for bucket in buckets.values():
            bucket.share(self._num_routers)
        return buckets

    def _drop_idle(self) -> None:
        if len(self._owners) >= self.MAX_IDLE_OWNERS:
            now = self._clock.now()
            used = {name: owner for name, owner in self._owners.items() if _is_used(owner.buckets.values(), now)}
            self._owners = used


def _spend_nothing(_: int) -> None:
    """Takes nothing, because no quota limits the caller."""


def _is_used(buckets: Iterable[RateBucket], now: float) -> bool:
    return any(bucket.full_in_s(now) > 0 for bucket in buckets)


def _refusal(title: str, quota: str, amount: float, bucket: RateBucket, wait_s: float, now: float) -> RateLimited:
    name = "seconds of media" if quota == "media_seconds" else quota
    asked = f", and the request needs {amount:g}" if amount > 1 else ""
    return RateLimited(
        f"the {title} may use {bucket.per_minute:g} {name} per minute; {math.floor(bucket.left(now))} are left "
        f"now{asked}; try again in {wait_s:.3g} s",
        retry_after_s=wait_s,
    )


# ------------------------------------------------------------ what headers say


def rate_headers(states: Iterable[QuotaState]) -> dict[str, str]:
    """Returns OpenAI's `x-ratelimit-*` headers, and `x-ratelimit-*-media-seconds` in the same form."""
    headers: dict[str, str] = {}
    for state in states:
        name = state.quota.replace("_", "-")
        headers[f"x-ratelimit-limit-{name}"] = f"{state.per_minute:.0f}"
        headers[f"x-ratelimit-remaining-{name}"] = str(math.floor(state.left + SLACK_S))
        headers[f"x-ratelimit-reset-{name}"] = duration(state.full_in_s)
    return headers


def duration(seconds: float) -> str:
    """Returns a time as OpenAI writes it: `0s`, `20ms`, `1.5s`, `6m0s`, `1h0m3s`. It is rounded up to milliseconds."""
    num_ms = max(0, math.ceil(seconds * 1000 - 1e-6))
    if num_ms < 1000:
        return f"{num_ms}ms" if num_ms else "0s"
    minutes, ms = divmod(num_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{rest}"
    return f"{minutes}m{rest}" if minutes else rest
