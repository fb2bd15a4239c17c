"""What engines have in common: commands of other threads between turns, the end of the thread, and open snapshots."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fabric.contracts import EngineFailed, WorkerLost
from llm_workers.engine_interface import Update
from llm_workers.engine_thread import SNAPSHOT_PAGE_BLOCKS, EngineThread, OpenSnapshots
from llm_workers.scheduling import ChainPage

TIMEOUT_S = 10.0


def test_commands_run_in_order_and_end_with_the_stop() -> None:
    thread, seen = EngineThread(lambda: None), []
    update = Update()
    assert thread.run_commands(update, is_idle=False), "no command is there, and there is something to compute"
    for name in ("a", "b"):
        thread.command(lambda given, name=name: seen.append((name, given is update)))
    assert thread.run_commands(update, is_idle=True)
    thread.command(lambda given: seen.append(("c", given is update)))
    thread.stop()
    thread.command(lambda given: seen.append(("d", given is update)))
    assert not thread.run_commands(update, is_idle=True)
    assert seen == [("a", True), ("b", True), ("c", True)]


def test_an_idle_engine_waits_for_a_command_and_ends_in_order() -> None:
    has_run = threading.Event()

    def run() -> None:
        while thread.run_commands(Update(), is_idle=True):
            pass

    thread = EngineThread(run)
    thread.check_health()  # It has not begun, so nothing has ended.
    thread.start()
    thread.command(lambda update: has_run.set())
    assert has_run.wait(TIMEOUT_S)
    thread.check_health()
    thread.stop()
    thread.stop()
    with pytest.raises(EngineFailed, match="the engine has stopped"):
        thread.check_health()


def test_the_error_of_a_command_is_what_the_engine_has_died_of() -> None:
    last = []

    def run() -> None:
        try:
            thread.run_commands(Update(), is_idle=True)
        except WorkerLost as error:
            last.append(thread.died(error))

    def fail(update: Update) -> None:
        raise WorkerLost("the device is gone")

    thread = EngineThread(run)
    thread.command(fail)
    thread.start()
    thread.stop()
    assert [str(update.death) for update in last] == ["the device is gone"]
    with pytest.raises(WorkerLost, match="the device is gone"):
        thread.check_health()


def test_routers_take_turns_and_a_second_request_replaces_the_first() -> None:
    def pages_of(last_seq: int, count: int) -> Iterator[ChainPage]:
        return (ChainPage(last_seq, [], page, page == count - 1) for page in range(count))

    asked, snapshots = [], OpenSnapshots()
    for address, last_seq, count in (("a", 1, 5), ("b", 2, 2), ("a", 3, 2)):
        snapshots.begin(address, lambda size, seq=last_seq, num=count: asked.append(size) or pages_of(seq, num))
    assert asked == [SNAPSHOT_PAGE_BLOCKS] * 3
    assert len(snapshots) == 2
    pages = [snapshots.next_page() for _ in range(4)]
    assert [(page.address, page.last_seq, page.page, page.is_last) for page in pages] == [
        ("a", 3, 0, False),
        ("b", 2, 0, False),
        ("a", 3, 1, True),
        ("b", 2, 1, True),
    ]
    assert not snapshots
