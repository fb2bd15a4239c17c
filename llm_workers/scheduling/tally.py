"""Counters of one scheduler's life. They only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    steps: int = 0
    """Committed."""
    tokens_generated: int = 0
    prompt_tokens_computed: int = 0
    """Recomputed ones count again."""
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens of sequences that have begun, and those of them that were found in the prefix cache."""
    num_preemptions: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    """Guessed tokens that were computed, and those of them that were right and went out."""
