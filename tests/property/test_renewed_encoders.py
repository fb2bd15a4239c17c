"""Checks that a router knows how much work is left at an encoder from dispatches and ends of encodings, whatever
reports come in between and however late they are."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import accumulate, count, islice, pairwise
from math import inf
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from planning_samples import encoder_member, encoder_report

from fabric.contracts import PROFILE_LENGTH, AttemptId, EncoderReport, MemberId, RequestId, add_work, key_of
from router.planning.member_columns import SAME_MOMENT_S, EncoderColumns, WorkerColumns
from router.planning.member_shares import EncoderShare
from router.planning.member_state import InFlight

ENCODER, PEER = MemberId("e0"), MemberId("r1")
PATIENCE = 4.0


class Call(NamedTuple):
    """A `Call` is one attempt's work at the encoder. It has many units."""

    at_s: float
    seconds: float
    is_own: bool


class Job:
    """A `Job` is a call at the encoder, and when it was worked on."""

    def __init__(self, number: int, call: Call) -> None:
        self.attempt_id = AttemptId(RequestId(f"q{number}"), 1)
        self.call = call
        self.spans: list[tuple[float, float]] = []

    @property
    def end_s(self) -> float:
        return self.spans[-1][1]

    def left_s(self, now: float) -> float:
        return self.call.seconds - sum(min(max(now - begin_s, 0.0), end_s - begin_s) for begin_s, end_s in self.spans)


def schedule(jobs: list[Job]) -> None:
    """Gives all jobs their spans on an encoder that works on the shortest call, also in the middle of a longer one."""
    changes = sorted({job.call.at_s for job in jobs})
    for now, until_s in pairwise([*changes, inf]):
        for job in sorted(jobs, key=lambda job: (job.call.seconds, job.attempt_id)):
            if job.call.at_s <= now < until_s and (left_s := job.left_s(inf)) > 1e-9:
                end_s = min(now + left_s, until_s)
                job.spans.append((now, end_s))
                now = end_s


class EncoderWorld:
    """An `EncoderWorld` is an encoder that takes as long for its calls as predicted, and a router."""

    def __init__(self, calls: list[Call], pauses_s: list[float], late_s: float) -> None:
        self.jobs = [Job(number, call) for number, call in enumerate(calls)]
        schedule(self.jobs)
        self.columns = EncoderColumns()
        self.columns.add(encoder_member("e0"), 0)
        self.in_flight = InFlight(WorkerColumns(), self.columns)
        order, self.events = count(), list[tuple[float, int, Job | float]]()
        made_s = 9.0031  # No report is made at the moment of a dispatch.
        for pause_s in [0.0, *pauses_s]:
            made_s += pause_s
            # The router knows costs and speed of an encoder from a report before it dispatches anything.
            heapq.heappush(self.events, (made_s + (late_s if self.events else 0.0), next(order), made_s))
        for job in self.jobs:
            heapq.heappush(self.events, (job.call.at_s, next(order), job))
            heapq.heappush(self.events, (job.end_s, next(order), job))
        self.acknowledged_s, self.begun = 0.0, set[AttemptId]()

    def play(self) -> Iterator[tuple[float, float, float]]:
        """Plays all events. After each of them, yields its moment, the work that is left at the encoder, and what the
        router knows of that, all in seconds."""
        while self.events:
            now, _, event = heapq.heappop(self.events)
            if isinstance(event, float):
                self.take_report(event, now)
            elif event.attempt_id in self.begun:
                self.in_flight.end_at(event.attempt_id, ENCODER, now)
            else:
                self.dispatch(event, now)
            self.in_flight.check_invariants()
            left_s = sum(job.left_s(now) for job in self.jobs if job.attempt_id in self.begun)
            yield now, left_s, self.columns.left_s(0, now)

    def dispatch(self, job: Job, now: float) -> None:
        self.begun.add(job.attempt_id)
        state_at_s = float(self.columns.state_at_s[0])
        seconds = job.call.seconds
        share = EncoderShare(
            seconds, key_of(seconds, PATIENCE, now - state_at_s, 0), 0.0, {}, state_at_s, num_units=100
        )
        self.in_flight.add_encoder(job.attempt_id, ENCODER, share, now, None if job.call.is_own else PEER)

    def take_report(self, made_s: float, now: float) -> None:
        report = self.report(made_s)
        self.columns.take(0, report, now, made_s)
        self.in_flight.acknowledge(ENCODER, report.acknowledged)
        self.in_flight.note_encoder_report(ENCODER, made_s)

    def report(self, made_s: float) -> EncoderReport:
        """Returns the report of a moment, which acknowledges what no report before it has."""
        profile = [0.0] * PROFILE_LENGTH
        known = [job for job in self.jobs if job.call.at_s <= made_s]
        for job in known:
            add_work(profile, job.left_s(made_s), key_of(job.call.seconds, PATIENCE, job.call.at_s - made_s, 0))
        new = tuple(job.attempt_id for job in known if job.call.is_own and job.call.at_s > self.acknowledged_s)
        self.acknowledged_s = made_s
        return encoder_report(
            "e0",
            1,
            acknowledged=new,
            queue_profile=tuple(profile),
            unit_s=0.1,
            patience=PATIENCE,
            num_decode_processes=1,
        )


calls = st.lists(
    st.tuples(st.sampled_from([0.0, 0.02, 0.2, 1.5]), st.sampled_from([0.03, 0.16, 1.1]), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=200)
@given(calls, st.lists(st.sampled_from([0.02, 0.2, 0.5, 1.0]), max_size=15), st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_the_work_left_at_an_encoder_is_known(
    calls: list[tuple[float, float, bool]], pauses_s: list[float], late_s: float
) -> None:
    arrivals = accumulate((pause_s for pause_s, _, _ in calls), initial=10.0)
    timed = [Call(at_s, *call[1:]) for at_s, call in zip(islice(arrivals, 1, None), calls, strict=True)]
    world = EncoderWorld(timed, pauses_s, late_s)
    for now, left_s, known_s in world.play():
        assert abs(known_s - left_s) <= SAME_MOMENT_S + 1e-6, (now, known_s, left_s)
    encoders = world.columns
    assert encoders.num_open[0] == encoders.num_pending[0] == encoders.pending_units[0] == 0.0
