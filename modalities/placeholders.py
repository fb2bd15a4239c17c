"""Expands the placeholders of a prompt to one position for each row of features, with tokens between the rows where a
family writes some. This module knows nothing of models or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fabric.errors import InvalidRequest
from fabric.messages import PlaceholderRange
from modalities.family import ExpandedPrompt, ItemPlan


def expand_placeholders(
    token_ids: Sequence[int], placeholder_token_ids: Mapping[str, int], plans: Sequence[ItemPlan]
) -> ExpandedPrompt:
    """Repeats the i-th placeholder token as often as `plans[i]` has rows; each unit (a part of an item that is encoded
    on its own) gets a run of its own.

    `placeholder_token_ids` maps a modality to the id of its placeholder token. Other tokens stay as they are. Raises
    InvalidRequest if the prompt's placeholders are not those of the plans' modalities, in order."""
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


class FeatureRows(NamedTuple):
    """Names the rows `[first, first + length)` of an item's features."""

    item: int
    first: int
    length: int


Piece = Sequence[int] | FeatureRows
"""A `Piece` is a sequence of tokens, or rows of features."""


def expand_pieces(
    token_ids: Sequence[int],
    modality_to_token: Mapping[str, int],
    plans: Sequence[ItemPlan],
    pieces_of: Callable[[int], Sequence[Piece]],
    modality_to_row_token: Mapping[str, int] | None = None,
) -> ExpandedPrompt:
    """Replaces the placeholder of plan i by the pieces `pieces_of(i)`. A plan with an anchor (a sound track whose rows
    are among those of its video) has no placeholder. A row takes the token of its item's modality in
    `modality_to_row_token`, which is by default the placeholder token. Raises InvalidRequest if the prompt's
    placeholders are not those of the plans, in order."""
    modality_to_row_token = modality_to_row_token or modality_to_token
    known = set(modality_to_token.values())
    waiting = iter([index for index, plan in enumerate(plans) if plan.anchor < 0])
    num_wanted, num_found = sum(plan.anchor < 0 for plan in plans), sum(token in known for token in token_ids)
    if num_wanted != num_found:
        raise InvalidRequest(f"the prompt has {num_found} placeholders for {num_wanted} media items")
    ids: list[int] = []
    runs: list[PlaceholderRange] = []
    for token in token_ids:
        if token not in known:
            ids.append(token)
            continue
        index = next(waiting)
        if token != modality_to_token.get(plans[index].modality):
            raise InvalidRequest(
                f"media item {index} is {plans[index].modality}, its placeholder is of another modality"
            )
        for piece in pieces_of(index):
            if not isinstance(piece, FeatureRows):
                ids += piece
                continue
            runs += _runs(plans[piece.item], piece, len(ids))
            ids += [modality_to_row_token[plans[piece.item].modality]] * piece.length
    return ExpandedPrompt(ids, tuple(runs))


def _runs(plan: ItemPlan, rows: FeatureRows, offset: int) -> Iterator[PlaceholderRange]:
    """Yields a run for each unit of the rows, which begin at position `offset`."""
    begin, first, end = 0, rows.first, rows.first + rows.length
    for unit, num_tokens in enumerate(plan.unit_tokens):
        if begin <= first < begin + num_tokens and first < end:
            length = min(end, begin + num_tokens) - first
            yield PlaceholderRange(offset=offset, length=length, item=rows.item, unit=unit, row=first - begin)
            offset, first = offset + length, first + length
        begin += num_tokens
