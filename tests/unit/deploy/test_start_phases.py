"""Tests what `weft serve` says while a cluster starts, and how it is shown on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable

import pytest

from deploy.commands.start_progress import BAR_WIDTH, StartProgress
from deploy.start_phases import (
    LOADING,
    MEASURING,
    TELL_S,
    LoadedBytes,
    LoadingTeller,
    StartBoard,
    StartState,
    ToldPhase,
    start_state,
    with_silent,
)
from modalities.loading_progress import counted, watched_loading

WANTED = {"worker": 2, "encoder": 1, "router": 1}


def ready(*kinds: str) -> list[ToldPhase]:
    return [ToldPhase(kind, f"{kind}-{at}", "") for at, kind in enumerate(kinds)]


def text_of(wanted: dict[str, int], ready: list[ToldPhase], told: Iterable[ToldPhase]) -> str:
    return start_state(wanted, ready, told).text


def test_the_text_counts_what_is_not_there_by_what_it_does() -> None:
    board = StartBoard()
    assert text_of(WANTED, [], board.told()) == (
        "waiting for 2 of 2 workers (2 starting), the encoder (starting), the router (starting)"
    )
    board.tell("worker", "worker-0", LOADING)
    board.tell("encoder", "encoder-2", LOADING)
    board.tell("encoder", "encoder-2", MEASURING)
    assert text_of(WANTED, [], board.told()) == (
        "waiting for 2 of 2 workers (1 loading weights, 1 starting), the encoder (measuring costs), "
        "the router (starting)"
    )
    there = ready("worker", "worker", "encoder")
    assert text_of(WANTED, there, board.told()) == "waiting for the router (starting)"
    assert text_of(WANTED, ready("worker", "worker", "encoder", "router"), board.told()) == ""


def test_a_member_that_failed_and_was_replaced_counts_once() -> None:
    board = StartBoard()
    for name in ("worker-7", "worker-8", "worker-9"):
        board.tell("worker", name, LOADING)
    board.tell("worker", "worker-9", MEASURING)
    text = text_of({"worker": 2}, [], board.told())
    assert text == "waiting for 2 of 2 workers (1 loading weights, 1 measuring costs)"
    assert text_of({"worker": 1, "encoder": 0}, [], board.told()) == "waiting for the worker (measuring costs)"


def test_a_member_that_was_ready_and_is_silent_does_not_start_again() -> None:
    board = StartBoard()
    board.tell("worker", "worker-0", MEASURING)
    board.tell("encoder", "encoder-0", LOADING)
    told = with_silent(board.told(), {"worker-0"})
    text = text_of({"worker": 1, "encoder": 1}, [], told)
    assert text == "waiting for the worker (not answering), the encoder (loading weights)"


def test_what_members_have_loaded_is_summed_while_they_load() -> None:
    board = StartBoard()
    board.tell("worker", "worker-0", LOADING, LoadedBytes(3_000_000_000, 8_000_000_000))
    board.tell("worker", "worker-1", LOADING, LoadedBytes(1_000_000_000, 8_000_000_000))
    board.tell("encoder", "encoder-0", MEASURING, LoadedBytes(7, 7))
    state = start_state(WANTED, [], board.told())
    assert state.loaded == LoadedBytes(4_000_000_000, 16_000_000_000)
    assert str(state.loaded) == "25% of 16.0 GB"
    there = [ToldPhase("worker", "worker-0", "")]
    assert start_state(WANTED, there, board.told()).loaded == LoadedBytes(1_000_000_000, 8_000_000_000)
    board.tell("worker", "worker-1", MEASURING)
    assert start_state(WANTED, there, board.told()).loaded == LoadedBytes()
    assert start_state({"worker": 1}, there, board.told()) == StartState()


def test_a_member_tells_now_and_then_and_at_the_end_of_each_part() -> None:
    told: list[LoadedBytes] = []
    now = [0.0]
    tell = LoadingTeller(told.append, lambda: now[0])
    for loaded in (1, 2, 3):
        tell(loaded, 10)
    now[0] += TELL_S
    tell(4, 10)
    tell(5, 10)
    tell(10, 10)
    assert told == [(1, 10), (4, 10), (10, 10)]
    now[0] += TELL_S
    tell(2, 30)
    tell(30, 30)
    assert told[3:] == [(12, 40), (40, 40)], "the second part comes on top of the first"


class FakeSlice:
    """Stands for a weight in a file, of which values are read by index."""

    def __init__(self, shape: list[int], dtype: str) -> None:
        self.shape, self.dtype, self.asked = shape, dtype, list[object]()

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: object) -> object:
        self.asked.append(index)
        return index


def test_a_weight_counts_once_when_it_is_first_read() -> None:
    heard: list[tuple[int, int]] = []
    weights = {"a": FakeSlice([4, 8], "BF16"), "b": FakeSlice([16], "F32"), "c": object()}
    assert counted(weights) == weights, "nobody listens"
    with watched_loading(lambda loaded, total: heard.append((loaded, total))):
        found = counted(weights)
    assert found["c"] is weights["c"], "it is in memory already"
    assert (found["a"].get_shape(), found["a"].get_dtype()) == ([4, 8], "BF16")
    assert found["a"][0:2] == slice(0, 2)
    assert found["a"][2:4] == slice(2, 4), "a rank may read a weight in pieces"
    assert found["b"][...] is ...
    assert heard == [(64, 128), (128, 128)]
    assert counted(weights) == weights, "the listener is forgotten"


class LiveTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    now, stream = [10.0], LiveTerminal()
    progress = StartProgress(stream, lambda: now[0])
    progress.show(StartState("waiting for the worker (starting)"))
    now[0] = 13.0
    progress.show(StartState("waiting for the worker (starting)"))
    progress.show(StartState())
    progress.close()
    clear = "\r\x1b[K"
    assert stream.getvalue() == "".join(
        [
            f"{clear}weft: waiting for the worker (starting), 0 s",
            f"{clear}weft: waiting for the worker (starting), 3 s",
            clear,
        ]
    )


def test_a_terminal_shows_a_bar_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = LiveTerminal()
    progress = StartProgress(stream, lambda: 0.0)
    full, empty = "\u2501", "\u2578"
    shown = []
    for share in (0, 45, 100):
        progress.show(StartState("waiting for the worker (loading weights)", LoadedBytes(share * 10**7, 10**9)))
        line = stream.getvalue().rpartition("\r")[2]
        assert f"{share}% of 1.0 GB" in line
        shown.append(re.sub(r"\x1b\[[0-9;]*m", "", line))
    coloured = [line.count("\x1b[") for line in stream.getvalue().split("\r")[1:]]
    assert all(coloured), "what is loaded and what is not differ by their colour"
    assert all(line.count(full) + line.count(empty) >= BAR_WIDTH - 1 for line in shown)


def test_elsewhere_each_further_tenth_is_a_line() -> None:
    stream = io.StringIO()
    progress = StartProgress(stream, lambda: 0.0)
    for share in (0, 4, 9, 11, 19, 35, 36, 100):
        progress.show(StartState("waiting for the worker (loading weights)", LoadedBytes(share, 100)))
    progress.show(StartState("waiting for the worker (measuring costs)"))
    told = [line.partition("), ")[2].split(" ")[0] for line in stream.getvalue().splitlines()]
    assert told == ["0%", "11%", "35%", "100%", ""]


@pytest.mark.parametrize("term", [None, "dumb"])
def test_elsewhere_each_change_is_a_line(term: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: io.StringIO = io.StringIO() if term is None else LiveTerminal()
    monkeypatch.setenv("TERM", term or "xterm")
    progress = StartProgress(stream, lambda: 0.0)
    for text in ("waiting for a", "waiting for a", "waiting for b", "", "waiting for b"):
        progress.show(StartState(text))
    progress.close()
    assert stream.getvalue() == "weft: waiting for a\nweft: waiting for b\n"
