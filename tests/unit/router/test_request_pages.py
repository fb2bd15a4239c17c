"""Tests the pages on which people read the records of requests: they show every field, and escape every word."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.edge.request_pages import PAGE_HEADERS, milliseconds, request_page, requests_page, table

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&"
VOID = {"meta", "input", "img", "br", "link"}


class Outline(HTMLParser):
    """An `Outline` collects the elements, attributes and words of a page, and checks that each element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def candidate(worker_id: str, **terms: Any) -> dict[str, Any]:
    item = {"item_index": 0, "mm_hash": "ab" * 16, "encoder_id": "encoder-0", "is_cached": False, "wait_s": 0.01}
    return {"worker_id": worker_id, "covered_tokens": 0, "queue_s": 0.25, "ttft_s": 0.6, "items": [item], **terms}


def record(word: str = "plain", **fields: Any) -> dict[str, Any]:
    """Returns a record with `word` wherever a client, or a member, can put one."""
    span = {
        "name": "unit_encoded",
        "member_id": word,
        "begin_s": 0.1,
        "end_s": 0.3,
        "uncertainty_s": 0.001,
        "attempt": 1,
        "detail": {"item": word, "unit": 0},
    }
    point = span | {"name": word, "end_s": 0.1, "uncertainty_s": 0.0}
    whole: dict[str, Any] = {
        "request_id": word,
        "router_id": word,
        "label": word,
        "model": word,
        "received_at": 1.7e9,
        "modality": word,
        "outcome": word,
        "message": word,
        "ignored": [word],
        "media": [{"part": word, "mm_hash": word, "modality": word, "options": word}],
        "plans": [
            {
                "attempt": 0,
                "plan": {
                    "worker_id": word,
                    "predicted_ttft_s": 0.6,
                    "lower_bound_s": 0.48,
                    "covered_items": [word],
                    "explanation": {
                        "winner": candidate(word),
                        "runner_up": None,
                        "alternatives": [candidate("worker-1"), candidate("worker-2")],
                        "num_workers": 3,
                    },
                },
            }
        ],
        "clocks": [{"host": word, "offset_s": 2.0, "uncertainty_s": 0.001}],
        "timeline": [span, point],
        "stages": [{"attempt": 0, "stage": word, "predicted_s": 0.2, "actual_s": 0.4, "member_id": word, "item": None}],
        "first_token": {
            "at_s": 0.5,
            "attempt": 0,
            "predicted_s": 0.6,
            "actual_s": 0.4,
            "lower_bound_s": 0.3,
            "overlap_efficiency": 0.75,
            "parts": {"queue": 0.1, word: 0.4},
            "longest_part": word,
        },
        "timing": {"total_s": 12.5},
        "usage": {"completion_tokens": 7},
        "events": [{"time_s": 0.0, "member_id": word, "name": word, "detail": {word: word}}],
        "num_events_dropped": 3,
    }
    return whole | fields


def test_no_word_of_a_record_becomes_markup() -> None:
    harmless, hostile = Outline(request_page(record())), Outline(request_page(record(HOSTILE)))
    assert hostile.tags == harmless.tags
    assert [name for name, _ in hostile.attributes] == [name for name, _ in harmless.attributes]
    assert hostile.words.count("alert(1)") > 10
    assert "script" not in hostile.tags


@settings(max_examples=30)
@given(st.text(min_size=1, max_size=40))
def test_no_text_at_all_becomes_markup(word: str) -> None:
    assert Outline(request_page(record(word))).tags == Outline(request_page(record())).tags
    listed = Outline(
        requests_page([{"request_id": word, "label": word, "received_at": 1.0}], {"outcome": word}, [word])
    )
    plain = Outline(requests_page([{"request_id": "r", "label": "l", "received_at": 1.0}], {"outcome": "o"}, ["s"]))
    assert listed.tags == plain.tags


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    for page in (request_page(record()), requests_page([{"request_id": "req-1"}], {}, [])):
        outline = Outline(page)
        assert {"script", "link", "img", "iframe"}.isdisjoint(outline.tags)
        assert not re.search(r"https?:|url\(|@import", page)
        assert all(not name.startswith("on") for name, _ in outline.attributes)
    assert "default-src 'none'" in PAGE_HEADERS["content-security-policy"]


def test_a_page_shows_the_numbers_of_its_record() -> None:
    words = Outline(request_page(record())).words
    for shown in (
        "500 ms",
        "400 ms (80%)",
        "0.75",
        "12.5 s",
        "Queue at the worker",
        "200 ms",
        "worker-2",
        "3 not kept",
    ):
        assert shown in words, shown


def test_terms_that_a_planner_gains_are_shown() -> None:
    whole = record()
    explanation = whole["plans"][0]["plan"]["explanation"]
    explanation["winner"]["silence_penalty_s"] = 0.0125
    explanation["alternatives"][0]["items"][0]["fetch_s"] = 0.321
    words = Outline(request_page(whole)).words
    for shown in ("Silence penalty", "12.5 ms", "Fetch", "321 ms"):
        assert shown in words


def test_without_alternatives_the_runner_up_is_shown() -> None:
    whole = record()
    whole["plans"][0]["plan"]["explanation"] |= {"alternatives": (), "runner_up": candidate("worker-7")}
    assert "worker-7" in Outline(request_page(whole)).words


def test_a_page_of_a_request_that_has_only_arrived() -> None:
    bare = {"request_id": "req-1", "router_id": "r", "outcome": "running", "first_token": None, "timeline": []}
    words = Outline(request_page(bare)).words
    assert "No token has come." in words


def test_a_page_draws_a_bounded_number_of_spans() -> None:
    span = record()["timeline"][0]
    page = request_page(record(timeline=[span] * 3000))
    assert "2600 more spans are in the JSON." in page
    assert page.count(">Encode ") <= 400


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0.00 ms"), (0.00123, "1.23 ms"), (0.0456, "45.6 ms"), (0.789, "789 ms"), (12.34, "12.3 s"), (None, "")],
)
def test_times_have_three_digits(seconds: float | None, shown: str) -> None:
    assert milliseconds(seconds) == shown


def test_a_table_has_a_column_for_each_field_of_any_row() -> None:
    outline = Outline(table([{"a": 1, "is_b": True}, {"a": None, "c_s": 0.5, "d": {"e": "<f>"}}]))
    assert outline.tags.count("th") == 4
    assert "yes" in outline.words
    assert "500 ms" in outline.words
    assert "e=<f>" in outline.words
