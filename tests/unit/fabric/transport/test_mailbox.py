"""Tests that a mailbox in its event loop delivers one turn at a time and that other callbacks run between turns."""

from __future__ import annotations

import asyncio

import pytest

from fabric.contracts import AbortAttempt, MemberId, PlaneMessage, RequestId, TokenFrames
from fabric.transport.message_plane import Mailbox

NUM_MESSAGES = 600
"""These are more messages than two turns deliver."""


def message(number: int) -> AbortAttempt:
    return AbortAttempt(RequestId(str(number)), 1)


def test_a_burst_takes_turns_with_other_callbacks() -> None:
    async def deliver() -> tuple[list[PlaneMessage], int]:
        received: list[PlaneMessage] = []
        mailbox = Mailbox(NUM_MESSAGES)
        mailbox.open(received.append)
        for number in range(NUM_MESSAGES):
            assert mailbox.put(message(number))
        await asyncio.sleep(0)
        num_after_a_turn = len(received)
        for _ in range(NUM_MESSAGES):
            await asyncio.sleep(0)
        return received, num_after_a_turn

    received, num_after_a_turn = asyncio.run(deliver())
    assert 0 < num_after_a_turn <= NUM_MESSAGES // 2
    assert received == [message(number) for number in range(NUM_MESSAGES)]


@pytest.mark.parametrize(
    ("bad", "request_id"),
    [(message(1), "1"), (TokenFrames(MemberId("worker-0"), ()), None)],
    ids=["of one request", "of several requests"],
)
async def test_a_message_that_its_handler_fails_on_is_logged_and_the_next_is_delivered(
    bad: PlaneMessage, request_id: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[PlaneMessage] = []

    def handle(one: PlaneMessage) -> None:
        if one is bad:
            raise IndexError("a bug")
        received.append(one)
        if len(received) == 2:
            has_both.set()

    has_both = asyncio.Event()
    mailbox = Mailbox(NUM_MESSAGES)
    mailbox.open(handle)
    for one in (message(0), bad, message(2)):
        mailbox.put(one)
    await asyncio.wait_for(has_both.wait(), 60)  # On a busy machine a turn may end after the log line.
    assert received == [message(0), message(2)]
    (record,) = caplog.records
    assert record.getMessage() == f"the handler failed on a message of type {type(bad).__name__}"
    assert record.request_id == request_id
    assert record.exc_info is not None
