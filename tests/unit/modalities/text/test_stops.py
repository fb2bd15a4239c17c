import pytest

from fabric.contracts import InvalidRequest
from modalities.text import StopStrings
from modalities.text.detokenizer import StopResult


def test_text_in_front_of_a_stop_is_given_and_nothing_of_the_stop() -> None:
    stops = StopStrings(["END"])
    assert stops.push("one E") == StopResult("one ", None)
    assert stops.push("N") == StopResult("", None)
    assert stops.push("D two") == StopResult("", "END")
    assert stops.flush() == ""


def test_what_only_began_like_a_stop_is_given_after_all() -> None:
    stops = StopStrings(["END"])
    assert stops.push("an EN").text == "an "
    assert stops.push("try").text == "ENtry"
    assert stops.push(" E").text == " "
    assert stops.flush() == "E"


def test_the_stop_that_is_complete_first_wins_however_the_text_is_cut() -> None:
    for chunks in (["xabcd"], list("xabcd"), ["xab", "cd"]):
        stops = StopStrings(["abcd", "bc"])
        results = [stops.push(chunk) for chunk in chunks]
        assert "".join(result.text for result in results) == "xa"
        assert results[-1].hit == "bc"


def test_of_two_that_end_together_the_longer_one_wins() -> None:
    assert StopStrings(["c", "abc"]).push("xabc") == StopResult("x", "abc")


def test_after_a_hit_nothing_comes_out_any_more() -> None:
    stops = StopStrings(["."])
    assert stops.push("a.b") == StopResult("a", ".")
    assert stops.push("c") == StopResult("", ".")


def test_without_stops_text_passes() -> None:
    stops = StopStrings([])
    assert stops.push("all of it") == StopResult("all of it", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"
