"""A streamed answer waits for a slow client up to a limit, and sends comments while it pauses."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message
from stopped_timers import StoppedTimers, turns

from fabric.contracts import Aborted
from router.edge.paced_writer import COMMENT, PacedWriter


class Socket:
    """Keeps what was sent; while it is full, sends wait."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.can_write = asyncio.Event()
        self.can_write.set()

    async def send(self, message: Message) -> None:
        await self.can_write.wait()
        self.sent.append(message["body"])


@pytest.fixture
def timers() -> StoppedTimers:
    return StoppedTimers()


async def test_a_stream_that_pauses_sends_a_comment_every_ten_seconds_and_none_first(timers: StoppedTimers) -> None:
    socket = Socket()
    paced = PacedWriter(socket.send, 120.0, 10.0, timers)
    await timers.pass_s(60)
    assert socket.sent == [], "a comment is never the first event"
    await paced.write(b"one")
    await timers.pass_s(9.9)
    assert socket.sent == [b"one"]
    await timers.pass_s(0.2)
    assert socket.sent == [b"one", COMMENT]
    await timers.pass_s(20)
    assert socket.sent == [b"one", COMMENT, COMMENT, COMMENT]
    await paced.write(b"two")
    await timers.pass_s(9)
    await paced.write(b"three")
    await timers.pass_s(9)
    assert socket.sent[4:] == [b"two", b"three"]
    paced.close()
    await timers.pass_s(100)
    assert socket.sent[4:] == [b"two", b"three"]


async def test_a_write_that_waits_too_long_ends_the_stream(timers: StoppedTimers) -> None:
    socket = Socket()
    paced = PacedWriter(socket.send, 30.0, 10.0, timers)
    await paced.write(b"one")
    socket.can_write.clear()
    await timers.pass_s(5)
    writing = asyncio.create_task(paced.write(b"two"))
    await turns()
    await timers.pass_s(29.9)
    assert not writing.done()
    await timers.pass_s(0.2)
    with pytest.raises(Aborted, match="has read nothing for 30 s"):
        await writing
    assert not writing.cancelling()
    with pytest.raises(Aborted):
        await paced.write(b"three", is_last=True)
    paced.close()
    assert socket.sent == [b"one"]


async def test_slow_writes_that_go_on_are_no_stall(timers: StoppedTimers) -> None:
    socket = Socket()
    paced = PacedWriter(socket.send, 30.0, 10.0, timers)
    for number in range(10):
        socket.can_write.clear()
        writing = asyncio.create_task(paced.write(b"%d" % number))
        await turns()
        await timers.pass_s(29)
        socket.can_write.set()
        await writing
    assert socket.sent == [b"%d" % number for number in range(10)]
    paced.close()


async def test_a_comment_that_waits_for_a_full_socket_is_not_repeated(timers: StoppedTimers) -> None:
    socket = Socket()
    paced = PacedWriter(socket.send, 1000.0, 10.0, timers)
    await paced.write(b"one")
    socket.can_write.clear()
    await timers.pass_s(100)
    socket.can_write.set()
    await turns()
    assert socket.sent == [b"one", COMMENT]
    paced.close()


async def test_a_writer_that_is_cancelled_by_others_stays_cancelled(timers: StoppedTimers) -> None:
    socket = Socket()
    paced = PacedWriter(socket.send, 30.0, 10.0, timers)
    socket.can_write.clear()
    writing = asyncio.create_task(paced.write(b"one"))
    await turns()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    paced.close()
