"""When a choice ends by its ids and counts. Stop strings are the router's, which has the text."""

from __future__ import annotations

from fabric.messages import StopConditions


def ending_ids(stop: StopConditions) -> tuple[int, ...]:
    """Ids that end a choice."""
    return stop.stop_token_ids if stop.ignore_eos else (*stop.eos_token_ids, *stop.stop_token_ids)


def finish_reason(stop: StopConditions, token_id: int, num_generated: int, is_context_full: bool) -> str | None:
    """After `token_id` was drawn as generated token number `num_generated` (from 1). Below `min_tokens` no id ends
    the choice; the counts always do."""
    if num_generated >= stop.min_tokens:
        if token_id in stop.eos_token_ids and not stop.ignore_eos:
            return "stop"
        if token_id in stop.stop_token_ids:
            return "stop"
    if num_generated >= stop.max_tokens or is_context_full:
        return "length"
    return None
