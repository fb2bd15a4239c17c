"""Computes the score of a worker: the time to first token that it would need, by walking the prompt in order.

    t = time until w can start (its queue: see `waiting`)
    for each span not covered by w's KV prefix:
        text span:   t = t + prefill_w(length, context)
        media unit:  t = max(t, land(unit, w)) + prefill_w(length, context)
    ttft(w) = t + first_token_w

Text ahead of a medium overlaps with the medium's encoding, because `t` advances meanwhile; with no text ahead of it,
the walk is the plain sum of encoding, transfer and prefill. This module knows nothing of the choice between workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

from fabric.messages import MediaItem
from fabric.weighted_tokens import weighted_tokens
from router.planning.views import RouteQuery, WorkerView

TEXT = -1


class Span(NamedTuple):
    """A `Span` holds the prompt positions `[start, end)`: text, or a run of one unit's features."""

    start: int
    end: int
    item: int
    """This is the `MediaItem.index`, or `TEXT`."""
    unit: int
    num_weighted: float
    """This is the number of the span's tokens, weighted by their context (`fabric.weighted_tokens`)."""


class ScoredPrompt(NamedTuple):
    """A `ScoredPrompt` is a query's prompt, cut into the parts that the walk needs."""

    spans: tuple[Span, ...]
    """These spans contain all positions, in order, without holes or empty spans."""
    span_ends: tuple[int, ...]
    media: tuple[MediaItem, ...]
    item_ends: tuple[int, ...]
    """This holds, for each medium, where its last run ends (0 if it has no run)."""
    num_tokens: int
    context_scale_tokens: float

    def num_weighted_after(self, covered_tokens: int) -> float:
        """Returns what remains to be computed after a prefix, in weighted tokens."""
        return weighted_tokens(self.num_tokens - covered_tokens, covered_tokens, self.context_scale_tokens)

    def missing_items(self, covered_tokens: int) -> tuple[MediaItem, ...]:
        """Returns the media that a prefix does not wholly contain; each of them must be encoded, and as a whole."""
        return tuple(item for item, end in zip(self.media, self.item_ends, strict=True) if end > covered_tokens)


class Walk(NamedTuple):
    prefill_s: float
    held_s: float
    end_s: float


def cut(query: RouteQuery, context_scale_tokens: float) -> ScoredPrompt:
    """Cuts a query into spans."""
    spans: list[Span] = []
    item_to_end: dict[int, int] = {}

    def add(start: int, end: int, item: int, unit: int) -> None:
        if end > start:
            spans.append(Span(start, end, item, unit, weighted_tokens(end - start, start, context_scale_tokens)))

    at = 0
    for run in query.placeholders:
        if run.length > 0:
            add(at, run.offset, TEXT, 0)
            add(run.offset, run.end, run.item, run.unit)
            item_to_end[run.item] = at = run.end
    add(at, query.token_count, TEXT, 0)
    item_ends = tuple(item_to_end.get(item.index, 0) for item in query.media)
    ends = tuple(span.end for span in spans)
    return ScoredPrompt(tuple(spans), ends, query.media, item_ends, query.token_count, context_scale_tokens)


def covered_tokens(worker: WorkerView, num_tokens: int, block_size: int) -> int:
    """Returns how many prompt tokens need no computing: whole blocks only, and never the last token, because its logits
    are needed."""
    return min(worker.covered_blocks, max(num_tokens - 1, 0) // block_size) * block_size


def walk(
    prompt: ScoredPrompt,
    covered: int,
    start_s: float,
    per_token_s: float,
    unit_to_landing_s: Mapping[tuple[int, int], float],
) -> Walk:
    """Walks from `start_s` over the spans after `covered` tokens. Each unit on the way must have a landing time."""
    now_s, prefill_s, held_s = start_s, 0.0, 0.0
    for start, end, item, unit, num_weighted in prompt.spans[bisect_right(prompt.span_ends, covered) :]:
        if item != TEXT:
            landing_s = unit_to_landing_s[item, unit]
            if landing_s > now_s:
                held_s += landing_s - now_s
                now_s = landing_s
        if start < covered:
            num_weighted = weighted_tokens(end - covered, covered, prompt.context_scale_tokens)
        span_s = per_token_s * num_weighted
        prefill_s += span_s
        now_s += span_s
    return Walk(prefill_s, held_s, now_s)
