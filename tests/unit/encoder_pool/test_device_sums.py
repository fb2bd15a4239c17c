"""Tests how an encoder sums what its device does, and measures how busy the device is."""

from __future__ import annotations

import pytest

from encoder_pool.device_queue import BusyTime
from fabric.contracts import DeviceStats


class TestBusyTime:
    def test_a_fraction_of_each_window(self) -> None:
        busy = BusyTime(window_s=1.0)
        busy.roll(10.0)
        busy.started(10.5)
        busy.roll(10.9)
        assert busy.fraction == 0.0
        busy.roll(11.0)
        assert busy.fraction == pytest.approx(0.5)
        busy.ended(11.25)
        busy.roll(12.0)
        assert busy.fraction == pytest.approx(0.25)


class TestDeviceStats:
    def test_forwards_are_summed(self) -> None:
        stats = DeviceStats()
        stats.batch_ended(num_units=3, cost=100, seconds=0.5)
        stats.batch_ended(num_units=1, cost=20, seconds=0.25)
        assert (stats.num_batches, stats.num_units, stats.encoded_cost, stats.forward_s) == (2, 4, 120, 0.75)
