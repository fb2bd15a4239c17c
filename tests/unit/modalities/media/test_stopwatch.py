"""Tests that the time which decoding takes is kept apart from the time which the use of its results takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from modalities.media import take_decode_s
from modalities.media.plugin import decoding, decoding_piecewise


class Clock:
    """A `Clock` goes on only when the test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    take_decode_s()
    return Clock(monkeypatch)


def test_calls_are_summed_and_taken_once(clock: Clock) -> None:
    @decoding
    def decode(seconds: float, *, fails: bool = False) -> str:
        clock.now_s += seconds
        if fails:
            raise ValueError("broken")
        return "pixels"

    assert decode(2.0) == "pixels"
    clock.now_s += 100.0
    with pytest.raises(ValueError, match="broken"):
        decode(0.5, fails=True)
    assert take_decode_s() == 2.5
    assert take_decode_s() == 0.0


def test_of_pieces_only_the_wait_for_each_counts(clock: Clock) -> None:
    @decoding_piecewise
    def frames(number: int) -> Iterator[int]:
        for at in range(number):
            clock.now_s += 1.0
            yield at
        clock.now_s += 0.25

    found = []
    for at in frames(3):
        found.append(at)
        clock.now_s += 50.0
    assert found == [0, 1, 2]
    assert take_decode_s() == 3.25


def test_each_thread_has_its_own(clock: Clock) -> None:
    @decoding
    def decode() -> None:
        clock.now_s += 1.0

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    assert take_decode_s() == 0.0
