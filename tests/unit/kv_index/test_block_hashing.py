"""Tests block identity with golden vectors (changing one invalidates every cache of a running cluster), and which
blocks must differ."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fabric.contracts import (
    WEFT_KV,
    BlockHash,
    KvScheme,
    MediaItem,
    MmHash,
    PlaceholderRange,
    block_hashes,
    split_hashes,
)
from fabric.contracts.identity import block_hash
from kv_index import is_known_scheme, keys_of_blocks, prompt_block_hashes
from kv_index.block_hashing import extra_keys


def image(index: int, digit: str, num_tokens: int = 20) -> MediaItem:
    return MediaItem(index, "image", MmHash(digit * 32), (1, 8, 8), (num_tokens,), 64, f"messages.0.content.{index}")


TEXT_GOLDEN = ["ffa62429b7646bc92e125d8321b35258", "c78945aaec5919d33d471664b54159e2"]
MEDIA_GOLDEN = ["ab5f60dd00f73b1a3c72aac4f3b63481", "cd5e6bd382c6299b3f8a5dd050d4717b"]
ADAPTER_GOLDEN = ["5e2561d26a0b8e385d4832ad9687da1c", "cbcd41ae448a626da595dc068439316a"]

PICTURE = (PlaceholderRange(offset=6, length=20, item=0, unit=0, row=0),)


def hashes_of(tokens: list[int], block_size: int, *rest: Any, **kwargs: Any) -> list[BlockHash]:
    return split_hashes(prompt_block_hashes(KvScheme(WEFT_KV, block_size), tokens, *rest, **kwargs))


def test_golden_vectors_of_text_and_media() -> None:
    text = hashes_of(list(range(32)), 16)
    media = hashes_of([7] * 32, 16, PICTURE, [image(0, "a")], cache_salt="tenant")
    assert [block.hex() for block in text] == TEXT_GOLDEN
    assert [block.hex() for block in media] == MEDIA_GOLDEN


def test_chain_equals_hashing_block_by_block() -> None:
    media = [image(0, "a"), image(1, "b", 5)]
    runs = (*PICTURE, PlaceholderRange(offset=30, length=5, item=1, unit=0, row=0))
    tokens = [3] * 40
    parent, expected = None, []
    for index in range(10):
        content = np.asarray(tokens[4 * index : 4 * index + 4], dtype="<i4").tobytes()
        parent = block_hash(parent, content, extra_keys(index, 4, runs, media, "s"))
        expected.append(parent)
    assert hashes_of(tokens, 4, runs, media, "s") == expected


@pytest.mark.parametrize("first", range(10))
def test_a_chain_goes_on_from_any_block(first: int) -> None:
    media = [image(0, "a"), image(1, "b", 5)]
    runs = (*PICTURE, PlaceholderRange(offset=30, length=5, item=1, unit=0, row=0))
    whole = hashes_of([3] * 40, 4, runs, media, "s")
    keys = keys_of_blocks(first, 10, 4, runs, media, "s")
    content = np.full(4 * (10 - first), 3, dtype="<i4").tobytes()
    assert block_hashes(whole[first - 1] if first else None, content, 16, keys) == whole[first:]


def test_only_full_blocks_have_a_hash() -> None:
    assert len(hashes_of(list(range(31)), 16)) == 1
    assert hashes_of(list(range(15)), 16) == []


def test_two_pictures_share_no_block_from_the_first_that_holds_one() -> None:
    tokens = [1, 2, 3, 4, 5, 6] + [9] * 20 + [7, 8]
    first = hashes_of(tokens, 4, PICTURE, [image(0, "a")])
    second = hashes_of(tokens, 4, PICTURE, [image(0, "b")])
    assert first[0] == second[0]
    assert all(a != b for a, b in zip(first[1:], second[1:], strict=True))


def test_blocks_inside_one_picture_differ_by_the_row_they_start_at() -> None:
    keys = [extra_keys(index, 4, PICTURE, [image(0, "a")]) for index in range(2, 6)]
    assert len({tuple(each) for each in keys}) == 4


def test_a_picture_that_begins_elsewhere_in_the_block_is_another_block() -> None:
    early = hashes_of([9] * 8, 8, (PlaceholderRange(1, 6, 0, 0, 0),), [image(0, "a", 6)])
    late = hashes_of([9] * 8, 8, (PlaceholderRange(2, 6, 0, 0, 0),), [image(0, "a", 6)])
    assert early != late


def test_units_of_one_item_are_told_apart() -> None:
    frames = MediaItem(0, "video", MmHash("c" * 32), (2, 4, 4), (4, 4), 32, "p")
    first = hashes_of([9] * 4, 4, (PlaceholderRange(0, 4, 0, 0, 0),), [frames])
    second = hashes_of([9] * 4, 4, (PlaceholderRange(0, 4, 0, 1, 0),), [frames])
    assert first != second


def test_salt_isolates_every_block_and_cannot_pose_as_a_medium() -> None:
    tokens = list(range(8))
    plain = hashes_of(tokens, 4)
    salted = hashes_of(tokens, 4, cache_salt="a")
    assert all(a != b for a, b in zip(plain, salted, strict=True))
    media_key = extra_keys(0, 4, (PlaceholderRange(0, 4, 0, 0, 0),), [image(0, "a")])
    assert extra_keys(0, 4, (), (), cache_salt="mm") != media_key


def test_an_adapter_isolates_every_block_and_can_not_pose_as_a_salt() -> None:
    tokens = list(range(8))
    plain, adapted = hashes_of(tokens, 4), hashes_of(tokens, 4, adapter="a")
    assert [block.hex() for block in adapted] == ADAPTER_GOLDEN
    assert all(a != b for a, b in zip(plain, adapted, strict=True))
    assert extra_keys(0, 4, (), (), "a") != extra_keys(0, 4, (), (), "", "a")
    assert keys_of_blocks(0, 2, 4, (), (), "s", "a") == {0: extra_keys(0, 4, (), (), "s", "a")}
    assert len(extra_keys(0, 4, (), (), "s", "a")) == 2
    assert keys_of_blocks(1, 2, 4, (), (), "s", "a") == {}


class CountedRuns(tuple[PlaceholderRange, ...]):
    """Counts how many runs are looked at."""

    seen = 0

    def __iter__(self) -> Iterator[PlaceholderRange]:
        for run in super().__iter__():
            CountedRuns.seen += 1
            yield run


@pytest.mark.parametrize("num_runs", [10, 200])
def test_work_grows_with_blocks_plus_runs_not_with_their_product(num_runs: int) -> None:
    CountedRuns.seen = 0
    runs = CountedRuns(PlaceholderRange(16 * i, 8, 0, 0, 0) for i in range(num_runs))
    hashes_of([1] * (16 * num_runs), 16, runs, [image(0, "a")])
    assert CountedRuns.seen == num_runs


def test_a_run_counts_for_the_blocks_that_it_lies_in_and_for_no_neighbour() -> None:
    run = (PlaceholderRange(offset=8, length=8, item=0, unit=0, row=0),)
    media = [image(0, "a", 8)]
    has_keys = [bool(extra_keys(index, 4, run, media)) for index in range(6)]
    assert has_keys == [False, False, True, True, False, False]
    assert sorted(keys_of_blocks(0, 6, 4, run, media)) == [2, 3]
    assert sorted(keys_of_blocks(3, 6, 4, run, media)) == [0]


def test_a_salt_is_a_key_of_the_first_block_alone() -> None:
    assert keys_of_blocks(0, 2, 4, (), (), "tenant") == {0: extra_keys(0, 4, (), (), "tenant")}
    assert keys_of_blocks(0, 2, 4, (), ()) == {}
    assert keys_of_blocks(0, 0, 4, (), (), "tenant") == {}
    assert keys_of_blocks(1, 3, 4, (), (), "tenant") == {}


def test_a_prompt_has_no_hashes_in_a_scheme_that_is_unknown() -> None:
    unknown, empty = KvScheme("sha256-cbor", 16), KvScheme(WEFT_KV, 0)
    assert [is_known_scheme(each) for each in (KvScheme(WEFT_KV, 1), unknown, empty)] == [True, False, False]
    assert prompt_block_hashes(unknown, list(range(64))) == b""
    assert prompt_block_hashes(empty, list(range(64))) == b""
