"""A connection may be slow up to limits, which depend on what it is doing."""

from __future__ import annotations

from deploy.http_limits import ConnectionPace, HttpLimits, Lateness, ReadPhase

LIMITS = HttpLimits(header_timeout_s=10, body_timeout_s=20, min_body_bytes_per_s=100, write_timeout_s=60, linger_s=2)


def late(pace: ConnectionPace, now: float, is_paused: bool = False, num_unsent: int = 0) -> Lateness | None:
    return pace.lateness(LIMITS, now, is_paused, num_unsent)


def test_headers_have_a_time_that_bytes_do_not_extend() -> None:
    pace = ConnectionPace(0.0)
    assert late(pace, 10.0) is None
    assert late(pace, 10.1) is Lateness.SILENT
    pace.took(5)
    assert late(pace, 10.1) is Lateness.HEAD


def test_a_body_has_a_time_that_its_bytes_extend() -> None:
    pace = ConnectionPace(0.0)
    pace.enter(ReadPhase.BODY, 100.0)
    assert late(pace, 120.0) is None
    assert late(pace, 120.1) is Lateness.BODY
    pace.took(1000)
    assert late(pace, 130.0) is None
    assert late(pace, 130.1) is Lateness.BODY


def test_a_client_is_not_to_blame_while_the_server_does_not_read() -> None:
    pace = ConnectionPace(0.0)
    pace.enter(ReadPhase.BODY, 0.0)
    assert late(pace, 500.0, is_paused=True) is None
    assert late(pace, 519.0) is None
    assert late(pace, 521.0) is Lateness.BODY


def test_neither_an_answer_nor_a_pause_between_requests_is_late() -> None:
    pace = ConnectionPace(0.0)
    for phase in (ReadPhase.ANSWER, ReadPhase.IDLE):
        pace.enter(phase, 0.0)
        assert late(pace, 1e6) is None


def test_a_client_that_takes_nothing_of_what_waits_is_late() -> None:
    pace = ConnectionPace(0.0)
    pace.enter(ReadPhase.ANSWER, 0.0)
    assert late(pace, 100.0, num_unsent=5000) is None
    assert late(pace, 160.0, num_unsent=5000) is None
    assert late(pace, 161.0, num_unsent=4000) is None, "it took some"
    assert late(pace, 221.0, num_unsent=4000) is None
    assert late(pace, 221.1, num_unsent=4000) is Lateness.READING
    assert late(pace, 222.0, num_unsent=0) is None


def test_what_is_left_of_a_complete_answer_must_be_taken_at_a_least_rate() -> None:
    """A client that takes a byte now and then holds the answer as long as it likes otherwise."""

    def late_in(taken_each: int) -> float | None:
        pace = ConnectionPace(0.0)
        pace.enter(ReadPhase.IDLE, 0.0)
        for second in range(200):
            num_unsent = max(0, 20_000 - taken_each * second)
            if pace.lateness(LIMITS, float(second), False, num_unsent, is_whole=True) is Lateness.READING:
                return second
        return None

    assert late_in(99) == 61
    assert late_in(101) is None
    pace = ConnectionPace(0.0)
    for second in range(0, 200, 50):
        pace.enter(ReadPhase.HEAD, second)
        assert late(pace, second, num_unsent=20_000 - second) is None, "each answer has its own time"


def test_a_refused_client_has_a_moment_to_read_why() -> None:
    pace = ConnectionPace(0.0)
    pace.enter(ReadPhase.REFUSED, 50.0)
    assert late(pace, 52.0) is None
    assert late(pace, 52.1) is Lateness.REFUSED
