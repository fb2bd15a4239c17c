"""Tests the reading of tensors that clients send: no bytes do more than be refused, and features keep their numbers."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save

from fabric.contracts import InvalidMedia
from modalities.media import Tensor, features_of, integers_of, read_tensors
from modalities.media.tensor_file import MAX_HEADER_BYTES

NAMES = ("float32", "float16", "bfloat16")


def written(header: object, num_bytes: int = 0) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def one(dtype: str, shape: list[int], num_bytes: int, **more: object) -> bytes:
    return written({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}, **more}, num_bytes)


def torch_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([1.0]))
    return buffer.getvalue()


# ---------------------------------------------------------------- These tests cover files.


def test_tensors_are_read_by_name() -> None:
    rows, grid = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([[1, 2, 4]], np.int64)
    tensors = read_tensors(save({"rows": rows, "grid": grid}, {"format": "pt"}), "p")
    assert tensors["rows"] == Tensor("F32", (2, 3), rows.tobytes())
    assert integers_of(tensors["grid"]) == [1, 2, 4]
    assert integers_of(tensors["rows"]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 0),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", MAX_HEADER_BYTES) + b"{" * MAX_HEADER_BYTES,
        struct.pack("<Q", 2**64 - 1) + b"{}",
        written({"a": {}}),
        written({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, 4),
        written({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}),
        written({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, 4),
        written({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, 4),
        written({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, 4),
        one("F32", [2], 4),
        one("F32", [1], 4) + b"more",
        one("F32", [1], 4, __metadata__={"a": "x" * MAX_HEADER_BYTES}),
    ],
)
def test_broken_files_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidMedia, match="must be in the safetensors format") as caught:
        read_tensors(data, "messages.0.content.1")
    assert caught.value.param == "messages.0.content.1"


@pytest.mark.parametrize("data", [torch_archive(), *(pickle.dumps([1.0] * 99, protocol) for protocol in (2, 3, 4, 5))])
def test_pickles_are_refused_and_never_opened(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*arguments: object) -> None:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(pickle, "loads", opened)
    monkeypatch.setattr(pickle, "Unpickler", opened)
    with pytest.raises(InvalidMedia, match=r"write them with safetensors\.torch\.save"):
        read_tensors(data, "p")


def tried(data: bytes) -> dict[str, Tensor]:
    """Returns the tensors, or none if the file is refused; other errors are flaws."""
    try:
        return read_tensors(data, "p")
    except InvalidMedia:
        return {}


WHOLE = save({"image_embeds": np.ones((3, 8), np.float32), "image_grid_thw": np.array([1, 2, 6], np.int64)})


@settings(deadline=None, max_examples=400)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert tried(data) == {}


@settings(deadline=None, max_examples=1000)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(WHOLE)))
def test_changed_files_are_refused_or_have_tensors_of_their_size(changes: list[tuple[int, int]], cut: int) -> None:
    changed = bytearray(WHOLE)
    for at, byte in changes:
        changed[at] = byte
    for data in (bytes(changed), bytes(changed[:cut])):
        for tensor in tried(data).values():
            assert len(tensor.data) <= len(data)
            try:
                feature = features_of(tensor, 1, 8, "float32", "p")
            except InvalidMedia:
                continue
            assert np.isfinite(np.frombuffer(feature, np.float32)).all()


# ---------------------------------------------------------------- These tests cover features.


@settings(deadline=None, max_examples=50)
@given(num_levels=st.integers(1, 3), num_tokens=st.integers(1, 5), has_batch=st.booleans())
def test_the_levels_of_a_token_follow_each_other_in_the_file_only(
    num_levels: int, num_tokens: int, has_batch: bool
) -> None:
    feature = np.random.default_rng(0).standard_normal((num_levels, num_tokens, 4)).astype(np.float32)
    rows = np.concatenate(list(feature), axis=1)
    (tensor,) = read_tensors(save({"a": rows[None] if has_batch else rows}), "p").values()
    found = np.frombuffer(features_of(tensor, num_levels, 4, "float32", "p"), np.float32)
    np.testing.assert_array_equal(found.reshape(feature.shape), feature)


@settings(deadline=None, max_examples=100)
@given(arrays(np.float16, (2, 4), elements=st.floats(-60_000, 60_000, width=16)))
def test_float16_becomes_float32_and_comes_back(rows: np.ndarray) -> None:
    wide = features_of(Tensor("F16", (2, 4), rows.tobytes()), 1, 4, "float32", "p")
    np.testing.assert_array_equal(np.frombuffer(wide, np.float32).reshape(2, 4), rows.astype(np.float32))
    assert features_of(Tensor("F32", (2, 4), wide), 1, 4, "float16", "p") == rows.tobytes()


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (1.0040, 0x3F81), (-2.0, 0xC000), (3.38e38, 0x7F7E)],
)
def test_numbers_are_rounded_to_the_nearest_bfloat16_ties_to_even(value: float, bits: int) -> None:
    row = np.full((1, 2), value, np.float32)
    found = features_of(Tensor("F32", (1, 2), row.tobytes()), 1, 2, "bfloat16", "p")
    assert np.frombuffer(found, np.uint16).tolist() == [bits, bits]
    back = features_of(Tensor("BF16", (1, 2), found), 1, 2, "float32", "p")
    assert np.frombuffer(back, np.uint32).tolist() == [bits << 16] * 2


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "kind"), [("F32", np.float32), ("F16", np.float16)])
def test_numbers_that_are_not_finite_are_refused(dtype: str, wrong: float, name: str, kind: type) -> None:
    rows = np.ones((3, 4), kind)
    rows[2, 3] = wrong
    with pytest.raises(InvalidMedia, match="NaN or infinite"):
        features_of(Tensor(name, (3, 4), rows.tobytes()), 1, 4, dtype, "p")


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_bfloat16_that_is_not_finite_is_refused(bits: int) -> None:
    rows = np.array([[0x3F80, bits]], np.uint16)
    for dtype in NAMES:
        with pytest.raises(InvalidMedia, match="NaN or infinite"):
            features_of(Tensor("BF16", (1, 2), rows.tobytes()), 1, 2, dtype, "p")


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70_000.0), ("bfloat16", 3.4e38)])
def test_numbers_that_are_too_large_for_the_model_are_refused(dtype: str, value: float) -> None:
    rows = np.full((1, 2), value, np.float32)
    with pytest.raises(InvalidMedia, match=f"too large for {dtype}"):
        features_of(Tensor("F32", (1, 2), rows.tobytes()), 1, 2, dtype, "p")


@pytest.mark.parametrize("shape", [(), (8,), (1, 7), (8, 1), (0, 8), (2, 1, 8), (1, 1, 1, 8), (1, 0, 8)])
def test_features_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    rows = np.ones(shape, np.float32)
    with pytest.raises(InvalidMedia, match=r"must have the shape \(number of tokens, 8\), not "):
        features_of(Tensor("F32", shape, rows.tobytes()), 2, 4, "float32", "p")


@pytest.mark.parametrize("dtype", ["F64", "I32", "U8", "BOOL", "F8_E4M3"])
def test_features_of_another_dtype_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidMedia, match=f"one of F32, F16, BF16, not {dtype}"):
        features_of(Tensor(dtype, (1, 4), bytes(32)), 1, 4, "float32", "p")
