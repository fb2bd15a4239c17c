"""Tests that the times of an answer are taken from its events, however the bytes are cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loadtest.load import AnswerTimes, TimedAnswer


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
USAGE = event(choices=[], usage={"prompt_tokens": 12, "completion_tokens": 5})
DONE = b"data: [DONE]\n\n"


def test_the_first_text_counts_and_not_the_role() -> None:
    stream = TimedAnswer(10.0)
    for at_s, data in ((10.5, ROLE), (11.0, delta("Hel")), (11.5, delta("lo")), (12.0, USAGE), (13.0, DONE)):
        stream.feed(data, at_s)
    assert stream.end(13.0) == AnswerTimes(1.0, 3.0, 12, 5, "Hello", "")
    assert stream.end(13.0).tpot_s == 0.5


@given(st.lists(st.integers(1, 40), min_size=1), st.booleans())
def test_bytes_may_be_cut_anywhere(cuts: list[int], has_carriage_returns: bool) -> None:
    data = ROLE + delta("grün\n\ndata: ") + delta("!") + USAGE + DONE
    data = data.replace(b"\n", b"\r\n") if has_carriage_returns else data
    stream, place = TimedAnswer(0.0), 0
    while place < len(data):
        for length in cuts:
            stream.feed(data[place : place + length], 1.0)
            place += length
    assert stream.end(2.0) == AnswerTimes(1.0, 2.0, 12, 5, "grün\n\ndata: !", "")


def test_an_error_event_is_the_error_of_the_answer() -> None:
    stream = TimedAnswer(0.0)
    stream.feed(delta("Hel") + event(error={"code": "engine_failed", "message": "the engine failed"}), 1.0)
    assert stream.end(2.0).error == "engine_failed"


def test_a_stream_that_breaks_off_is_an_error() -> None:
    stream = TimedAnswer(0.0)
    stream.feed(delta("Hel"), 1.0)
    assert stream.end(2.0).error == "the stream ended before [DONE]"


def test_an_event_that_is_no_json_is_an_error() -> None:
    stream = TimedAnswer(0.0)
    stream.feed(b"data: <html>\n\n" + DONE, 1.0)
    assert stream.end(2.0).error == "an event is not JSON: b'<html>'"


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    stream = TimedAnswer(1.0)
    stream.feed(ROLE + DONE, 2.0)
    assert (stream.end(3.0).ttft_s, stream.end(3.0).num_output, stream.end(3.0).tpot_s) == (2.0, 0, 0.0)
