"""Decides which requests a router takes, and keeps account of what they use. `Admission` limits what is in flight at
once, for the whole router, for each tenant and for each API key: requests, the bytes of their bodies, and the tokens of
their prompts; and it asks the `RateLimiter` about quotas per minute. A request that passes a budget is refused before
work is spent on it, with the time after which it would fit. `TenantLedger` charges the tenants for encoder seconds and
worker tokens.

A part of each budget is kept for requests without media, so that slow encoders and large files never keep text out. The
module knows nothing of HTTP, and nothing of members: `CapacityGate` lets admitted requests wait for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from fabric.contracts import (
    Clock,
    DeadlineOutOfReach,
    Draining,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestId,
    mint_request_id,
)
from router.api import GenerationFields
from router.observe import RouterMetrics, SpanContext
from router.planning import RoutePlan, Standing, TenantShares
from router.router_config import ANONYMOUS, RouterConfig, Tenant
from router.run.key_book import NO_CALLER, Caller
from router.run.rate_limits import RateLimiter

SMALL_BODY_BYTES = 64 * 1024
"""The router takes a body of at most this size for that of a text, although a small picture may have one too."""
TEXT_SHARE_OF_BYTES = 16
"""One part in this many of the budget for bodies is kept for small bodies."""
TEXT_SHARE_OF_PLACES = 8
"""One place in this many is kept for requests without media."""
BATCH_PRIORITY = 2**32
"""This is added to the priority of a request of the class `batch` at members, so that every interactive request goes
first there. It is larger than the range of the priorities that clients may set."""


# ------------------------------------------------------------ terms


class RequestTerms(NamedTuple):
    """The `RequestTerms` say how urgent a request is and whose it is."""

    caller: Caller
    is_batch: bool
    ages_at_s: float
    """From this time on the router's clock, a request of the class `batch` counts as interactive."""
    first_token_by_s: float | None
    """This is the request's deadline for its first token, on the router's clock; None if it has none."""
    spend_tokens: Callable[[int], None] = lambda _: None
    """Takes tokens of the answer from the caller's quota."""
    keep_prompt: Callable[[int], None] = lambda _: None
    """Says, once, how many tokens of the prompt count for the caller's quotas."""

    @classmethod
    def of(cls, fields: GenerationFields, caller: Caller, batch_wait_s: float, now: float) -> RequestTerms:
        """Returns the terms of a request that arrived at `now`."""
        tenant = caller.tenant
        own_ms = None if fields.weft is None else fields.weft.ttft_deadline_ms
        deadline_ms = tenant.ttft_deadline_ms if own_ms is None else own_ms
        return cls(
            caller,
            is_batch=tenant.service_class == "batch" or fields.service_tier == "flex",
            ages_at_s=now + batch_wait_s,
            first_token_by_s=None if deadline_ms is None else now + deadline_ms / 1000,
        )

    @property
    def tenant(self) -> Tenant:
        return self.caller.tenant

    @property
    def service_class(self) -> str:
        return "batch" if self.is_batch else "interactive"

    def standing(self, priority: int) -> Standing:
        return Standing(self.tenant.name, priority, self.is_batch, self.ages_at_s)

    def member_priority(self, priority: int, now: float) -> int:
        """Returns the priority at members of a request that is dispatched now."""
        return priority + BATCH_PRIORITY if self.is_batch and now < self.ages_at_s else priority


def check_deadline(predicted_s: float, first_token_by_s: float | None, now: float) -> None:
    """Raises DeadlineOutOfReach if the first token, predicted for `predicted_s` from now, would come after its
    deadline. The time to wait before another try is that by which it would be late, because work that is queued ahead
    of a request takes as long to be done as it delays the request."""
    if first_token_by_s is not None and now + predicted_s > first_token_by_s:
        late_s = now + predicted_s - first_token_by_s
        raise DeadlineOutOfReach(
            f"the first token is predicted in {predicted_s:.3g} s, which is {late_s:.3g} s after the deadline of the "
            "request",
            param="weft.ttft_deadline_ms",
            retry_after_s=late_s,
        )


# ------------------------------------------------------------ budgets


class UsageLimit:
    """A `UsageLimit` counts what is in use of a limit, and how fast it becomes free again."""

    MEMORY_S = 10.0
    """The rate is an average in which the weight of what was given back falls by e in this time."""

    def __init__(self, limit: int | None) -> None:
        """Creates a limit of which nothing is used. The limit None lets everything pass."""
        self.limit = limit
        self.used = 0
        self._given_back = 0.0
        self._at_s = 0.0

    def lacks(self, amount: int, reserved: int = 0) -> int:
        """Returns by how much `amount` would pass the limit, of which `reserved` is kept for others; 0 if it fits."""
        return 0 if self.limit is None else max(0, self.used + amount - (self.limit - reserved))

    def take(self, amount: int) -> None:
        self.used += amount

    def give_back(self, amount: int, now: float) -> None:
        self.used -= amount
        self._given_back = self._faded(now) + amount
        self._at_s = now

    def wait_s(self, lacking: int, now: float) -> float | None:
        """Predicts the time until this much has been given back, or returns None if nothing was given back lately."""
        rate = self._faded(now) / self.MEMORY_S
        return lacking / rate if rate > 0 else None

    def _faded(self, now: float) -> float:
        return self._given_back * math.exp((self._at_s - now) / self.MEMORY_S)


class UsageLimits(NamedTuple):
    """Holds the limits of the router, or those of one tenant."""

    requests: UsageLimit
    bodies: UsageLimit
    tokens: UsageLimit


class Admission:
    """Limits what may be in flight at once. It refuses requests beyond the limits before any work is spent on them."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._clock = clock
        self._retry_after_s = config.retry_after_s
        self._router = UsageLimits(UsageLimit(None), UsageLimit(None), UsageLimit(None))
        self._tenants: dict[str, UsageLimits] = {}
        """Holds also the tenants that a later config no longer has, because their requests may be in flight."""
        self._num_routers = 1
        self._key_to_requests: dict[str, UsageLimit] = {}
        """Holds the keys that have a limit of their own and requests in flight."""
        self.rates = RateLimiter(config.rate_burst_s, clock)
        self._with_media = UsageLimit(None)
        self._when_empty: list[Callable[[], None]] = []
        self.is_closed = False
        self.reconfigure(config)

    def reconfigure(self, config: RouterConfig) -> None:
        """Takes the limits of `config` for what is admitted from now on. What is in flight stays, also beyond a lower
        limit, and what tenants have used of a quota that stays the same counts on."""
        most = (config.max_in_flight, config.max_bodies_bytes, config.max_prompt_tokens)
        for budget, limit in zip(self._router, most, strict=True):
            budget.limit = limit
        self._with_media.limit = config.max_in_flight - config.max_in_flight // TEXT_SHARE_OF_PLACES
        for each in (ANONYMOUS, *config.tenants):  # A configured tenant may have the same name.
            own = self._tenants.setdefault(each.name, UsageLimits(UsageLimit(None), UsageLimit(None), UsageLimit(None)))
            own.requests.limit, own.bodies.limit = each.max_in_flight, each.max_bodies_bytes
            own.tokens.limit = each.max_prompt_tokens
        self._name_to_most = {each.name: each.max_in_flight for each in config.tenants}
        self.share(self._num_routers)

    @property
    def num_in_flight(self) -> int:
        return self._router.requests.used

    @property
    def bodies_bytes(self) -> int:
        return self._router.bodies.used

    @property
    def prompt_tokens(self) -> int:
        return self._router.tokens.used

    def close(self, when_empty: Callable[[], None]) -> None:
        """Stops admitting requests. Calls `when_empty` once no request is in flight, at once if there is none now."""
        self.is_closed = True
        self._when_empty.append(when_empty)
        self._tell_when_empty()

    def share(self, num_routers: int) -> None:
        """Sets the number of routers among which the quotas of keys and tenants, and their limits of requests in
        flight, are divided."""
        self._num_routers = max(1, num_routers)
        self.rates.share(self._num_routers)
        for name, most in self._name_to_most.items():
            self._tenants[name].requests.limit = self._part_of(most)

    def _part_of(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self._num_routers)

    def admit(self, caller: Caller = NO_CALLER) -> Ticket:
        """Returns a ticket with a new request id. Raises Overloaded if too many requests are in flight, RateLimited if
        the caller has used up a quota, or Draining once it is closed."""
        if self.is_closed:
            raise Draining("the cluster is stopping and takes no new requests", retry_after_s=self._retry_after_s)
        self._check_places(caller, 1)
        self.rates.begin(caller)
        return self._take_places(caller, 1)[0]

    def admit_rest(self, caller: Caller, num_requests: int, num_at_once: int) -> list[Ticket]:
        """Counts for the quotas all `num_requests` that an admitted exchange makes, of which the first has a ticket.
        Returns tickets for the others of the first `num_at_once`, also once it is closed: all or none. Raises
        InvalidRequest if no wait would let so many pass, RateLimited, or Overloaded; then the exchange has taken
        nothing and counts for no quota."""
        self.rates.undo_begin(caller)
        most = self.rates.most_requests(caller)
        if num_requests > most:
            message = (
                f"a request may have at most {most} prompts here, because each counts for the quota of requests per "
                f"minute, not {num_requests}"
            )
            raise InvalidRequest(message, param="prompt")
        self._check_places(caller, num_at_once - 1)
        self.rates.begin(caller, num_requests)
        return self._take_places(caller, num_at_once - 1)

    def admit_more(self, caller: Caller, count: int) -> list[Ticket]:
        """Returns tickets for further requests of an exchange that were counted for the quotas before, also once it is
        closed: all or none. Raises Overloaded, after which nothing was taken."""
        self._check_places(caller, count)
        return self._take_places(caller, count)

    def _check_places(self, caller: Caller, count: int) -> None:
        """Raises Overloaded if the router, the tenant or the key has no place for so many requests."""
        if not count:
            return
        tenant = caller.tenant
        router, own = self._router.requests, self._tenants[tenant.name].requests
        if lacking := router.lacks(count):
            message = f"{router.used} requests are in flight, and this router takes at most {router.limit}"
            raise self._overloaded(message, router, lacking)
        if lacking := own.lacks(count):
            message = f"{own.used} requests of the tenant {tenant.name} are in flight, which may have {own.limit}"
            raise self._overloaded(message, own, lacking)
        self._check_key(caller, count)

    def _take_places(self, caller: Caller, count: int) -> list[Ticket]:
        self._router.requests.take(count)
        self._tenants[caller.tenant.name].requests.take(count)
        if caller.max_in_flight is not None:
            self._key_to_requests.setdefault(caller.key_id, UsageLimit(None)).take(count)
        return [Ticket(self, caller, mint_request_id()) for _ in range(count)]

    def most_at_once(self, caller: Caller) -> int:
        """Returns how many requests of the caller may be in flight at once, if there are no others."""
        limits = (
            self._router.requests.limit,
            self._tenants[caller.tenant.name].requests.limit,
            self._part_of(caller.max_in_flight),
        )
        return min(limit for limit in limits if limit is not None)

    def _check_key(self, caller: Caller, count: int) -> None:
        of_key, most = self._key_to_requests.get(caller.key_id), self._part_of(caller.max_in_flight)
        if of_key is not None and most is not None and of_key.used + count > most:
            message = f"{of_key.used} requests of the key {caller.key_name} are in flight, which may have {most}"
            raise self._overloaded(f"{message} at this router", of_key, 1)

    def take_bytes(self, ticket: Ticket, num_bytes: int) -> None:
        """Counts bytes of a body; tickets call it. Raises Overloaded if all bodies together exceed a budget."""
        router, own = self._router.bodies, self._tenants[ticket.tenant.name].bodies
        is_small = ticket.num_bytes + num_bytes <= SMALL_BODY_BYTES
        reserved = 0 if is_small or router.limit is None else router.limit // TEXT_SHARE_OF_BYTES
        if lacking := router.lacks(num_bytes, reserved):
            message = f"the bodies in flight would have {router.used + num_bytes} bytes, and this router takes at most"
            kept = f" ({reserved} of these are kept for bodies of up to {SMALL_BODY_BYTES})" if reserved else ""
            raise self._overloaded(f"{message} {router.limit}{kept}", router, lacking)
        if lacking := own.lacks(num_bytes):
            message = (
                f"the bodies of the tenant {ticket.tenant.name} in flight would have {own.used + num_bytes} bytes, and "
                f"it may have {own.limit}"
            )
            raise self._overloaded(message, own, lacking)
        router.take(num_bytes)
        own.take(num_bytes)

    def take_prompt(self, ticket: Ticket, num_tokens: int, media_s: float) -> Callable[[int], None]:
        """Counts the tokens of a prompt and the seconds of its media; tickets call it. Returns the function of
        `RateLimiter.take_prompt` that must be called in the end. Raises Overloaded if all prompts
        together exceed a budget, unless nothing else is in flight that could be waited for, and RateLimited if the
        caller's quota has no room; the request then counts for no quota."""
        router, own = self._router.tokens, self._tenants[ticket.tenant.name].tokens
        for budget, whose in ((router, "this router takes"), (own, f"the tenant {ticket.tenant.name} may have")):
            if budget.used and (lacking := budget.lacks(num_tokens)):
                message = (
                    f"the prompts in flight would have {budget.used + num_tokens} tokens, and {whose} at most "
                    f"{budget.limit}"
                )
                raise self._overloaded(message, budget, lacking)
        try:
            keep = self.rates.take_prompt(ticket.caller, num_tokens, media_s)
        except RateLimited:
            self.rates.undo_begin(ticket.caller)
            raise
        router.take(num_tokens)
        own.take(num_tokens)
        return keep

    def enter_media(self) -> None:
        """Counts a request with media; tickets call it. Raises Overloaded if such requests have all the places that are
        not kept for text."""
        if self._with_media.lacks(1):
            message = (
                f"{self._with_media.used} requests with media are in flight, and this router takes at most "
                f"{self._with_media.limit} of its {self._router.requests.limit} requests with media"
            )
            raise self._overloaded(message, self._with_media, 1)
        self._with_media.take(1)

    def give_back(self, ticket: Ticket) -> None:
        """Returns all that a ticket has taken; tickets call it."""
        now = self._clock.now()
        for budgets in (self._router, self._tenants[ticket.tenant.name]):
            budgets.requests.give_back(1, now)
            budgets.bodies.give_back(ticket.num_bytes, now)
            budgets.tokens.give_back(ticket.num_tokens, now)
        if ticket.has_media:
            self._with_media.give_back(1, now)
        of_key = self._key_to_requests.get(ticket.caller.key_id)
        if of_key is not None and ticket.caller.max_in_flight is not None:
            of_key.give_back(1, now)
            if not of_key.used:
                del self._key_to_requests[ticket.caller.key_id]
        self._tell_when_empty()

    def _overloaded(self, message: str, budget: UsageLimit, lacking: int) -> Overloaded:
        wait_s = budget.wait_s(lacking, self._clock.now())
        return Overloaded(message, retry_after_s=self._retry_after_s if wait_s is None else wait_s)

    def _tell_when_empty(self) -> None:
        while self._when_empty and not self.num_in_flight:
            self._when_empty.pop()()


class Ticket:
    """A `Ticket` is a request's place among those in flight, with what it takes of the budgets. The request holds it
    until `release`, which may be called twice."""

    def __init__(self, admission: Admission, caller: Caller, request_id: RequestId) -> None:
        self.request_id = request_id
        self.caller = caller
        self.num_bytes = 0
        self.num_tokens = 0
        self.has_media = False
        self.span: SpanContext | None = None
        """Names the request's span in a tracing system, if one is used."""
        self._admission: Admission | None = admission

    def grow(self, num_bytes: int) -> None:
        """Counts `num_bytes` more bytes of body. Raises Overloaded if all bodies together exceed a budget."""
        self._open_admission().take_bytes(self, num_bytes)
        self.num_bytes += num_bytes

    @property
    def tenant(self) -> Tenant:
        return self.caller.tenant

    def take_prompt(self, num_tokens: int, media_s: float = 0.0) -> Callable[[int], None]:
        """Counts the tokens of the request's prompt, and the seconds of its sounds and videos. Returns a function that
        must be called once, with the tokens that count for the caller's quotas in the end. Raises Overloaded if all
        prompts together exceed a budget, and RateLimited if a quota of the caller has no room."""
        keep = self._open_admission().take_prompt(self, num_tokens, media_s)
        self.num_tokens += num_tokens
        return keep

    def enter_media(self) -> None:
        """Notes that the request has media. Raises Overloaded if only places for text are left."""
        self._open_admission().enter_media()
        self.has_media = True

    def release(self) -> None:
        if self._admission is not None:
            self._admission.give_back(self)
            self._admission = None

    def _open_admission(self) -> Admission:
        assert self._admission is not None, "the ticket was released"
        return self._admission


# ------------------------------------------------------------ what tenants are charged

FIRST_ANSWER_TOKENS = 128.0
"""An answer is expected to have this many tokens as long as the tenant has had none."""
ANSWER_MEMORY = 0.1
"""Each answer moves the tenant's expected length by this share towards its own."""


class TenantLedger:
    """Charges the tenants for what their requests use, in tokens of a worker: the tokens that it computes and
    generates, and the seconds of encoders at a fixed rate. A request is charged when it is dispatched, by prediction,
    and the charge is corrected when it ends."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.shares = TenantShares({each.name: each.weight for each in config.tenants})
        self._tokens_per_encoder_second = config.tokens_per_encoder_second
        self._metrics = metrics
        self._tenant_to_answer_tokens: dict[str, float] = {}

    def reconfigure(self, config: RouterConfig) -> None:
        """Takes the weights and the rate of `config` for what is charged from now on."""
        self.shares.set_weights({each.name: each.weight for each in config.tenants})
        self._tokens_per_encoder_second = config.tokens_per_encoder_second

    def charge(self, tenant: str, plan: RoutePlan, max_answer_tokens: int, num_choices: int) -> float:
        """Charges a request by its plan, and returns the charge. `max_answer_tokens` limits each choice."""
        expected = self._tenant_to_answer_tokens.get(tenant, FIRST_ANSWER_TOKENS)
        answer = num_choices * min(expected, max_answer_tokens)
        cost = self._cost(plan.explanation.winner.num_prefill_tokens + answer, predicted_encoder_s(plan))
        self.shares.charge(tenant, cost)
        return cost

    def settle(self, tenant: str, charged: float, usage: AttemptUsage) -> None:
        """Corrects a charge by what the attempt really used, and counts it."""
        num_tokens = usage.num_computed_tokens + usage.num_generated_tokens
        self.shares.correct(tenant, self._cost(num_tokens, usage.encoder_s) - charged)
        if usage.is_complete:
            before = self._tenant_to_answer_tokens.get(tenant, FIRST_ANSWER_TOKENS)
            own = usage.num_generated_tokens / usage.num_choices
            self._tenant_to_answer_tokens[tenant] = before + ANSWER_MEMORY * (own - before)
        self._metrics.observe_charge(tenant, num_tokens, usage.encoder_s)

    def _cost(self, num_tokens: float, encoder_s: float) -> float:
        return max(1.0, num_tokens + self._tokens_per_encoder_second * encoder_s)


class AttemptUsage(NamedTuple):
    """An `AttemptUsage` is what one attempt really used."""

    num_computed_tokens: int
    num_generated_tokens: int
    encoder_s: float
    num_choices: int = 1
    is_complete: bool = True
    """Tells whether the attempt ended by itself, so that its answer has the length that answers have."""


def predicted_encoder_s(plan: RoutePlan) -> float:
    """Returns the seconds of forward passes that the plan's items are predicted to take."""
    return sum(terms.encode_s for terms in plan.explanation.winner.items if not terms.is_cached)
