"""Tests the numbers, the table and the page of a load test."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtest.load import LoadSample, SeriesWatch, kind_rows, load_page, summary_json

SAMPLES = [
    LoadSample("text", 100.0, 0.0, 0.1, 0.01, 1.0, 10, 5, is_right=True),
    LoadSample("text", 101.0, 0.0, 0.3, 0.03, 1.0, 10, 5, is_right=False),
    LoadSample("image", 103.0, 0.002, 0.5, 0.0, 1.0, 200, 1),
    LoadSample("image", 102.0, 0.0, 0.0, 0.0, 0.1, 0, 0, error="429 overloaded"),
]


def test_the_numbers_are_those_of_the_samples() -> None:
    found = summary_json(SAMPLES)
    assert found["seconds"] == 4.0
    assert (found["requests"], found["failed"], found["errors"]) == (4, 1, {"429 overloaded": 1})
    assert found["requests_per_s"] == 0.75
    assert (found["prompt_tokens"], found["output_tokens"], found["tokens_per_s"]) == (220, 11, 2.75)
    assert found["kinds"]["text"]["ttft_ms"]["p50"] == pytest.approx(200.0)
    assert found["kinds"]["text"]["right_share"] == 0.5
    assert found["kinds"]["image"]["right_share"] is None
    assert found["tpot_ms"]["mean"] == pytest.approx(20.0), "an answer of one token has no TPOT"


def test_the_table_has_a_row_for_each_kind_and_one_for_all() -> None:
    heading, *rows = kind_rows(SAMPLES)
    assert [row[0] for row in rows] == ["image", "text", "all"]
    shown = dict(zip(heading, rows[-1], strict=True))
    assert (shown["requests"], shown["failed"], shown["right"], shown["requests/s"]) == ("4", "1", "50%", "0.75")
    assert shown["late p99 (ms)"] == "2"


def test_samples_travel_between_processes() -> None:
    sent = msgspec.to_builtins(SAMPLES)
    assert msgspec.convert(sent, list[LoadSample]) == SAMPLES


def test_the_page_shows_tables_errors_and_plots(tmp_path: Path) -> None:
    page = load_page(tmp_path, "Load <1>", SAMPLES, {"encoders busy": [(101.0, 0.5), (103.0, 0.7)]}, "here")
    text = page.read_text()
    assert "<h1>Load &lt;1&gt;</h1>" in text
    assert "<td>429 overloaded</td><td>1</td>" in text
    for name in ("ttft", "open", "distribution", "busy"):
        assert f'src="{name}.png"' in text
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_without_a_sample_has_a_table_alone(tmp_path: Path) -> None:
    text = load_page(tmp_path, "Load", [], {}, "here").read_text()
    assert "<td>all</td><td>0</td>" in text
    assert "<img" not in text


PAGE = """\
# TYPE weft_encoder_forward_seconds counter
weft_encoder_forward_seconds_total{{encoder="a"}} {a}
weft_encoder_forward_seconds_total{{encoder="b"}} {b}
weft_worker_kv_used_blocks{{worker="c"}} 10
weft_worker_kv_capacity_blocks{{worker="c"}} 40
"""


def test_members_are_as_busy_as_their_seconds_say() -> None:
    watch = SeriesWatch()
    for at_s, a, b in ((10.0, 1.0, 5.0), (12.0, 2.0, 6.0), (14.0, 2.0, 6.0)):
        watch.take(PAGE.format(a=a, b=b), at_s)
    assert watch.name_to_points["encoders busy"] == [(12.0, 0.5), (14.0, 0.0)]
    assert watch.name_to_points["KV blocks used"] == [(10.0, 0.25), (12.0, 0.25), (14.0, 0.25)]
    assert watch.name_to_points["workers busy"] == []
    assert (watch.mean("encoders busy"), watch.mean("workers busy")) == (0.25, 0.0)


def test_a_member_that_comes_or_begins_again_gives_no_point() -> None:
    watch = SeriesWatch()
    watch.take('weft_encoder_forward_seconds_total{encoder="a"} 7', 10.0)
    watch.take(PAGE.format(a=8.0, b=0.0), 12.0)
    watch.take(PAGE.format(a=0.5, b=1.0), 14.0)
    watch.take(PAGE.format(a=1.5, b=1.0), 16.0)
    assert watch.name_to_points["encoders busy"] == [(16.0, 0.25)]
