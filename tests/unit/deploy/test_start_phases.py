"""Tests what `weft serve` says while a cluster starts, and how it is shown on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from deploy.commands.start_progress import StartProgress
from deploy.start_phases import LOADING, MEASURING, StartBoard, ToldPhase, start_text, with_silent

WANTED = {"worker": 2, "encoder": 1, "router": 1}


def ready(*kinds: str) -> list[ToldPhase]:
    return [ToldPhase(kind, f"{kind}-{at}", "") for at, kind in enumerate(kinds)]


def test_the_text_counts_what_is_not_there_by_what_it_does() -> None:
    board = StartBoard()
    assert start_text(WANTED, [], board.told()) == (
        "waiting for 2 of 2 workers (2 starting), the encoder (starting), the router (starting)"
    )
    board.tell("worker", "worker-0", LOADING)
    board.tell("encoder", "encoder-2", LOADING)
    board.tell("encoder", "encoder-2", MEASURING)
    assert start_text(WANTED, [], board.told()) == (
        "waiting for 2 of 2 workers (1 loading weights, 1 starting), the encoder (measuring costs), "
        "the router (starting)"
    )
    there = ready("worker", "worker", "encoder")
    assert start_text(WANTED, there, board.told()) == "waiting for the router (starting)"
    assert start_text(WANTED, ready("worker", "worker", "encoder", "router"), board.told()) == ""


def test_a_member_that_failed_and_was_replaced_counts_once() -> None:
    board = StartBoard()
    for name in ("worker-7", "worker-8", "worker-9"):
        board.tell("worker", name, LOADING)
    board.tell("worker", "worker-9", MEASURING)
    text = start_text({"worker": 2}, [], board.told())
    assert text == "waiting for 2 of 2 workers (1 loading weights, 1 measuring costs)"
    assert start_text({"worker": 1, "encoder": 0}, [], board.told()) == "waiting for the worker (measuring costs)"


def test_a_member_that_was_ready_and_is_silent_does_not_start_again() -> None:
    board = StartBoard()
    board.tell("worker", "worker-0", MEASURING)
    board.tell("encoder", "encoder-0", LOADING)
    told = with_silent(board.told(), {"worker-0"})
    text = start_text({"worker": 1, "encoder": 1}, [], told)
    assert text == "waiting for the worker (not answering), the encoder (loading weights)"


class LiveTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    now, stream = [10.0], LiveTerminal()
    progress = StartProgress(stream, lambda: now[0])
    progress.show("waiting for the worker (starting)")
    now[0] = 13.0
    progress.show("waiting for the worker (starting)")
    progress.show("")
    progress.close()
    clear = "\r\x1b[K"
    assert stream.getvalue() == "".join(
        [
            f"{clear}weft: waiting for the worker (starting), 0 s",
            f"{clear}weft: waiting for the worker (starting), 3 s",
            clear,
        ]
    )


@pytest.mark.parametrize("term", [None, "dumb"])
def test_elsewhere_each_change_is_a_line(term: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: io.StringIO = io.StringIO() if term is None else LiveTerminal()
    monkeypatch.setenv("TERM", term or "xterm")
    progress = StartProgress(stream, lambda: 0.0)
    for text in ("waiting for a", "waiting for a", "waiting for b", "", "waiting for b"):
        progress.show(text)
    progress.close()
    assert stream.getvalue() == "weft: waiting for a\nweft: waiting for b\n"
