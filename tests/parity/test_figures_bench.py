"""Tests the figures of articles that Weft reproduces exactly: a worked merge, the tokens of a picture, and the bytes of
all features."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.benches.figures_bench import DOCUMENTED_MERGE, llava_tokens, planned_merge, submitted_media

pytestmark = pytest.mark.torch


def test_the_worked_merge_is_planned_by_a_family(tmp_path: Path) -> None:
    merge = planned_merge(tmp_path)
    assert merge == list(DOCUMENTED_MERGE)
    assert sum(part.num_tokens for part in merge) == 4_883
    assert sum(part.num_bytes for part in merge) == 4_883 * 4_096 * 2


def test_a_picture_of_any_size_has_576_tokens_in_llava(tmp_path: Path) -> None:
    assert llava_tokens(tmp_path) == [576, 576, 576]


async def test_the_bytes_of_all_features_are_counted(tmp_path: Path) -> None:
    submitted = await submitted_media(tmp_path)
    assert submitted.encoded_bytes == submitted.planned_bytes > 0
    assert 0.0 < submitted.submit_s < 1.0
