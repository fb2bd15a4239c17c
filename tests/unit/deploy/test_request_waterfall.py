"""Tests `weft trace`: what it draws of a record, and which request it finds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_chats import chat_body, image, text
from served_fakes import served_fakes

from deploy.cli import main
from deploy.commands.request_waterfall import sections_of, waterfall
from deploy.commands.terminal import console, write

Captured = pytest.CaptureFixture[str]


def option(worker: str, ttft_s: float) -> dict[str, Any]:
    item = {"item_index": 0, "encoder_id": "encoder-0", "landing_s": 0.05}
    return {"worker_id": worker, "covered_tokens": 16, "ttft_s": ttft_s, "held_s": 0.04, "items": [item]}


def span(name: str, begin_s: float, end_s: float, member: str = "worker-0", **detail: object) -> dict[str, Any]:
    where = {"member_id": member, "begin_s": begin_s, "end_s": end_s, "uncertainty_s": 0.0, "attempt": 0}
    return {"name": name, **where, "detail": detail}


def record(**changes: Any) -> dict[str, Any]:
    """Returns the record of a request with a picture: 100 ms to its first token, half of it at the doorstep."""
    explanation = {"winner": option("worker-0", 0.08), "runner_up": None, "num_workers": 9, "is_explored": False}
    explanation["alternatives"] = [option(f"worker-{at}", 0.08 + at / 100) for at in range(1, 9)]
    stages = [
        {
            "attempt": 0,
            "stage": "prefill",
            "predicted_s": 0.02,
            "actual_s": 0.05,
            "member_id": "worker-0",
            "item": None,
        },
        {"attempt": 0, "stage": "decode", "predicted_s": 0.03, "actual_s": 0.03, "member_id": "encoder-0", "item": 0},
    ]
    made: dict[str, Any] = {
        "request_id": "req-1",
        "router_id": "router-0",
        "received_at": 1_795_700_283.5,
        "modality": "image",
        "outcome": "ok",
        "num_prompt_tokens": 55,
        "usage": {"completion_tokens": 7},
        "timing": {"total_s": 0.2},
        "plans": [{"attempt": 0, "plan": {"worker_id": "worker-0", "explanation": explanation}}],
        "timeline": [
            span("read", 0.0, 0.01, "router-0"),
            span("prefill", 0.01, 0.05, start=0, end=40),
            span("held", 0.05, 0.1),
            span("first_token", 0.1, 0.1),
            span("generate", 0.1, 0.2),
        ],
        "stages": stages,
        "first_token": {
            "at_s": 0.1,
            "attempt": 0,
            "predicted_s": 0.08,
            "actual_s": 0.09,
            "overlap_efficiency": 0.5,
            "parts": {"read": 0.01, "waited": 0.0, "prefill": 0.04, "held": 0.05},
            "longest_part": "held",
        },
    }
    return made | changes


def drawn(wanted: dict[str, Any], width: int = 80, is_plain: bool = True) -> list[str]:
    sink = io.StringIO()
    for section in waterfall(wanted, width, is_plain):
        for part in section:
            write(console(sink), part)
    return sink.getvalue().splitlines()


def row(lines: list[str], begins: str) -> str:
    return next(line for line in lines if line.startswith(begins))


def test_the_head_says_where_most_of_the_time_went() -> None:
    lines = drawn(record())
    assert lines[0] == "req-1  image, ok"
    assert "55 prompt tokens, 7 generated tokens, 1 attempt, 200 ms in all" in lines
    said = "The first token came after 100 ms. The largest part is Held at the doorstep: 50.0 ms (50%)."
    assert said in lines
    assert "Since dispatch 90.0 ms, predicted 80.0 ms, and 50% of it is the bound with empty queues." in lines


def test_the_parts_follow_each_other_and_fill_the_bar() -> None:
    lines = drawn(record())
    bars = [row(lines, name) for name in ("Read the media ", "Prefill ", "Held at the doorstep ")]
    assert not any(line.startswith("Wait for a member") for line in lines)
    room = 80 - (24 + 8 + 4) - 6
    ends = [line.rindex("#") + 1 for line in bars]
    begins = [line.index("#") for line in bars]
    left = begins[0]
    assert [begin - left for begin in begins] == [0, room // 10, room // 2]
    assert ends[-1] - left == room
    assert [line.split("%")[0].split()[-1] for line in bars] == ["10", "40", "50"]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_bars_of_the_timeline_are_on_one_axis_and_within_the_width(width: int) -> None:
    lines = drawn(record(), width)
    timeline = lines[lines.index(row(lines, "TIMELINE")) + 1 :][:5]
    held, token = row(timeline, "Held at"), row(timeline, "First token")
    assert abs(held.rindex("#") - token.index("|")) <= 1, "the first token comes when the wait ends"
    assert row(timeline, "Prefill (tok").rindex("#") < held.rindex("#")
    assert all(len(line) <= width for line in timeline)
    assert "100 ms" in row(timeline, "Generate")


def test_predictions_stand_beside_what_was_measured() -> None:
    lines = drawn(record())
    begin = lines.index(row(lines, "PREDICTED AGAINST"))
    assert lines[begin + 1].split() == ["Prefill", "20.0", "ms", "50.0", "ms", "+30.0", "ms", "worker-0"]
    assert lines[begin + 2].split()[-4:] == ["ms", "item", "0,", "encoder-0"]


def test_the_chosen_worker_stands_beside_the_alternatives_that_fit() -> None:
    lines = drawn(record(), 80)
    assert "Attempt 0: the router compared 9 workers." in lines
    assert row(lines, "ROUTE").split() == ["ROUTE", "CHOSEN", "RUNNER-UP"]
    assert row(lines, "Worker ").split() == ["Worker", "worker-0", "worker-1"]
    assert row(lines, "First token (predicted)").split()[-4:] == ["80.0", "ms", "90.0", "ms"]
    assert row(lines, "Item 0: encoder").split()[-2:] == ["encoder-0", "encoder-0"]
    assert "7 more alternatives are in the JSON (--json)." in lines
    wide = drawn(record(), 210)
    assert row(wide, "ROUTE").split()[-1] == "9."
    assert not any("more alternatives" in line for line in wide)


def test_a_request_that_runs_or_failed_is_shown_too() -> None:
    running = drawn(record(first_token=None, outcome="running", usage=None, timing=None, timeline=[], stages=[]))
    assert "No token has come." in running
    assert not any(line.startswith(("TIMELINE", "TIME TO", "PREDICTED")) for line in running)
    failed = drawn(record(outcome="overloaded", message="no \x1b[31mroom", plans=[], first_token=None))
    assert "no \\x1b[31mroom" in failed
    assert failed[0] == "req-1  image, overloaded"


def test_other_hosts_and_unicode() -> None:
    moved = record()
    moved["timeline"][1]["uncertainty_s"] = 0.002
    lines = drawn(moved, is_plain=False)
    assert "Spans of other hosts may be shifted by 2.00 ms at most." in lines
    assert any("█" in line for line in lines)
    assert len(sections_of(record(), 80)) > 8


def test_requests_are_found_by_id_and_by_what_they_were(capsys: Captured) -> None:
    with served_fakes(max_traces=8) as fakes, httpx.Client(base_url=fakes.url) as client:
        headers = {"content-type": "application/json"}
        sent = [chat_body(), chat_body([image(), text("?")]), chat_body(model="other"), chat_body()]
        answers = [client.post("/v1/chat/completions", content=body, headers=headers) for body in sent]
        ids = [answer.headers["x-weft-request-id"] for answer in answers]

        def found(*words: str) -> str:
            assert main(["trace", *words, "--json", "--url", fakes.url]) == 0
            return str(json.loads(capsys.readouterr().out)["request_id"])

        assert found(ids[0]) == found(answers[0].json()["id"]) == ids[0]
        assert found("--last") == ids[3]
        assert found("--last", "--modality", "image") == ids[1]
        assert found("--last", "--outcome", "model_not_found") == ids[2]
        times = {
            each["request_id"]: each["first_token_s"] or 0.0 for each in client.get("/weft/requests").json()["requests"]
        }
        assert found("--slowest") == max(times, key=times.__getitem__)
        assert main(["trace", ids[1], "--url", fakes.url]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{ids[1]}  image, ok\n")
        assert "Attempt 0: the router compared 1 worker." in printed
        for words, said in (
            (["req-unknown"], "a router keeps those of its latest 8 requests"),
            (["../metrics"], "is not the id of a request"),
            (["--last", "--modality", "smell"], "no record of such a request"),
            (["--slowest", "--outcome", "model_not_found"], "no record of such a request"),
        ):
            assert main(["trace", *words, "--url", fakes.url]) == 1
            assert said in capsys.readouterr().err


# ------------------------------------------------------------ files of spans


def test_spans_are_written_for_perfetto(tmp_path: Path, capsys: Captured) -> None:
    with served_fakes(max_traces=8) as fakes, httpx.Client(base_url=fakes.url) as client:
        headers = {"content-type": "application/json"}
        sent = [chat_body(), chat_body([image(), text("?")]), chat_body(model="other")]
        answers = [client.post("/v1/chat/completions", content=body, headers=headers) for body in sent]
        ids = [answer.headers["x-weft-request-id"] for answer in answers]
        file = tmp_path / "spans.json"

        def written(*words: str) -> set[str]:
            file.write_text("what an earlier run has left")
            assert main(["trace", *words, "--perfetto", str(file), "--url", fakes.url]) == 0
            spans = json.loads(file.read_text())
            names = {each["args"]["name"] for each in spans["traceEvents"] if each["name"] == "thread_name"}
            num_spans = sum(each["ph"] == "X" for each in spans["traceEvents"])
            said = f"{file} has {num_spans} spans of {len(names)} request{'' if len(names) == 1 else 's'}; open it at "
            assert capsys.readouterr().out.startswith(said)
            return names

        assert written(ids[1]) == written(answers[1].json()["id"]) == {ids[1]}
        assert written("--last", "--modality", "image") == {ids[1]}
        assert written("--slowest") < set(ids)
        assert written("--last", "60") == set(ids)
        assert written("--last", "60", "--modality", "image") == {ids[1]}
        no_folder = tmp_path / "none" / "spans.json"
        for words, said in (
            (["req-unknown", "--perfetto", str(file)], "a router keeps those of its latest 8 requests"),
            (["../metrics", "--perfetto", str(file)], "is not the id of a request"),
            (["--last", "60"], "which only --perfetto FILE can show"),
            (["--last", "0", "--perfetto", str(file)], "`seconds`"),
            (["--last", "60", "--modality", "audio", "--perfetto", str(file)], "no request of this kind came within"),
            (["--last", "--perfetto", str(no_folder)], "can't be written: No such file or directory"),
        ):
            assert main(["trace", *words, "--url", fakes.url]) == 1, words
            assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--last", "soon", "--perfetto", "f"], ["x", "--perfetto", "f", "--json"]])
def test_options_that_do_not_fit_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", *words])
