"""Tests the questions of `weft demo`, the requests that the demo sends, and how it judges the answers."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable
from typing import Any

import cv2
import httpx
import numpy as np
import pytest
from PIL import Image

from deploy.demo import ask
from deploy.demo import ask as wire
from deploy.demo.drawing.facts import Clip, Picture, Sound
from deploy.demo.tasks.catalogue import MODALITIES
from fabric.contracts import Unavailable


@pytest.fixture(autouse=True)
def everything_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "LEARNED", MODALITIES)


def events(text: str) -> bytes:
    chunks = [{"choices": [{"delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"delta": {"content": letter}}]} for letter in text]
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


def cluster(answer: Callable[[list[dict[str, Any]]], str], refused: str = "") -> httpx.MockTransport:
    """Returns the transport of a server that accepts all parts except those of the `refused` types."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "weft-demo"}]})
        body = json.loads(request.content)
        kinds = [p["type"] for turn in body["messages"] if isinstance(turn["content"], list) for p in turn["content"]]
        if refused and any(kind in refused for kind in kinds):
            return httpx.Response(400, json={"error": {"code": "unsupported_modality", "message": "no"}})
        if not body.get("stream"):
            return httpx.Response(200, json={"choices": []})
        return httpx.Response(200, content=events(answer(body["messages"])))

    return httpx.MockTransport(handle)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[httpx.MockTransport], None]:
    def install(transport: httpx.MockTransport) -> None:
        client = httpx.Client
        monkeypatch.setattr(ask.httpx, "Client", lambda **kwargs: client(transport=transport, **kwargs))

    return install


def knows(seed: int, refused: list[str], num_wrong: int = 0) -> Callable[[list[dict[str, Any]]], str]:
    """Returns a function that answers each question of the demo by the messages sent, and the first `num_wrong`
    questions wrongly."""
    asked = ask.questions(seed, refused)
    answers = {json.dumps(wire.messages(q.sample)): q.sample.answer for q in asked[num_wrong:]}
    return lambda messages: answers.get(json.dumps(messages), "mauve")


@pytest.mark.parametrize("num_wrong", [0, 1, 2])
def test_nine_of_ten_are_needed(num_wrong: int, use: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    use(cluster(knows(4, [], num_wrong)))
    assert ask.run_demo("http://cluster", 4) == (0 if num_wrong <= 1 else 1)
    printed = capsys.readouterr().out
    assert f"{10 - num_wrong} of 10 answers are right." in printed
    assert printed.count("wrong, the right answer is: ") == num_wrong
    assert "asks no questions about" not in printed
    for question in ask.questions(4):
        assert all(shown in printed for shown in question.shown)


def test_what_the_cluster_does_not_take_is_left_out_and_said(
    use: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(cluster(knows(2, ["video", "audio"]), refused="video_url input_audio"))
    assert ask.run_demo("http://cluster", 2) == 0
    printed = capsys.readouterr().out
    assert "videos and sounds, which this cluster does not take" in printed
    assert "10 of 10 answers are right." in printed


def test_what_the_model_has_not_learned_is_left_out_and_said(
    use: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "LEARNED", ("text", "image"))
    use(cluster(knows(2, ["video", "audio"])))
    assert ask.run_demo("http://cluster", 2) == 0
    assert "videos and sounds, which the demo model has not learned" in capsys.readouterr().out


def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        ask.run_demo("http://127.0.0.1:9", 0)


def test_ten_questions_per_seed_and_other_seeds_ask_others() -> None:
    first, again, other = ask.questions(1), ask.questions(1), ask.questions(2)
    assert [wire.messages(q.sample) for q in first] == [wire.messages(q.sample) for q in again]
    assert [q.shown for q in first] != [q.shown for q in other]
    assert len(first) == len(ask.questions(1, ["video", "audio"])) == 10
    kinds = {type(medium) for question in first for medium in question.sample.media()}
    assert kinds == {Picture, Sound, Clip}


def test_what_is_sent_is_what_was_drawn() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(wire.png(Picture(pixels, ""))))), pixels)
    samples = rng.uniform(-1, 1, 2000).astype(np.float32)
    with wave.open(io.BytesIO(wire.wav(Sound(samples, "")))) as file:
        assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
        heard = np.frombuffer(file.readframes(2000), "<i2") / (2**15 - 1)
    assert np.abs(heard - samples).max() < 1e-4


def test_clips_can_be_read_back(tmp_path: Any) -> None:
    clip = next(medium for q in ask.questions(0) for medium in q.sample.media() if isinstance(medium, Clip))
    message = wire.messages(next(q.sample for q in ask.questions(0) if clip.description in q.shown))[-1]
    url = next(part["video_url"]["url"] for part in message["content"] if part["type"] == "video_url")
    file = tmp_path / "clip.mp4"
    file.write_bytes(base64.b64decode(url.split(",")[1]))
    reader = cv2.VideoCapture(str(file))
    frames = []
    while True:
        is_read, frame = reader.read()
        if not is_read:
            break
        frames.append(frame[:, :, ::-1])
    assert len(frames) == len(clip.frames)
    height, width, _ = frames[0].shape
    assert np.abs(np.stack(frames) - clip.frames[:, :height, :width].astype(float)).mean() < 12
