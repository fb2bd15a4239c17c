"""Checks a queue of turns against a dict that is searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import MmHash, UnitKey
from llm_workers.features.feature_entries import Backwards, ReadTurn, TurnQueue
from llm_workers.scheduling import NextRead

READS = st.builds(NextRead, st.integers(0, 2), st.integers(0, 2))
RANKS = st.tuples(st.integers(-1, 1), st.floats(0, 3), st.sampled_from("ab"))
TURNS = st.builds(ReadTurn, st.booleans(), RANKS, READS)
UNITS = st.builds(UnitKey, st.sampled_from("xyz").map(MmHash), st.integers(0, 3))
CHANGES = st.lists(st.tuples(UNITS, st.none() | TURNS), max_size=200)


@given(CHANGES, st.booleans())
def test_what_comes_first_is_what_a_search_finds(
    changes: list[tuple[UnitKey, ReadTurn | None]], is_backwards: bool
) -> None:
    queue, turns = TurnQueue(), {}
    for unit, turn in changes:
        if turn is None:
            queue.discard(unit)
            turns.pop(unit, None)
        else:
            queue.put(unit, Backwards(turn) if is_backwards else turn)
            turns[unit] = turn
        first = queue.first()
        assert set(queue) == turns.keys()
        assert len(queue) == len(turns)
        assert (first is None) == (not turns)
        if first is not None and is_backwards:
            assert turns[first[1]] == first[0].turn == max(turns.values())
        elif first is not None:
            assert turns[first[1]] == first[0] == min(turns.values())


def test_forgotten_entries_do_not_pile_up() -> None:
    queue, unit = TurnQueue(), UnitKey(MmHash("x"), 0)
    for number in range(1000):
        queue.put(unit, ReadTurn(False, (0, float(number), ""), NextRead(0, 0)))
    assert len(queue._heap) < 50
    assert queue.first() == (ReadTurn(False, (0, 999.0, ""), NextRead(0, 0)), unit)
