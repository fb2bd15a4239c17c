"""News of replicas that Serve stops: who hears of them, and when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.ray import replica_news
from deploy.ray.replica_news import ReplicaHistory


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    replica_news._DEPLOYMENT_TO_HISTORY.clear()
    replica_news._LISTENERS.clear()


def test_a_replica_that_is_missing_has_gone_and_may_come_back() -> None:
    heard: list[frozenset[str]] = []
    replica_news.update("encoder", ["a", "b"])
    end = replica_news.subscribe(heard.append)
    replica_news.update("worker", ["w"])  # Nothing is missing, so there is no news.
    replica_news.update("encoder", ["b"])
    replica_news.update("encoder", ["b"])
    replica_news.update("worker", [])
    replica_news.update("encoder", ["a", "b"])
    assert heard == [frozenset(), frozenset("a"), frozenset("aw"), frozenset("w")]
    end()
    replica_news.update("encoder", [])
    assert len(heard) == 4


def test_a_listener_that_comes_late_hears_at_once_what_has_gone() -> None:
    replica_news.update("encoder", ["a", "b"])
    replica_news.update("encoder", ["b"])
    heard: list[frozenset[str]] = []
    replica_news.subscribe(heard.append)
    assert heard == [frozenset("a")]


@given(st.lists(st.sets(st.integers(0, 9)), max_size=30), st.integers(0, 12))
def test_the_replicas_that_went_last_are_remembered(turns: list[set[int]], max_gone: int) -> None:
    history, gone, running = ReplicaHistory(max_gone), list[str](), set[str]()
    for turn in turns:
        present = {str(number) for number in turn}
        before = set(gone)
        gone = [name for name in gone if name not in present] + sorted(running - present)
        gone = gone[max(0, len(gone) - max_gone) :]
        running = present
        assert history.update(present) == (set(gone) != before)
        assert history.gone == set(gone)
        assert {name for name in map(str, range(10)) if history.has_seen(name)} == set(gone) | running


def test_a_cluster_that_scales_for_years_remembers_no_more_than_the_limit() -> None:
    heard: list[frozenset[str]] = []
    replica_news.subscribe(heard.append)
    for number in range(replica_news.MAX_GONE + 100):
        replica_news.update("worker", [f"replica-{number:06d}"])
    assert len(heard[-1]) == replica_news.MAX_GONE
    assert "replica-000000" not in heard[-1]
    assert f"replica-{replica_news.MAX_GONE + 98:06d}" in heard[-1]
