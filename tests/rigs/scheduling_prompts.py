"""Builds prompts for the scheduler's property tests, with few different beginnings, so that prefixes are often
shared."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from fabric.contracts import MediaItem, MmHash, PlaceholderRange

PAD = 99
PICTURES: dict[str, tuple[int, ...]] = {"a1": (3,), "b2": (7,), "c3": (4, 2)}
"""Maps a hash to the tokens of each unit. The last picture is spread over three runs with text between them."""
TEXTS = (0, 1, 2, 3)
Segment = int | str
BEGINNINGS: tuple[tuple[Segment, ...], ...] = ((0,), (0, 1), (2, "a1", 1), (2, "b2", 1), (3, "c3", 0), ("b2", 0))

segments = st.builds(
    lambda beginning, rest: (*beginning, *rest),
    st.sampled_from(BEGINNINGS),
    st.lists(st.sampled_from((*TEXTS, *PICTURES)), max_size=3),
)


def build(parts: Sequence[Segment]) -> tuple[tuple[int, ...], tuple[PlaceholderRange, ...], tuple[MediaItem, ...]]:
    """Returns the token ids, placeholders and media of a prompt. Text number n consists of 2n + 3 tokens of its own."""
    token_ids: list[int] = []
    runs: list[PlaceholderRange] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            token_ids += [10 * part + 2 + index % 3 for index in range(2 * part + 3)]
            continue
        item = len(media)
        unit_tokens = PICTURES[part]
        media.append(MediaItem(item, "image", MmHash(part), (1, 2, 2), unit_tokens, 8, f"part.{item}"))
        for unit, row, length in _runs(unit_tokens):
            runs.append(PlaceholderRange(len(token_ids), length, item, unit, row))
            token_ids += [PAD] * length + [5]
    return tuple(token_ids), tuple(runs), tuple(media)


def _runs(unit_tokens: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Returns `(unit, row, length)` of each run; the first of several units is cut into two halves."""
    if len(unit_tokens) == 1:
        return [(0, 0, unit_tokens[0])]
    half = unit_tokens[0] // 2
    return [(0, 0, half), (0, half, unit_tokens[0] - half), *((u, 0, n) for u, n in enumerate(unit_tokens) if u)]
