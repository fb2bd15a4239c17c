"""Keeps the counters of one scheduler's life, which only grow. This module knows nothing of their readers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerTally:
    steps: int = 0
    """Counts the committed steps."""
    tokens_generated: int = 0
    prompt_tokens_computed: int = 0
    """Counts the computed prompt tokens; recomputed ones count again."""
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    """`prefix_query_tokens` is the number of prompt tokens of sequences that have begun, and `prefix_hit_tokens` is the
    number of those among them that were found in the prefix cache."""
    num_preemptions: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    """These two count the guessed tokens that were computed (`drafts_proposed`), and those of them that were right and
    were sent (`drafts_accepted`)."""
