"""Checks stop strings against a reference that reads the whole text letter by letter."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.text import StopStrings

# Two letters make overlaps and near misses the usual case.
TEXT = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def chunked(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=500, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=8))
def test_same_as_reading_letter_by_letter(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = StopStrings(stops)
    given_out, hit = "", None
    for chunk in chunked(text, cuts):
        result = stream.push(chunk)
        given_out, hit = given_out + result.text, result.hit
        assert reference(text, stops)[0].startswith(given_out), "nothing of a stop string is ever shown"
        if hit is not None:
            break
    assert (given_out + stream.flush(), hit) == reference(text, stops)


@settings(max_examples=300, deadline=None)
@given(TEXT, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    result = stream.push(text)
    if result.hit is None:
        held = text[len(result.text) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
