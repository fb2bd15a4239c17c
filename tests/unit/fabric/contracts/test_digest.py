"""Tests that digests are part of the wire format: they are the same in every process and version, and framing separates
their parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import frame, mm_hash, uniform
from fabric.contracts.identity import block_hash

ITEM = {"namespace": "m@1", "modality": "image", "options": "{}", "geometry": (2, 3), "salt": ""}


def test_golden_mm_hash() -> None:
    assert mm_hash(b"content", **ITEM) == "07128c275a75dd381bf99c029fee9189"
    assert mm_hash(b"content", **{**ITEM, "salt": "t"}) == "c526aa989932d35cf59dcd14f511e19c"


def test_golden_block_hash() -> None:
    first = block_hash(None, b"\x01\x00\x00\x00")
    assert first.hex() == "ad0a843db987854d9417b7701e263512"
    assert block_hash(first, b"\x02\x00\x00\x00", [b"image", b"x"]).hex() == "d05c62edd23f1bb5c89171763e151eb6"


def test_golden_uniform() -> None:
    assert uniform(0, 0, 0) == 0.5655305751831616
    assert uniform(42, 1, 7) == 0.2803249266618718
    assert uniform(-1, 0, 0) == 0.07846584676384516


@given(st.lists(st.binary(max_size=6), max_size=5), st.lists(st.binary(max_size=6), max_size=5))
@settings(deadline=None)
def test_frames_are_equal_only_for_equal_parts(left: list[bytes], right: list[bytes]) -> None:
    assert (frame(left) == frame(right)) == (left == right)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", "m@2"),
        ("modality", "audio"),
        ("options", '{"a":1}'),
        ("geometry", (3, 2)),
        ("salt", "tenant"),
    ],
)
def test_every_field_of_an_item_counts(field: str, value: str | tuple[int, int]) -> None:
    assert mm_hash(b"content", **ITEM) != mm_hash(b"content", **{**ITEM, field: value})


def test_neighbouring_fields_do_not_run_into_each_other() -> None:
    split = mm_hash(b"", **{**ITEM, "namespace": "ab", "modality": "c"})
    assert split != mm_hash(b"", **{**ITEM, "namespace": "a", "modality": "bc"})
    assert mm_hash(b"tx", **ITEM) != mm_hash(b"x", **{**ITEM, "salt": "t"})


def test_blocks_are_told_apart_by_parent_tokens_and_extras() -> None:
    parent = block_hash(None, b"\x01\x00\x00\x00")
    tokens = b"\x02\x00\x00\x00"
    hashes = {
        block_hash(None, tokens),
        block_hash(parent, tokens),
        block_hash(parent, tokens, [b"ab"]),
        block_hash(parent, tokens, [b"a", b"b"]),
        block_hash(parent, tokens + b"\x00\x00\x00\x00"),
    }
    assert len(hashes) == 5
    assert {len(digest) for digest in hashes} == {16}


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 100), st.integers(0, 10_000))
@settings(deadline=None)
def test_draws_are_in_the_unit_interval_and_repeat(seed: int, choice: int, index: int) -> None:
    draw = uniform(seed, choice, index)
    assert 0.0 <= draw < 1.0
    assert draw == uniform(seed, choice, index)


def test_draws_are_spread_evenly() -> None:
    draws = [uniform(7, choice, index) for choice in range(4) for index in range(1000)]
    assert len(set(draws)) == 4000
    tenths = [sum(low <= 10 * draw < low + 1 for draw in draws) for low in range(10)]
    assert min(tenths) > 300
    assert max(tenths) < 500
