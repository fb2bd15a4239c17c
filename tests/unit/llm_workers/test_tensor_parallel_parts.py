"""Tests what the ranks of a worker send to each other, which connections are accepted, and how work is divided. The
tests import no torch."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import ErrorInfo, ProtocolError
from llm_workers.scheduling import worker_bytes
from llm_workers.tensor_parallel.process_group import (
    RankFailed,
    Ready,
    RowsLike,
    StepHeader,
    Stop,
    decode,
    encode,
    rows_of,
    step_header,
)
from llm_workers.tensor_parallel.rank_group import TOKEN_BYTES, Door, Link, LinkClosed, knock
from llm_workers.worker_config import WorkerConfig
from modalities.family import ModelShape

TOKEN = bytes(range(TOKEN_BYTES))
SHAPE = ModelShape(8, 1, 2, num_kv_heads=6, head_dim=16, vocab_size=9, max_model_len=99)


@st.composite
def rows(draw: st.DrawFn) -> list[RowsLike]:
    """Draws rows that are packed one after the other, as a runner makes them."""
    made, at = [], 0
    for _ in range(draw(st.integers(1, 6))):
        start, num_tokens = draw(st.integers(0, 500)), draw(st.integers(1, 70))
        blocks = draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
        copied_from = draw(st.integers(-1, 2**40))
        made.append(RowsLike(at, start, num_tokens, np.array(blocks, dtype=np.int64), copied_from))
        at += num_tokens
    return made


@given(rows(), st.integers(1, 3), st.none() | st.tuples(st.integers(0, 3), st.integers(0, 50)))
def test_a_step_arrives_as_it_was_told(told: list[RowsLike], num_axes: int, features: tuple[int, int] | None) -> None:
    num_tokens = sum(row.num_tokens for row in told)
    header = decode(encode(step_header(told, (num_tokens, 64), num_axes, features)))
    assert isinstance(header, StepHeader)
    assert (header.num_tokens, header.hidden_size, header.num_axes) == (num_tokens, 64, num_axes)
    assert (header.num_levels, header.num_feature_rows) == (features or (0, None))
    found = rows_of(header)
    assert [row[:3] for row in found] == [row[:3] for row in told]
    for row, original in zip(found, told, strict=True):
        assert row.block_ids.dtype == np.int64
        assert row.copied_from == original.copied_from
        np.testing.assert_array_equal(row.block_ids, original.block_ids)


def test_what_is_no_step_is_refused() -> None:
    header = step_header([RowsLike(0, 0, 3, np.arange(2))], (3, 8), 1, None)
    with pytest.raises(ProtocolError):
        decode(encode(header)[:-3])
    short = StepHeader(3, 8, 1, None, 0, header.spans, header.block_ids[:8])
    with pytest.raises(ProtocolError, match="do not fit"):
        rows_of(short)


def connected(token: bytes = TOKEN) -> tuple[Link, Link | None]:
    door = Door("127.0.0.1", TOKEN)
    try:
        far = knock("127.0.0.1", door.port, token, 5.0)
        return far, door.accept(5.0)
    finally:
        door.close()


def test_messages_cross_in_order_and_an_end_is_noticed() -> None:
    far, near = connected()
    assert near is not None
    header = step_header([RowsLike(0, 0, 70_000, np.arange(70_000))], (70_000, 8), 1, None)
    sent = [header, Ready(), RankFailed(ErrorInfo("config_error", "no weights")), Stop()]
    sender = threading.Thread(target=lambda: [near.send(message) for message in sent])
    sender.start()
    assert [far.receive(5.0) for _ in sent] == sent
    sender.join()
    with pytest.raises(TimeoutError):
        far.receive(0.01)
    near.close()
    with pytest.raises(LinkClosed):
        far.receive(5.0)
    far.close()
    with pytest.raises(LinkClosed):
        far.send(Ready())


@pytest.mark.parametrize("token", [bytes(TOKEN_BYTES), TOKEN[:-1] + b"!", b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"])
def test_a_stranger_is_not_let_in(token: bytes) -> None:
    far, near = connected(token)
    assert near is None
    with pytest.raises(LinkClosed):
        far.receive(5.0)
    far.close()


def test_a_door_to_which_nobody_comes_is_not_waited_at() -> None:
    door = Door("127.0.0.1", TOKEN)
    assert door.accept(0.01) is None
    door.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", door.port), 5.0)


def test_the_budget_counts_one_ranks_pages() -> None:
    whole, share = (worker_bytes(SHAPE, WorkerConfig(num_ranks=n), 5000, "float32") for n in (1, 3))
    assert share.kv * 3 == whole.kv
    assert share.inbox == whole.inbox
    assert share.workspace < whole.workspace
