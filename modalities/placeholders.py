"""Placeholders of a prompt, expanded to one position per row of features. Knows no model and no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fabric.errors import InvalidRequest
from fabric.messages import PlaceholderRange
from modalities.family import ExpandedPrompt, ItemPlan


def expand_placeholders(
    token_ids: Sequence[int], placeholder_token_ids: Mapping[str, int], plans: Sequence[ItemPlan]
) -> ExpandedPrompt:
    """Repeats the i-th placeholder token as often as `plans[i]` has rows; each unit gets a run of its own.

    `placeholder_token_ids`: modality -> id of its placeholder token. Other tokens stay as they are. Raises
    InvalidRequest if the prompt's placeholders are not the plans' modalities, in order."""
    ids = np.asarray(token_ids, dtype=np.int64).reshape(-1)
    at = np.flatnonzero(np.isin(ids, np.fromiter(placeholder_token_ids.values(), dtype=np.int64)))
    if len(at) != len(plans):
        raise InvalidRequest(f"the prompt has {len(at)} placeholders for {len(plans)} media items")
    for index, (found, plan) in enumerate(zip(ids[at].tolist(), plans, strict=True)):
        if found != placeholder_token_ids.get(plan.modality):
            raise InvalidRequest(f"media item {index} is {plan.modality}, its placeholder is of another modality")
    counts = np.ones(len(ids), dtype=np.int64)
    counts[at] = [sum(plan.unit_tokens) for plan in plans]
    starts = np.cumsum(counts) - counts
    runs: list[PlaceholderRange] = []
    for item, (plan, start) in enumerate(zip(plans, starts[at].tolist(), strict=True)):
        ends = np.cumsum(plan.unit_tokens).tolist()
        runs += [
            PlaceholderRange(offset=start + end - length, length=length, item=item, unit=unit, row=0)
            for unit, (length, end) in enumerate(zip(plan.unit_tokens, ends, strict=True))
        ]
    return ExpandedPrompt(np.repeat(ids, counts).tolist(), tuple(runs))
