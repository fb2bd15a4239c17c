"""Tests the expansion of placeholders."""

from __future__ import annotations

import pytest

from fabric.contracts import InvalidRequest, PlaceholderRange
from modalities.family import ItemPlan, expand_placeholders

TOKENS = {"image": 901, "video": 902}


def plan(modality: str, *unit_tokens: int) -> ItemPlan:
    return ItemPlan(modality, (1, 1, 1), unit_tokens, sum(unit_tokens), (1, 1))


def test_the_worked_example() -> None:
    """The prompt has 7 text + 1,024 image + 8 text + 30 frames of 128 + 4 text = 4,883 positions: the image is at 7 to
    1,030 and the video at 1,039 to 4,878. The numbers come from the worked merge of the OmniConnector
    article (docs/references.md)."""
    text = [[*range(7)], [*range(10, 18)], [*range(20, 24)]]
    prompt = [*text[0], 901, *text[1], 902, *text[2]]
    expanded = expand_placeholders(prompt, TOKENS, [plan("image", 1024), plan("video", *[128] * 30)])
    assert len(expanded.token_ids) == 4883
    assert expanded.token_ids == text[0] + [901] * 1024 + text[1] + [902] * 3840 + text[2]
    image, *frames = expanded.placeholders
    assert (image.offset, image.end - 1) == (7, 1030)
    assert (frames[0].offset, frames[-1].end - 1) == (1039, 4878)
    assert [(run.unit, run.row, run.length, run.item) for run in frames] == [(i, 0, 128, 1) for i in range(30)]
    assert [run.offset for run in frames] == list(range(1039, 4879, 128))


def test_text_alone_stays() -> None:
    assert expand_placeholders([1, 2, 3], TOKENS, []).token_ids == [1, 2, 3]
    assert expand_placeholders([], TOKENS, []).placeholders == ()


def test_placeholders_side_by_side() -> None:
    expanded = expand_placeholders([901, 901], TOKENS, [plan("image", 2), plan("image", 3)])
    assert expanded.token_ids == [901] * 5
    assert expanded.placeholders == (
        PlaceholderRange(offset=0, length=2, item=0, unit=0, row=0),
        PlaceholderRange(offset=2, length=3, item=1, unit=0, row=0),
    )


@pytest.mark.parametrize(("prompt", "num_plans"), [([1, 901], 0), ([1], 1), ([901, 901], 1), ([901], 2)])
def test_another_number_of_placeholders_is_refused(prompt: list[int], num_plans: int) -> None:
    with pytest.raises(InvalidRequest, match="placeholders for"):
        expand_placeholders(prompt, TOKENS, [plan("image", 4)] * num_plans)


def test_modalities_keep_their_order() -> None:
    with pytest.raises(InvalidRequest, match="media item 0 is video"):
        expand_placeholders([901, 902], TOKENS, [plan("video", 4), plan("image", 4)])
