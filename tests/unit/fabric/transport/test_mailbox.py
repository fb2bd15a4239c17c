"""Tests that a mailbox in its event loop delivers one turn at a time and that other callbacks run between turns."""

from __future__ import annotations

import asyncio

from fabric.contracts import AbortAttempt, PlaneMessage, RequestId
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
