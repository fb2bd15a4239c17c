"""Tests the conversation of `weft chat`: what is sent, what stays, and what is measured of an answer."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from deploy.commands.chat_history import AnswerFigures, AnswerStream, ChatHistory, Piece, attach
from fabric.contracts import ConfigError, Unavailable


def roles(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"]]


def test_a_conversation_sends_everything_that_was_said() -> None:
    history = ChatHistory("m", "be brief", {"temperature": 0.0})
    body = history.ask("hello")
    assert (body["model"], body["stream"], body["temperature"]) == ("m", True, 0.0)
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    history.answered("hi")
    assert roles(history.ask("and?")) == ["system", "user", "assistant", "user"]
    history.answered("yes")
    history.system = ""
    assert roles(history.ask_again()) == ["user", "assistant", "user"]
    history.reset()
    with pytest.raises(ConfigError, match="nothing was asked yet"):
        history.ask_again()
    assert roles(history.ask("new")) == ["user"]


def test_a_question_without_an_answer_leaves_the_conversation_and_can_be_asked_again() -> None:
    history = ChatHistory("m")
    history.attached.append(attach("image", "http://a/b.png"))
    history.ask("what?")
    history.answered("")
    assert roles(history.ask("other")) == ["user"]
    history.answered("")
    again = history.ask_again()
    assert again["messages"] == [{"role": "user", "content": "other"}]
    history.answered("one")
    assert roles(history.ask_again()) == ["user"]


def test_media_go_with_the_next_question_only(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    (tmp_path / "b.flac").write_bytes(b"sound")
    (tmp_path / "c.bin").write_bytes(b"film")
    history = ChatHistory("m")
    for modality, name in (("image", "a.png"), ("audio", "b.flac"), ("video", "c.bin")):
        history.attached.append(attach(modality, str(tmp_path / name)))
    history.attached.append(attach("video", "https://host/d.mp4"))
    [message] = history.ask("?")["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "audio_url", "video_url", "video_url", "text"]
    urls = [part[part["type"]]["url"] for part in message["content"][:-1]]
    assert [url.partition(";")[0] for url in urls[:3]] == ["data:image/png", "data:audio/flac", "data:video/mp4"]
    assert base64.b64decode(urls[1].partition(",")[2]) == b"sound"
    assert urls[3] == "https://host/d.mp4"
    history.answered("ok")
    assert history.ask("more")["messages"][-1] == {"role": "user", "content": "more"}
    only = ChatHistory("m")
    only.attached.append(attach("image", str(tmp_path / "a.png")))
    assert [part["type"] for part in only.ask("")["messages"][0]["content"]] == ["image_url"]


def test_files_that_can_not_be_sent_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    for name, said in (("none.png", "can't be read: No such file"), ("empty.png", "is empty"), (".", "can't be read")):
        with pytest.raises(ConfigError, match=said):
            attach("image", str(tmp_path / name))


def test_a_conversation_is_saved_for_people_and_for_programs(tmp_path: Path) -> None:
    history = ChatHistory("m", "be brief")
    history.attached.append(attach("image", "http://a/b.png"))
    history.ask("what?")
    history.answered("a fox")
    history.save(tmp_path / "c.md")
    assert (tmp_path / "c.md").read_text() == (
        "**system**: be brief\n\n**user**: [http://a/b.png] what?\n\n**assistant**: a fox\n"
    )
    history.save(tmp_path / "c.json")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    with pytest.raises(ConfigError, match="exists already"):
        history.save(tmp_path / "c.md")
    with pytest.raises(ConfigError, match="can't be written"):
        history.save(tmp_path / "none" / "c.md")


# ------------------------------------------------------------ answers


def chunk(delta: dict[str, str] | None = None, finish: str | None = None, **fields: Any) -> str:
    choices = [] if delta is None else [{"delta": delta, "finish_reason": finish}]
    return f"data: {json.dumps({'choices': choices, **fields})}"


def test_an_answer_is_read_and_measured() -> None:
    now = [10.0]
    answer = AnswerStream("req-1", lambda: now[0], asked_s=10.0)
    lines = [
        chunk({"role": "assistant"}),
        ": a comment keeps the connection open",
        chunk({"reasoning_content": "hm"}),
        chunk({"content": "a "}),
        chunk({"content": "fox"}, "stop"),
        chunk(None, usage={"prompt_tokens": 5, "completion_tokens": 11, "prompt_tokens_details": {"image_tokens": 3}}),
        "data: [DONE]",
    ]
    pieces = []
    for piece in answer.pieces(lines):
        pieces.append(piece)
        now[0] += 1.0
    assert pieces == [Piece("hm", True), Piece("a "), Piece("fox")]
    assert answer.text == "a fox"
    figures = answer.figures()
    assert (figures.first_token_s, figures.total_s, figures.finish_reason) == (0.0, 3.0, "stop")
    assert figures.tokens_per_s == pytest.approx(10 / 3)
    assert "5 prompt tokens (3 image), 11 generated tokens" in figures.lines()
    assert figures.lines()[-1].startswith("request req-1; `weft trace req-1`")


def test_an_answer_that_was_stopped_has_fewer_figures() -> None:
    figures = AnswerFigures("req-1", None, 2.0, {}, "")
    assert figures.tokens_per_s is None
    assert figures.lines()[0] == "no token came, 2.00 s in all, ended with: stopped"


def test_an_error_in_the_stream_ends_the_answer() -> None:
    answer = AnswerStream("req-1", lambda: 0.0, 0.0)
    lines = [chunk({"content": "a"}), 'data: {"error": {"message": "the worker is lost"}}']
    with pytest.raises(Unavailable, match="ended the answer with an error: the worker is lost"):
        list(answer.pieces(lines))
    assert answer.text == "a"
