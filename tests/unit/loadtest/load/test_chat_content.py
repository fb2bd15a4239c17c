"""Tests the bodies of the chats that a load test sends."""

from __future__ import annotations

import base64
import io
import itertools
import wave
from typing import Any

import av
import pytest
from PIL import Image

from fabric.contracts import ConfigError
from loadtest.load import SCENARIOS, DrawnContent, SizedContent, content_for, scenario_requests
from loadtest.simulator import SimRequest


def request(*parts: Any, kind: str = "text", session: int = -1) -> SimRequest:
    return SimRequest(0, 0.0, kind, parts, 7, 3, session)


def decoded(part: dict[str, Any]) -> bytes:
    url = part[part["type"]].get("url") or part["input_audio"]["data"]
    return base64.b64decode(url.rpartition(",")[2])


def content_of(chat: Any) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = chat.body["messages"][-1]["content"]
    return parts


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("content", ["sized", "drawn"])
def test_every_scenario_can_be_written_with_every_content(name: str, content: str) -> None:
    made = content_for(content, "weft-demo")
    kinds = set()
    for one in itertools.islice(scenario_requests(SCENARIOS[name].spec(10.0), 1), 40):
        chat = made.chat(one)
        kinds.add(chat.kind)
        assert chat.body["stream"] is True
        assert chat.body["stream_options"] == {"include_usage": True}
        assert chat.body["messages"][-1]["role"] == "user"
        made.answered(one, "blue")
    assert kinds == set(SCENARIOS[name].kind_to_share)


def test_a_sized_text_has_its_number_of_words_and_its_length() -> None:
    chat = SizedContent("m").chat(request((5, 40)))
    assert len(content_of(chat)[0]["text"].split()) == 40
    assert (chat.body["max_tokens"], chat.body["ignore_eos"], chat.right_answer) == (7, True, None)
    assert "ignore_eos" not in SizedContent("m", has_fixed_length=False).chat(request((5, 40))).body


def test_media_have_their_size() -> None:
    parts = content_of(SizedContent("m").chat(request(("image-96", "a"), ("video-8f", "b"), ("audio-2s", "c"))))
    assert Image.open(io.BytesIO(decoded(parts[0]))).size == (96, 96)
    with av.open(io.BytesIO(decoded(parts[1]))) as film:
        assert sum(1 for _ in film.decode(video=0)) == 8
    with wave.open(io.BytesIO(decoded(parts[2]))) as sound:
        assert sound.getnframes() / sound.getframerate() == 2.0


def test_equal_content_is_the_same_file_and_other_content_another_one() -> None:
    content = SizedContent("m")
    same, again, other = (content_of(content.chat(request((name, text))))[0] for name, text in (
        ("video-8f", "a"), ("video-8f", "a"), ("video-8f", "b"),
    ))  # fmt: skip
    assert same == again != other


@pytest.mark.parametrize("name", ["film-3f", "video", "video-xf", "audio-fivess"])
def test_an_unknown_medium_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no medium '{name}'"):
        SizedContent("m").chat(request((name, "a")))


def test_a_drawn_question_has_a_right_answer() -> None:
    chat = DrawnContent("weft-demo").chat(request((5, 10), ("image", "a"), kind="image"))
    assert chat.right_answer
    assert any(part["type"] == "image_url" for turn in chat.body["messages"] for part in turn["content"])


def test_the_demo_model_is_not_asked_what_it_has_not_learned() -> None:
    with pytest.raises(ConfigError, match=r"no questions about image\+video-30f; use the content `sized`"):
        DrawnContent("weft-demo").chat(request(("image", "a"), ("video-30f", "b"), kind="image+video-30f"))


@pytest.mark.parametrize("content", ["sized", "drawn"])
def test_a_later_turn_contains_the_answer_to_the_earlier_one(content: str) -> None:
    made = content_for(content, "m")
    first = request((5, 10), ("image", "a"), kind="image", session=4)
    begun = made.chat(first).body["messages"]
    made.answered(first, "a blue circle")
    later = request(*first.parts, (3, 7), (9, 6), kind="image", session=4)
    chat = made.chat(later)
    turns = chat.body["messages"]
    assert turns[: len(begun)] == begun
    assert turns[len(begun)] == {"role": "assistant", "content": "a blue circle"}
    assert turns[-1]["role"] == "user"
    assert chat.right_answer is None


def test_the_content_follows_the_model() -> None:
    assert isinstance(content_for("auto", "weft-demo"), DrawnContent)
    assert isinstance(content_for("auto", "qwen3"), SizedContent)
    with pytest.raises(ConfigError, match="there is no content 'own'; write auto, drawn or sized"):
        content_for("own", "m")


def test_the_same_number_of_a_session_may_begin_another_conversation() -> None:
    content = SizedContent("m")
    first = content.chat(request((5, 10), session=4))
    assert content.chat(request((5, 10), session=4)).body == first.body
    chat = content.chat(request((6, 3), session=4))
    assert len(chat.body["messages"]) == 1
    assert len(content_of(chat)[0]["text"].split()) == 3
