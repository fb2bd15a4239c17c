"""Checks a ranked heap against a dict that is searched: with plain keys, and with the turns of a worker's reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import MmHash, UnitKey
from fabric.ranked_heap import RankedHeap
from llm_workers.features.feature_entries import Backwards, ReadTurn
from llm_workers.scheduling import NextRead

READS = st.builds(NextRead, st.integers(0, 2), st.integers(0, 2))
RANKS = st.tuples(st.integers(-1, 1), st.floats(0, 3), st.sampled_from("ab"))
TURNS = st.builds(ReadTurn, st.booleans(), RANKS, READS)
UNITS = st.builds(UnitKey, st.sampled_from("xyz").map(MmHash), st.integers(0, 3))
CHANGES = st.lists(st.tuples(UNITS, st.none() | TURNS), max_size=200)


@given(st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 9)), max_size=120))
def test_a_ranked_heap_is_a_sorted_dict(changes: list[tuple[int, int | None]]) -> None:
    """Items of equal key stand in the order in which they got that key."""
    heap, keys, places = RankedHeap(), {}, {}
    for place, (item, key) in enumerate(changes):
        if key is None:
            heap.discard(item)
            keys.pop(item, None)
        else:
            if keys.get(item) != key:
                places[item] = place
            heap.put(item, key)
            keys[item] = key
        first = heap.peek()
        assert (len(heap), set(heap)) == (len(keys), set(keys))
        assert first is None if not keys else first[0] == keys[first[1]] == min(keys.values())
        assert len(heap._entries) <= 2 * len(keys) + 17
    expected = sorted((key, places[item], item) for item, key in keys.items())
    assert [heap.pop() for _ in range(len(heap))] == [(key, item) for key, _, item in expected]


@given(CHANGES, st.booleans())
def test_the_first_turn_is_what_a_search_finds(
    changes: list[tuple[UnitKey, ReadTurn | None]], is_backwards: bool
) -> None:
    queue, turns = RankedHeap(), {}
    for unit, turn in changes:
        if turn is None:
            queue.discard(unit)
            turns.pop(unit, None)
        else:
            queue.put(unit, Backwards(turn) if is_backwards else turn)
            turns[unit] = turn
        first = queue.peek()
        assert set(queue) == turns.keys()
        assert len(queue) == len(turns)
        assert (first is None) == (not turns)
        if first is not None and is_backwards:
            assert turns[first[1]] == first[0].turn == max(turns.values())
        elif first is not None:
            assert turns[first[1]] == first[0] == min(turns.values())


def test_forgotten_entries_do_not_pile_up() -> None:
    queue, unit = RankedHeap(), UnitKey(MmHash("x"), 0)
    for number in range(1000):
        queue.put(unit, ReadTurn(False, (0, float(number), ""), NextRead(0, 0)))
    assert len(queue._entries) < 50
    assert queue.peek() == (ReadTurn(False, (0, 999.0, ""), NextRead(0, 0)), unit)
