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
from fabric.sandbox.array_pipe import NotAMessage, receive, send
from modalities.family import EncoderInput

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with (pipe := Pipe())[0], pipe[1]:
        yield pipe


def sent(ends: Ends, message: object) -> Any:
    """Sends `message` from another thread, because the sender blocks until it is read, and returns what arrives."""
    sender = threading.Thread(target=send, args=(ends[0], message))
    sender.start()
    try:
        return receive(ends[1])
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
    """It loses a part of the array, or a part of the pickle."""
    ours, theirs = ends
    whole = written(np.arange(4))
    os.write(ours.fileno(), whole[:-num_lost])
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)


@pytest.mark.parametrize(
    "garbage",
    [
        b"warning: a library writes to a wrong file\n",
        written((1, None))[:-1] + b"!",  # The pickle has no end.
        written((1, None)).replace(b"\x80\x05", b"\x80\x7f"),  # The pickle's protocol does not exist.
        struct.pack("<4sIQQ", b"weft", 1, 0, 2**64 - 1),  # No array has this size.
        struct.pack("<4sIQ", b"weft", 0, 2**63),  # No array holds this pickle.
    ],
)
def test_garbage_is_no_message(ends: Ends, garbage: bytes) -> None:
    ours, theirs = ends
    os.write(ours.fileno(), garbage)
    with pytest.raises(NotAMessage):
        receive(theirs)


@settings(deadline=None, max_examples=200)
@given(place=st.integers(16, 200), value=st.integers(0, 255))
def test_a_damaged_pickle_raises_only_what_a_receiver_expects(place: int, value: int) -> None:
    """A damaged length of the pickle's own parts may ask for more memory than there is."""
    whole = bytearray(written((1, InvalidMedia("it is broken", param="part"))))
    whole[place % (len(whole) - 16) + 16] = value
    raised: Exception | None = None
    with (pipe := Pipe())[0], pipe[1]:
        os.write(pipe[0].fileno(), whole)
        try:
            receive(pipe[1])
        except Exception as error:
            raised = error
    assert raised is None or isinstance(raised, (NotAMessage, MemoryError))
