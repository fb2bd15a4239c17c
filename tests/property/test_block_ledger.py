"""Checks that a router knows how many KV blocks of a worker are taken, however late the worker's reports are."""

from __future__ import annotations

import heapq
from itertools import count
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from planning_samples import worker_member

from fabric.contracts import AttemptId, RequestId
from router.planning.block_ledger import BlockLedger
from router.planning.member_columns import WorkerColumns

TRANSIT_S = 0.02


class Stay(NamedTuple):
    """A `Stay` is an attempt at a worker, from its dispatch to its end. One of this router is on its way at first; of
    the other router's, this router hears when they arrive."""

    attempt_id: AttemptId
    num_blocks: int
    begin_s: float
    end_s: float
    is_own: bool

    @property
    def arrival_s(self) -> float:
        return self.begin_s + TRANSIT_S * self.is_own


class Event(NamedTuple):
    """An `Event` is a dispatch, an end, or the arrival of a report."""

    at_s: float
    order: int
    kind: str
    subject: Stay | float
    """Is an attempt, or the moment that a report describes."""


stays = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0.0, 5.0), st.sampled_from([0.0, 0.1, 1.0, 4.0]), st.booleans()),
    max_size=10,
)


@settings(deadline=None, max_examples=200)
@given(stays, st.lists(st.floats(0.0, 8.0), max_size=10), st.sampled_from([0.0, 0.05, 1.0, 3.0]))
def test_the_blocks_that_are_taken_are_known(
    drawn: list[tuple[int, float, float, bool]], reports_s: list[float], late_s: float
) -> None:
    workers = WorkerColumns()
    workers.add(worker_member("w0"), 0)
    ledger = BlockLedger(workers)
    attempts = [
        Stay(AttemptId(RequestId(f"q{number}"), 1), num_blocks, begin_s, begin_s + TRANSIT_S + stay_s, is_own)
        for number, (num_blocks, begin_s, stay_s, is_own) in enumerate(drawn)
    ]
    order = count()
    events = [Event(each.begin_s, next(order), "dispatch", each) for each in attempts]
    events += [Event(each.end_s, next(order), "end", each) for each in attempts]
    events += [Event(made_s + late_s, next(order), "report", made_s) for made_s in reports_s]
    heapq.heapify(events)

    acknowledged_s = -1.0
    while events:
        event = heapq.heappop(events)
        if isinstance(event.subject, Stay):
            stay = event.subject
            if event.kind == "dispatch":
                ledger.take(0, stay.attempt_id, stay.num_blocks, stay.begin_s, is_own=stay.is_own)
            else:
                ledger.end(0, stay.attempt_id, stay.end_s)
                ledger.end(0, stay.attempt_id, stay.end_s + 1.0)
        else:
            made_s = event.subject
            there = [each for each in attempts if each.arrival_s <= made_s]
            workers.kv_blocks_used[0] = sum(each.num_blocks for each in there if each.end_s > made_s)
            ledger.acknowledge(0, [each.attempt_id for each in there if each.arrival_s > acknowledged_s])
            ledger.report(0, made_s)
            acknowledged_s = max(acknowledged_s, made_s)
        ledger.check_invariants()
        if events and events[0].at_s == event.at_s:
            continue  # Some of what happens at this moment is still to come.
        taken = sum(each.num_blocks for each in attempts if each.begin_s <= event.at_s < each.end_s)
        assert workers.kv_blocks_used[0] + workers.pending_blocks[0] == taken, event
