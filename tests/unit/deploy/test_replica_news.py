"""News of replicas that Serve stops: who hears of them, and when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.ray import replica_news


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    replica_news._SEEN.clear()
    replica_news._GONE.clear()
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
