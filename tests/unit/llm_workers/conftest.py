"""Starts engines for tests, and stops them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from watched_engine import Watched


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    watched.engine.start()
    yield watched
    watched.engine.stop()
