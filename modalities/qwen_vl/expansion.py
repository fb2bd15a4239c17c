"""What stands in the prompt where the chat template wrote one placeholder: rows of media, and tokens between them.

Knows no model: what a placeholder becomes is handed in, as pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fabric.errors import InvalidRequest
from fabric.messages import PlaceholderRange
from modalities.family import ExpandedPrompt, ItemPlan


class Rows(NamedTuple):
    """Rows `[first, first + length)` of an item's features."""

    item: int
    first: int
    length: int


Piece = Sequence[int] | Rows
"""Tokens, or rows."""


def expand(
    token_ids: Sequence[int],
    modality_to_token: Mapping[str, int],
    plans: Sequence[ItemPlan],
    pieces_of: Callable[[int], Sequence[Piece]],
) -> ExpandedPrompt:
    """Puts `pieces_of(i)` in the place of the placeholder of plan i. Plans with an anchor have none. A row takes the
    token of its item's modality. Raises InvalidRequest if the prompt's placeholders are not those of the plans, in
    order."""
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
            if not isinstance(piece, Rows):
                ids += piece
                continue
            runs += _runs(plans[piece.item], piece, len(ids))
            ids += [modality_to_token[plans[piece.item].modality]] * piece.length
    return ExpandedPrompt(ids, tuple(runs))


def _runs(plan: ItemPlan, rows: Rows, offset: int) -> Iterator[PlaceholderRange]:
    """Of rows that stand at `offset`, a run for each unit."""
    begin, first, end = 0, rows.first, rows.first + rows.length
    for unit, num_tokens in enumerate(plan.unit_tokens):
        if begin <= first < begin + num_tokens and first < end:
            length = min(end, begin + num_tokens) - first
            yield PlaceholderRange(offset=offset, length=length, item=rows.item, unit=unit, row=first - begin)
            offset, first = offset + length, first + length
        begin += num_tokens
