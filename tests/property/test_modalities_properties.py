"""Checks random prompts, grids and files: expansion against a plain loop, positions against their definition, and that
probing answers every input with a header or `InvalidMedia`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modalities_files import encode, oriented, picture

from fabric.contracts import InvalidMedia, MediaItem, MmHash, PlaceholderRange, ProtocolError
from modalities.families.qwen_vl.prompt_layout import Block, grid_positions, prompt_positions
from modalities.family import ItemPlan, expand_placeholders
from modalities.media import ImagePlugin, MediaLimits, decode_image

PLACEHOLDER = 7
SEEDS = [
    *(encode(picture(40, 30), name) for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")),
    encode(picture(9, 9, "P")),
    oriented(picture(40, 30), 6),
    oriented(picture(40, 30), 6, "PNG"),
]


def block(item: MediaItem) -> Block:
    return Block(grid_positions(item.grid, merge_size=2, time_step=3))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[ItemPlan]]:
    token_ids: list[int] = draw(st.lists(st.integers(0, 9), max_size=40))
    plans = []
    for _ in range(token_ids.count(PLACEHOLDER)):
        grid = (draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4)), 2 * draw(st.integers(1, 4)))
        per_frame = grid[1] * grid[2] // 4
        plans.append(ItemPlan("image", grid, (per_frame,) * grid[0], grid[0] * grid[1] * grid[2], (1, 1)))
    return token_ids, plans


def media_of(plans: list[ItemPlan]) -> list[MediaItem]:
    return [
        MediaItem(index, plan.modality, MmHash("0" * 32), plan.grid, plan.unit_tokens, plan.cost, "p")
        for index, plan in enumerate(plans)
    ]


@settings(deadline=None)
@given(prompts())
def test_expansion_is_the_plain_loop(case: tuple[list[int], list[ItemPlan]]) -> None:
    token_ids, plans = case
    expanded = expand_placeholders(token_ids, {"image": PLACEHOLDER}, plans)
    want: list[int] = []
    runs = []
    item = 0
    for token in token_ids:
        if token != PLACEHOLDER:
            want.append(token)
            continue
        for unit, length in enumerate(plans[item].unit_tokens):
            runs.append(PlaceholderRange(len(want), length, item, unit, 0))
            want += [token] * length
        item += 1
    assert expanded.token_ids == want
    assert list(expanded.placeholders) == runs
    assert all(type(run.offset) is int and type(run.length) is int for run in expanded.placeholders)


@settings(deadline=None)
@given(prompts())
def test_positions_are_text_then_block_then_text(case: tuple[list[int], list[ItemPlan]]) -> None:
    token_ids, plans = case
    expanded = expand_placeholders(token_ids, {"image": PLACEHOLDER}, plans)
    media = media_of(plans)
    positions = prompt_positions(len(expanded.token_ids), expanded.placeholders, media, {"image": block})
    want: list[tuple[int, int, int]] = []
    following, item = 0, 0
    for token in token_ids:
        if token != PLACEHOLDER:
            want.append((following,) * 3)
        else:
            time, height, width = plans[item].grid
            want += [
                (following + 3 * t, following + h, following + w)
                for t in range(time)
                for h in range(height // 2)
                for w in range(width // 2)
            ]
            item += 1
        following = max((max(row) for row in want), default=-1) + 1
    assert positions.ids.dtype == np.int64
    assert positions.ids.T.tolist() == [list(row) for row in want]
    assert positions.delta == following - len(want)


def test_runs_of_one_item_may_be_parted_by_text() -> None:
    """The text consists of time stamps between frames: both runs belong to the block that began at the first run."""
    (item,) = media_of([ItemPlan("image", (2, 2, 4), (2, 2), 16, (1, 1))])
    runs = [PlaceholderRange(1, 2, 0, 0, 0), PlaceholderRange(4, 2, 0, 1, 0)]
    positions = prompt_positions(7, runs, [item], {"image": block})
    assert positions.ids.tolist() == [[0, 1, 1, 3, 4, 4, 5], [0, 1, 1, 3, 1, 1, 5], [0, 1, 2, 3, 1, 2, 5]]
    assert positions.delta == -1


@pytest.mark.parametrize(
    "run",
    [
        PlaceholderRange(0, 9, 0, 0, 0),
        PlaceholderRange(0, 2, 1, 0, 0),
        PlaceholderRange(0, 2, 0, 2, 0),
        PlaceholderRange(0, 2, 0, 0, 1),
        PlaceholderRange(0, 0, 0, 0, 0),
        PlaceholderRange(0, 1, 0, 0, -1),
        PlaceholderRange(-1, 2, 0, 0, 0),
    ],
)
def test_runs_that_do_not_fit_are_refused(run: PlaceholderRange) -> None:
    (item,) = media_of([ItemPlan("image", (2, 2, 4), (2, 2), 16, (1, 1))])
    with pytest.raises(ProtocolError):
        prompt_positions(6, [run], [item], {"image": block})


def test_overlapping_runs_and_wrong_grids_are_refused() -> None:
    (item,) = media_of([ItemPlan("image", (2, 2, 4), (2, 2), 16, (1, 1))])
    twice = [PlaceholderRange(0, 2, 0, 0, 0), PlaceholderRange(1, 2, 0, 1, 0)]
    with pytest.raises(ProtocolError, match="does not fit"):
        prompt_positions(6, twice, [item], {"image": block})
    with pytest.raises(ProtocolError, match="rows"):
        prompt_positions(6, twice[:1], media_of([ItemPlan("image", (1, 2, 4), (2, 2), 8, (1, 1))]), {"image": block})
    with pytest.raises(ProtocolError, match="modality"):
        prompt_positions(6, twice[:1], [item], {})


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")
@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=12),
    st.integers(0, 10**6),
)
def test_broken_files_end_as_a_header_or_as_invalid_media(
    seed: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(seed)
    for at, value in changes:
        data[at % min(len(data), 400)] = value
    broken = bytes(data[: cut % (2 * len(data))])
    refusal, header, image = None, None, None
    try:
        header = ImagePlugin().probe(broken, "p")
        ImagePlugin().validate(header, MediaLimits(max_image_pixels=10**6), "p")
        image, again = decode_image(broken, "p")
    except InvalidMedia as error:
        refusal = error
    if refusal is not None:
        assert refusal.param == "p"
    else:
        assert header == again
        assert image is not None
        assert image.size == (header.width, header.height)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")
@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", *(seed[:12] for seed in SEEDS)]))
def test_noise_is_invalid_media(noise: bytes, magic: bytes) -> None:
    with pytest.raises(InvalidMedia):
        decode_image(magic + noise[:100], "p")
