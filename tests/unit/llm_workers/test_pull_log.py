"""Tests the windows of pulls: they contain all bytes that shared a link, in the time that these bytes took."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import PullTime, PullWindow
from llm_workers.features.pull_log import MAX_PULLS, MAX_WINDOWS, PullLog


def spans(window: PullWindow) -> list[tuple[str, int, float, float]]:
    return [(pull.source, pull.num_bytes, pull.start_s, pull.end_s) for pull in window.pulls]


def test_a_pull_alone_is_a_window_and_pulls_that_overlap_share_one() -> None:
    log = PullLog()
    log.begin("a", "e0", 100, 10.0)
    assert log.windows() == ()
    log.end("a", 0.5)
    log.begin("b", "e0", 200, 20.0)
    log.begin("c", "e1", 300, 20.25)
    log.end("b", 0.5)
    assert len(log.windows()) == 1, "the second window still runs"
    log.end("c", 1.0)
    alone, shared = log.windows()
    assert spans(alone) == [("e0", 100, 0.0, 0.5)]
    assert spans(shared) == [("e0", 200, 0.0, 0.5), ("e1", 300, 0.25, 1.25)]
    log.forget_windows()
    assert log.windows() == ()


def test_a_window_with_a_failed_pull_is_not_reported_and_the_next_one_is() -> None:
    log = PullLog()
    log.begin("a", "e0", 100, 1.0)
    log.begin("b", "e0", 100, 1.0)
    log.fail("a")
    log.end("b", 1.0)
    log.fail("b")
    log.end("unknown", 1.0)
    assert log.windows() == ()
    log.begin("c", "e0", 100, 5.0)
    log.end("c", 1.0)
    assert log.windows() == (PullWindow((PullTime("e0", 100, 0.0, 1.0),)),)


def test_a_worker_that_never_stops_pulling_reports_windows_with_all_bytes() -> None:
    log = PullLog()
    log.begin(0, "e0", 1000, 0.0)
    for number in range(1, 4 * MAX_PULLS):
        log.begin(number, "e0", 1000, number - 0.5)
        log.end(number - 1, 1.0 if number == 1 else 1.5)
    windows = log.windows()
    assert len(windows) >= 3
    for window in windows:
        assert MAX_PULLS - 1 <= len(window.pulls) <= MAX_PULLS + 2
        length_s = max(pull.end_s for pull in window.pulls)
        assert sum(pull.num_bytes for pull in window.pulls) == pytest.approx(1000 * length_s, rel=0.05)


def test_a_pull_that_hangs_makes_its_window_worthless_and_not_endless() -> None:
    log = PullLog()
    log.begin("hangs", "e0", 1, 0.0)
    for number in range(10 * MAX_PULLS):
        log.begin(number, "e0", 1000, 1.0 + number)
        log.end(number, 0.5)
    assert log.windows() == ()
    assert len(log._ended) <= 2 * MAX_PULLS
    log.end("hangs", 1e3)
    log.begin("next", "e0", 7, 2e3)
    log.end("next", 1.0)
    assert [spans(window) for window in log.windows()] == [[("e0", 7, 0.0, 1.0)]]


def test_only_the_newest_windows_wait_for_a_report() -> None:
    log = PullLog()
    for number in range(3 * MAX_WINDOWS):
        log.begin(number, "e0", number, float(number))
        log.end(number, 0.5)
    assert [window.pulls[0].num_bytes for window in log.windows()] == list(range(2 * MAX_WINDOWS, 3 * MAX_WINDOWS))


pulls = st.lists(
    st.tuples(st.integers(0, 10**9), st.floats(0.0, 20.0), st.floats(1e-3, 3.0), st.booleans()),
    min_size=1,
    max_size=150,
)


@settings(deadline=None, max_examples=100)
@given(pulls)
def test_no_byte_is_counted_twice_and_none_is_missing_where_nothing_failed(
    drawn: list[tuple[int, float, float, bool]],
) -> None:
    log = PullLog()
    found: list[PullWindow] = []
    events = [(start_s, 0, number) for number, (_, start_s, _, _) in enumerate(drawn)]
    events += [(start_s + seconds, 1, number) for number, (_, start_s, seconds, _) in enumerate(drawn)]
    for at_s, is_end, number in sorted(events):
        num_bytes, _, seconds, fails = drawn[number]
        if not is_end:
            log.begin(number, "e0", num_bytes, at_s)
        elif fails:
            log.fail(number)
        else:
            log.end(number, seconds)
        found += log.windows()
        log.forget_windows()
    for window in found:
        assert all(0.0 <= pull.start_s <= pull.end_s for pull in window.pulls)
    total = sum(pull.num_bytes for window in found for pull in window.pulls)
    expected = sum(num_bytes for num_bytes, *_ in drawn)
    assert total <= expected + len(drawn)
    if not any(fails for *_, fails in drawn) and len(drawn) < 2 * MAX_PULLS:
        assert total == pytest.approx(expected, abs=2 * len(drawn))
