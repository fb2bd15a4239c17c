"""Tests what is read of a process, from files like those of the kernel and from this process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from fabric.contracts import ManualClock, ProcessStats
from fabric.process_meter import MIN_AGE_S, ProcessMeter, read_process

STAT = "42 (a name) with) S 1 42 42 0 -1 4194560 9 0 0 0 {user} {system} 0 0 20 0 3 0 100 1000 200"


def write(proc: Path, user: int, system: int, num_pages: int, num_files: int) -> None:
    (proc / "fd").mkdir(exist_ok=True)
    for number in range(num_files):
        (proc / "fd" / str(number)).touch()
    (proc / "stat").write_text(STAT.format(user=user, system=system))
    (proc / "statm").write_text(f"1000 {num_pages} 3 4 5 6 7\n")


def test_the_kernels_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, 150, 50, 10, 7)
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert read_process(tmp_path) == ProcessStats(200 / ticks, 10 * page, 7, most)


def test_a_system_that_does_not_tell_it_gives_zeros(tmp_path: Path) -> None:
    assert read_process(tmp_path / "none") == ProcessStats()
    write(tmp_path, 1, 1, 1, 1)
    (tmp_path / "stat").write_text("42 (cut")
    assert read_process(tmp_path) == ProcessStats()


def test_a_reading_is_used_again_for_a_while(tmp_path: Path) -> None:
    clock = ManualClock(5.0)
    meter = ProcessMeter(clock, tmp_path)
    write(tmp_path, 100, 0, 10, 2)
    first = meter.read()
    write(tmp_path, 900, 0, 20, 4)
    clock.advance(MIN_AGE_S / 2)
    assert meter.read() == first
    clock.advance(MIN_AGE_S / 2)
    assert meter.read().num_open_files == 4


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_this_process_takes_something() -> None:
    stats = ProcessMeter(ManualClock()).read()
    assert stats.cpu_s > 0
    assert stats.resident_bytes > 2**20
    assert stats.num_open_files >= 3
    with Path(__file__).open():
        assert read_process(Path("/proc/self")).num_open_files == stats.num_open_files + 1
