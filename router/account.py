"""Measures what one request takes while it runs: first token, time between tokens, time at workers.

At the request's end it writes these to the metrics and to the trace. It decides nothing.
"""

from __future__ import annotations

from fabric.errors import Aborted
from fabric.messages import GenerateResult
from router.api.response import Usage
from router.attempt import Attempt
from router.context import RouterContext
from router.metrics import Timing
from router.prompt import Prompt
from router.streams import RequestStream
from router.traces import RequestTrace


class Account:
    """An `Account` measures one request over all its attempts."""

    def __init__(self, context: RouterContext, stream: RequestStream, trace: RequestTrace) -> None:
        self._context = context
        self._stream = stream
        self._trace = trace
        self._admitted_at_s = context.clock.now()
        self._started_at_s = self._admitted_at_s
        self._first_token_at_s: float | None = None
        self._last_token_at_s: dict[int, float] = {}
        self._worker_s = 0.0

    def start(self, admitted_at_s: float) -> None:
        self._admitted_at_s, self._started_at_s = admitted_at_s, self._context.clock.now()

    def observe_tokens(self, attempt: Attempt, choice: int, num_tokens: int) -> None:
        """Records that `num_tokens` new tokens of a choice have arrived now."""
        assert attempt.plan is not None
        now = self._context.clock.now()
        if self._first_token_at_s is None:
            self._first_token_at_s = now
            self._trace.add("first_token", choice=choice)
            plan = attempt.plan
            actual_s = now - attempt.dispatched_at_s
            self._context.metrics.observe_first_token(plan.predicted_ttft_s, plan.lower_bound_s, actual_s)
        elif choice in self._last_token_at_s:
            each_s = (now - self._last_token_at_s[choice]) / num_tokens
            for _ in range(num_tokens):
                self._context.metrics.itl.observe(each_s)
        self._last_token_at_s[choice] = now

    def attempt_ended(self, attempt: Attempt) -> None:
        if attempt.plan is not None:
            self._worker_s += self._context.clock.now() - attempt.dispatched_at_s

    def usage(self, prompt: Prompt, result: GenerateResult | None) -> Usage:
        return Usage(
            num_prompt_tokens=len(prompt.token_ids),
            num_completion_tokens=sum(choice.num_tokens for choice in self._stream.choices),
            num_cached_tokens=0 if result is None else result.num_cached_tokens,
            modality_to_tokens=prompt.modality_to_tokens,
        )

    def close(self, prompt: Prompt) -> None:
        """Records the end of the request in the metrics and in the trace."""
        now = self._context.clock.now()
        metrics, usage, error = self._context.metrics, self._stream.usage, self._stream.error
        first = self._first_token_at_s
        code = "ok" if error is None else error.code
        timing = Timing(
            total_s=now - self._admitted_at_s,
            intake_s=self._started_at_s - self._admitted_at_s,
            worker_s=self._worker_s,
            first_token_s=None if first is None else first - self._admitted_at_s,
        )
        metrics.observe_request(code, timing)
        metrics.prompt_tokens.inc(len(prompt.token_ids))
        metrics.completion_tokens.inc(sum(choice.num_tokens for choice in self._stream.choices))
        if usage is not None:
            metrics.prefix_hit_tokens.inc(usage.num_cached_tokens)
        self._trace.add("aborted" if isinstance(error, Aborted) else "finished", code=code)
        self._trace.note(
            outcome=code,
            message=None if error is None else error.message,
            finish_reasons=[choice.finish_reason for choice in self._stream.choices],
            timing=timing,
            usage=None if usage is None else usage.to_json(),
        )
