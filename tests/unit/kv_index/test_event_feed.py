"""Tests the order of events: which are applied, kept or dropped."""

import pytest

from kv_index import ApplyResult
from kv_index.holder_index import EventFeed


def in_step(epoch: int = 1, last_seq: int = -1, max_buffered: int = 100) -> EventFeed[str]:
    feed: EventFeed[str] = EventFeed(max_buffered)
    assert feed.turn_page(epoch, last_seq, 0, True) is ApplyResult.OK
    assert list(feed.resume()) == []
    return feed


def test_events_come_out_once_and_in_order() -> None:
    feed = in_step()
    assert feed.offer(1, 0, ["a", "b"]) == (ApplyResult.OK, ["a", "b"])
    assert feed.offer(1, 0, ["a", "b"]) == (ApplyResult.OK, [])
    assert feed.offer(1, 1, ["b", "c", "d"]) == (ApplyResult.OK, ["c", "d"])


def test_an_unknown_source_is_a_gap_and_its_events_wait_for_the_snapshot() -> None:
    feed: EventFeed[str] = EventFeed(100)
    assert feed.offer(1, 5, ["f", "g"]) == (ApplyResult.GAP, [])
    assert feed.offer(1, 7, ["h"]) == (ApplyResult.GAP, [])
    assert feed.turn_page(1, 5, 0, True) is ApplyResult.OK
    assert list(feed.resume()) == ["g", "h"]
    assert feed.is_in_step
    assert feed.num_buffered == 0


def test_after_a_gap_even_fitting_events_wait() -> None:
    feed = in_step()
    assert feed.offer(1, 3, ["d"])[0] is ApplyResult.GAP
    assert feed.offer(1, 0, ["a"]) == (ApplyResult.GAP, [])
    assert feed.turn_page(1, 2, 0, True) is ApplyResult.OK
    assert list(feed.resume()) == ["d"]


def test_a_hole_among_the_kept_events_is_a_gap_again() -> None:
    feed = in_step()
    feed.offer(1, 3, ["d"])
    feed.offer(1, 6, ["g"])
    assert feed.turn_page(1, 2, 0, True) is ApplyResult.OK
    assert list(feed.resume()) == ["d"]
    assert not feed.is_in_step
    assert feed.num_buffered == 1
    assert feed.turn_page(1, 5, 0, True) is ApplyResult.OK
    assert list(feed.resume()) == ["g"]
    assert feed.is_in_step


def test_older_epochs_are_stale_and_a_newer_one_drops_what_was_kept() -> None:
    feed = in_step(epoch=2)
    assert feed.offer(1, 0, ["old"]) == (ApplyResult.STALE, [])
    assert feed.turn_page(1, 9, 0, True) is ApplyResult.STALE
    feed.offer(2, 5, ["kept"])
    assert feed.offer(3, 0, ["new"]) == (ApplyResult.GAP, [])
    assert feed.turn_page(3, -1, 0, True) is ApplyResult.OK
    assert list(feed.resume()) == ["new"]


def test_a_snapshot_older_than_what_was_applied_is_stale() -> None:
    feed = in_step()
    feed.offer(1, 0, ["a", "b", "c"])
    assert feed.turn_page(1, 1, 0, True) is ApplyResult.STALE
    assert feed.turn_page(1, 2, 0, True) is ApplyResult.OK
    assert feed.offer(1, 3, ["d"]) == (ApplyResult.OK, ["d"])


def test_the_buffer_is_bounded_and_loses_the_oldest() -> None:
    feed = in_step(max_buffered=3)
    for seq in range(5, 10):
        feed.offer(1, seq, [str(seq)])
    assert feed.num_buffered == 3
    assert feed.turn_page(1, 6, 0, True) is ApplyResult.OK
    assert list(feed.resume()) == ["7", "8", "9"]


def test_a_source_that_was_never_heard_is_older_than_any_epoch() -> None:
    feed: EventFeed[str] = EventFeed(100)
    assert feed.is_newer(0)
    assert not feed.is_in_step
    assert feed.offer(0, 0, ["a"]) == (ApplyResult.GAP, [])
    assert not feed.is_newer(0)
    assert feed.is_newer(1)
    assert feed.turn_page(0, -1, 0, True) is ApplyResult.OK
    assert list(feed.resume()) == ["a"]


def test_a_snapshot_in_pages_keeps_the_events_until_its_last_page() -> None:
    feed: EventFeed[str] = EventFeed(100)
    assert feed.turn_page(1, 7, 0, False) is ApplyResult.PARTIAL
    assert feed.offer(1, 8, ["i"]) == (ApplyResult.PARTIAL, [])
    assert feed.turn_page(1, 7, 1, False) is ApplyResult.PARTIAL
    assert not feed.is_in_step
    assert feed.offer(1, 9, ["j"]) == (ApplyResult.PARTIAL, [])
    assert feed.turn_page(1, 7, 2, True) is ApplyResult.OK
    assert list(feed.resume()) == ["i", "j"]
    assert feed.is_in_step
    assert feed.turn_page(1, 7, 3, True) is ApplyResult.STALE, "no page is awaited"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_page_is_a_gap_until_another_snapshot_begins(lost: int) -> None:
    feed: EventFeed[str] = EventFeed(100)
    results = [feed.turn_page(1, 7, page, page == 3) for page in range(4) if page != lost]
    assert results == [ApplyResult.PARTIAL] * lost + [ApplyResult.GAP] * (3 - lost)
    assert feed.offer(1, 8, ["i"]) == (ApplyResult.GAP, [])
    assert [feed.turn_page(1, 7, page, page == 3) for page in range(4)] == [ApplyResult.PARTIAL] * 3 + [ApplyResult.OK]
    assert list(feed.resume()) == ["i"]


def test_pages_of_another_snapshot_or_epoch_do_not_mix() -> None:
    feed: EventFeed[str] = EventFeed(100)
    assert feed.turn_page(1, 7, 0, False) is ApplyResult.PARTIAL
    assert feed.turn_page(1, 9, 1, True) is ApplyResult.GAP
    assert feed.turn_page(1, 9, 0, False) is ApplyResult.PARTIAL
    assert feed.turn_page(2, 9, 1, True) is ApplyResult.GAP
    assert feed.turn_page(1, 9, 1, True) is ApplyResult.STALE
    assert feed.turn_page(2, 0, 0, True) is ApplyResult.OK
