"""Decides when a choice ends by its ids and counts. It knows nothing of stop strings: the router, which has the text,
handles those.
"""

from __future__ import annotations

from fabric.messages import StopConditions


def ending_ids(stop: StopConditions) -> tuple[int, ...]:
    """Returns the ids that end a choice."""
    return stop.stop_token_ids if stop.ignore_eos else (*stop.eos_token_ids, *stop.stop_token_ids)


def finish_reason(stop: StopConditions, token_id: int, num_generated: int, is_context_full: bool) -> str | None:
    """Returns the finish reason after `token_id` was drawn as generated token number `num_generated` (counted from 1),
    or None while the choice goes on. Below `min_tokens` no id ends the choice; the counts always do."""
    if num_generated >= stop.min_tokens:
        if token_id in stop.eos_token_ids and not stop.ignore_eos:
            return "stop"
        if token_id in stop.stop_token_ids:
            return "stop"
    if num_generated >= stop.max_tokens or is_context_full:
        return "length"
    return None
