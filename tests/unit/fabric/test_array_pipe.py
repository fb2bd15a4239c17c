"""Tests messages with arrays between two ends of a pipe."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fabric.contracts import InvalidMedia
from fabric.sandbox.array_pipe import receive, send
from fabric.sandbox.message_values import NotAMessage
from modalities.family import EncoderInput

Ends = tuple[Connection, Connection]
MOST_BYTES = 2**24


@pytest.fixture
def ends() -> Iterator[Ends]:
    with (pipe := Pipe())[0], pipe[1]:
        yield pipe


def sent(ends: Ends, message: object) -> Any:
    """Sends `message` from another thread, because the sender blocks until it is read, and returns what arrives."""
    sender = threading.Thread(target=send, args=(ends[0], message))
    sender.start()
    try:
        return receive(ends[1], MOST_BYTES)
    finally:
        sender.join()


def test_a_unit_larger_than_the_pipe_arrives_whole_and_may_be_written(ends: Ends) -> None:
    pixels = np.random.default_rng(0).random((1000, 1536), np.float32)
    number, units = sent(ends, (3, [EncoderInput("video", pixels, (10, 10, 10))]))
    assert (number, len(units), units[0].grid) == (3, 1, (10, 10, 10))
    np.testing.assert_array_equal(units[0].pixels, pixels)
    units[0].pixels[0, 0] = 7.0
    assert pixels[0, 0] != 7.0


def test_what_carries_no_array_arrives_between_messages_that_do(ends: Ends) -> None:
    assert sent(ends, (1, None)) == (1, None)
    np.testing.assert_array_equal(sent(ends, np.arange(5)), np.arange(5))
    error = sent(ends, InvalidMedia("it is broken", param="part"))
    assert isinstance(error, InvalidMedia)
    assert (error.message, error.param) == ("it is broken", "part")


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        arrays.arrays(
            st.sampled_from([np.uint8, np.float32, np.int64]), arrays.array_shapes(min_dims=0, min_side=0, max_side=4)
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_arrays_arrive_as_they_were(items: list[np.ndarray], is_transposed: bool) -> None:
    """Arrays may be empty or have no dimensions, and may have any order in memory."""
    items = [item.T if is_transposed else item for item in items]
    with (pipe := Pipe())[0], pipe[1]:
        found = sent(pipe, items)
    assert isinstance(found, list)
    for item, one in zip(items, found, strict=True):
        assert (one.dtype, one.shape) == (item.dtype, item.shape)
        np.testing.assert_array_equal(one, item)


def written(message: object) -> bytes:
    """Returns the bytes of a small message."""
    with (pipe := Pipe())[0], pipe[1]:
        send(pipe[0], message)
        return os.read(pipe[1].fileno(), 2**16)


@pytest.mark.parametrize("num_lost", [1, 2, 60])
def test_a_sender_that_dies_in_the_middle_is_noticed(ends: Ends, num_lost: int) -> None:
    """It loses a part of the array, or a part of the other values."""
    ours, theirs = ends
    whole = written(np.arange(4))
    os.write(ours.fileno(), whole[:-num_lost])
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs, MOST_BYTES)


@pytest.mark.parametrize(
    "garbage",
    [
        b"warning: a library writes to a wrong file\n",
        written((1, None))[:-1] + b"\xc1",  # MessagePack has no such byte.
        written(np.arange(4)).replace(struct.pack("<I", 1), struct.pack("<I", 0))[:-32],  # The array is missing.
        struct.pack("<4sIQQ", b"weft", 1, 0, 2**64 - 1),  # No array has this size.
        struct.pack("<4sIQ", b"weft", 0, 2**63),  # No values have this size.
        struct.pack("<4sIQ", b"weft", 2**32 - 1, 0),  # So many arrays have too many sizes.
        struct.pack("<4sIQQ", b"weft", 1, 0, MOST_BYTES),  # The array and its size are too large together.
    ],
)
def test_garbage_is_no_message(ends: Ends, garbage: bytes) -> None:
    ours, theirs = ends
    os.write(ours.fileno(), garbage)
    with pytest.raises(NotAMessage):
        receive(theirs, MOST_BYTES)
