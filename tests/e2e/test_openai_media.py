"""Asks a served demo model about pictures, videos and sounds with OpenAI's own Python library: media in the request, as
files, and by URL, and transcripts of sounds."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import openai
import pytest
from client_questions import NUMBER, NUMBER_QUESTION, WORDS, as_file, as_url, media_question, spoken
from cluster_process import ClusterProcess
from media_web import MediaWeb

from deploy.compose import DEMO_TRANSCRIPTION

pytestmark = pytest.mark.torch

MODALITIES = ("image", "video", "audio")


@pytest.mark.parametrize("modality", MODALITIES)
def test_media_are_answered_right_whole_and_streamed(client: openai.OpenAI, modality: str) -> None:
    asked, right = media_question(modality)
    fields: dict[str, Any] = {"model": "weft-demo", "messages": asked, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == right
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == right


@pytest.mark.parametrize("modality", MODALITIES)
def test_media_by_url_and_as_files_are_answered_alike(client: openai.OpenAI, web: MediaWeb, modality: str) -> None:
    asked, right = media_question(modality)
    for changed in (as_url(asked, modality, web), as_file(asked, modality)):
        answer = client.chat.completions.create(model="weft-demo", messages=changed, temperature=0)
        assert answer.choices[0].message.content == right


def test_a_response_takes_pictures_by_url_and_files(client: openai.OpenAI, web: MediaWeb) -> None:
    asked, right = media_question("image")
    text = next(part["text"] for part in asked[-1]["content"] if part["type"] == "text")
    (held,) = [part["file"] for part in as_file(asked, "image")[-1]["content"] if part["type"] == "file"]
    for medium in (
        {"type": "input_image", "image_url": web.url("/picture.png"), "detail": "auto"},
        {"type": "input_file", **held},
    ):
        items: Any = [{"role": "user", "content": [medium, {"type": "input_text", "text": text}]}]
        assert client.responses.create(model="weft-demo", input=items, temperature=0).output_text == right


def test_media_that_can_not_be_had_raise_the_class_of_their_status(client: openai.OpenAI, web: MediaWeb) -> None:
    for url, kind, code in (
        (web.url("/nothing.png"), openai.UnprocessableEntityError, "media_unreachable"),
        ("http://127.0.0.1/picture.png", openai.BadRequestError, "url_refused"),
        ("data:image/png;base64,AAAA", openai.BadRequestError, "invalid_media"),
    ):
        asked: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        with pytest.raises(kind) as caught:
            client.chat.completions.create(model="weft-demo", messages=asked)
        assert (caught.value.code, caught.value.param) == (code, "messages.0.content.0")


# ------------------------------------------------------------ transcripts


@pytest.mark.parametrize("word", WORDS)
def test_a_transcript_is_what_was_said_in_every_format(client: openai.OpenAI, word: str) -> None:
    fields: dict[str, Any] = {"model": "weft-demo", "file": ("said.mp3", spoken(word))}
    whole = client.audio.transcriptions.create(**fields)
    assert whole.text == word
    assert client.audio.transcriptions.create(**fields, response_format="json") == whole
    assert client.audio.transcriptions.create(**fields, response_format="text") == f"{word}\n"
    verbose = client.audio.transcriptions.create(**fields, response_format="verbose_json")
    assert verbose.text == word
    assert 1.0 < verbose.duration < 1.2
    events = list(client.audio.transcriptions.create(**fields, stream=True))
    done = events[-1]
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in events[:-1]) == done.text == word
    assert done.usage.model_dump() == whole.usage.model_dump()
    assert done.usage.input_token_details.audio_tokens > 0
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_the_prompt_of_a_transcript_takes_effect(client: openai.OpenAI) -> None:
    """The demo model writes down colours, and numbers if it is asked for a number."""
    file = io.BytesIO(spoken(NUMBER))
    answer = client.audio.transcriptions.create(
        model="weft-demo", file=file, prompt=NUMBER_QUESTION, temperature=0, response_format="text"
    )
    assert answer == f"{NUMBER}\n"


def test_a_transcript_is_the_answer_of_the_chat_about_the_same_sound(client: openai.OpenAI) -> None:
    file = spoken(WORDS[0])
    sound = {
        "type": "file",
        "file": {"filename": "said.mp3", "file_data": f"data:;base64,{base64.b64encode(file).decode()}"},
    }
    asked: Any = [{"role": "user", "content": [sound, {"type": "text", "text": DEMO_TRANSCRIPTION}]}]
    chat = client.chat.completions.create(model="weft-demo", messages=asked, temperature=0)
    transcript = client.audio.transcriptions.create(model="weft-demo", file=file)
    assert chat.choices[0].message.content == transcript.text
    assert chat.usage is not None
    assert transcript.usage is not None
    assert transcript.usage.type == "tokens"
    assert chat.usage.prompt_tokens == transcript.usage.input_tokens


def test_transcripts_may_be_asked_for_at_once(served: ClusterProcess) -> None:
    words = [*WORDS, *WORDS]

    async def streamed(made: openai.AsyncOpenAI, word: str) -> str:
        stream = await made.audio.transcriptions.create(model="weft-demo", file=("said.mp3", spoken(word)), stream=True)
        return "".join([event.delta async for event in stream if event.type == "transcript.text.delta"])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
            return await asyncio.gather(*(streamed(made, word) for word in words))

    assert asyncio.run(all_of_them()) == words


def test_transcripts_that_are_refused_raise_the_class_of_their_status(client: openai.OpenAI) -> None:
    sound = ("said.mp3", spoken(WORDS[0]))
    for fields, param in (
        ({"response_format": "srt"}, "response_format"),
        ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"temperature": 9}, "temperature"),
        ({"file": ("said.mp3", b"no sound")}, "file"),
        ({"file": ("said.mp3", b"no sound"), "stream": True}, "file"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.audio.transcriptions.create(**({"model": "weft-demo", "file": sound} | fields))
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError) as missing:
        client.audio.transcriptions.create(model="other", file=sound)
    assert missing.value.code == "model_not_found"
