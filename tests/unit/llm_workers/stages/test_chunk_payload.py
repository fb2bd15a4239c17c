"""Tests that chunks and their names survive the way, and that bytes that are no chunk are refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import ErrorInfo, ProtocolError, StageKey
from llm_workers.stages import ChunkName, StageChunk, decode_chunk, encode_chunk

KEY = StageKey("chat-1.0")
AGE = (12.5, "chat-1")
DTYPES = ["int64", "int32", "uint16", "int8", "bool", "float32", "float64", "float16"]
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(0, 1000),
)
VALUES = st.one_of(
    st.text(max_size=20), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.booleans(), ARRAYS
)


@given(st.dictionaries(st.text(max_size=10), VALUES, max_size=6), st.integers(0, 10**6), st.booleans())
def test_a_chunk_survives_the_way(payload: dict[str, object], number: int, is_last: bool) -> None:
    received = decode_chunk(encode_chunk(StageChunk(KEY, number, is_last, payload), AGE))
    assert received.age == AGE
    assert received.error is None
    assert received.chunk[:3] == (KEY, number, is_last)
    assert received.chunk.payload.keys() == payload.keys()
    for name, value in payload.items():
        found = received.chunk.payload[name]
        if isinstance(value, np.ndarray):
            assert found.dtype == value.dtype
            assert found.shape == value.shape
            assert np.array_equal(found, value)
            assert found.ctypes.data % found.itemsize == 0
        else:
            assert type(found) is type(value)
            assert found == value


def test_an_array_is_copied_when_it_is_encoded() -> None:
    array = np.arange(12).reshape(3, 4)[:, ::2]
    data = encode_chunk(StageChunk(KEY, 0, False, {"a": array}), AGE)
    expected = array.copy()
    array[:] = 0
    assert np.array_equal(decode_chunk(data).chunk.payload["a"], expected)


def test_an_error_travels_in_a_chunk() -> None:
    error = ErrorInfo("engine_failed", "it broke")
    assert decode_chunk(encode_chunk(StageChunk(KEY, 3, True, {}), AGE, error)).error == error


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.array([1j])])
def test_what_is_no_plain_number_does_not_travel(array: np.ndarray) -> None:
    with pytest.raises(ProtocolError, match="can't travel"):
        encode_chunk(StageChunk(KEY, 0, False, {"a": array}), AGE)


def header(*arrays: tuple[str, str, tuple[int, ...]]) -> bytes:
    encoded = msgspec.msgpack.encode((KEY, 0, False, AGE, {}, arrays))
    return len(encoded).to_bytes(4, "little") + encoded


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff????",
        header() + b"more",
        header(("a", "<f4", (1000,))),
        header(("a", "<f4", (-1,))),
        header(("a", "|O", (1,))) + bytes(100),
        header(("a", "nonsense", (1,))) + bytes(100),
        header(("a", "<U8", (1,))) + bytes(100),
    ],
)
def test_bytes_that_are_no_chunk_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_chunk(data)


@given(st.text(min_size=1, max_size=30), st.integers(0, 99), st.integers(0, 10**8))
def test_the_name_of_a_chunk_is_read_back(request: str, stage_id: int, number: int) -> None:
    name = ChunkName(StageKey(request), stage_id, number)
    assert ChunkName.parse(str(name)) == name


@pytest.mark.parametrize("text", ["", "_", "a", "a_1", "_1_2", "a_b_1", "a_1_b", "a_1_2_", "a_1_²"])
def test_other_keys_are_no_names(text: str) -> None:
    assert ChunkName.parse(text) is None
