"""Tests `/v1/audio/transcriptions` over fake members: forms, answers in both formats, events, and refusals."""

from __future__ import annotations

import pytest
from edge_client import events, served
from openai.types.audio import Transcription as SdkTranscription
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent, TranscriptionVerbose
from router_media_fakes import MediaFamily, media_registry

from deploy.testing import TINY_MODEL
from deploy.testing.tiny_family import tiny_codec
from fabric.contracts import InvalidRequest
from router.api.transcription_request import form_parts

PATH = "/v1/audio/transcriptions"
SOUND = ("speech.wav", b"audio 16000x32000", "audio/wav")


def hearing() -> dict[str, object]:
    """Returns the settings of a cluster whose model hears."""
    modalities = ("image", "video", "audio")
    return {"model": (MediaFamily(), tiny_codec()), "registry": media_registry(), "encoder_modalities": modalities}


async def test_a_sound_becomes_text() -> None:
    async with served(**hearing()) as (cluster, client):
        cluster.workers[0].script.reply = " Hello, world. "
        form = {"model": TINY_MODEL, "language": "en", "prompt": "Names: Weft."}
        response = await client.post(PATH, data=form, files={"file": SOUND})
        assert response.status_code == 200, response.text
        answer = SdkTranscription.model_validate(response.json())
        assert answer.text == "Hello, world."
        (request,) = cluster.workers[0].requests
        prompt = cluster.codec.decode(request.token_ids)
        assert "Write down what is said in this recording, and nothing else. The language is en. Names: Weft." in prompt
        assert [item.modality for item in request.media] == ["audio"]
        assert cluster.encoders[0].media == [SOUND[1]]
        usage = response.json()["usage"]
        assert usage["input_tokens"] == len(request.token_ids)
        assert usage["input_token_details"]["audio_tokens"] == request.media[0].num_tokens


async def test_plain_text_is_an_answer_too() -> None:
    async with served(**hearing()) as (cluster, client):
        cluster.workers[0].script.reply = "Hello."
        form = {"model": TINY_MODEL, "response_format": "text"}
        response = await client.post(PATH, data=form, files={"file": SOUND})
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        assert response.text == "Hello.\n"


@pytest.mark.parametrize("language", ["en", ""])
async def test_a_verbose_answer_tells_how_long_the_sound_is(language: str) -> None:
    async with served(**hearing()) as (cluster, client):
        cluster.workers[0].script.reply = "Hello."
        form = {"model": TINY_MODEL, "response_format": "verbose_json", "language": language}
        response = await client.post(PATH, data=form, files={"file": SOUND})
        answer = TranscriptionVerbose.model_validate(response.json())
        assert (answer.text, answer.duration, answer.language) == ("Hello.", 2.0, language or "unknown")
        assert (answer.segments, answer.words) == (None, None)
        assert answer.usage is not None
        assert (answer.usage.type, answer.usage.seconds) == ("duration", 2.0)


async def test_a_transcript_can_be_streamed() -> None:
    async with served(**hearing()) as (cluster, client):
        cluster.workers[0].script.reply = "Hello, world."
        response = await client.post(PATH, data={"model": TINY_MODEL, "stream": "true"}, files={"file": SOUND})
        *deltas, done = events(response.content)
        assert {event["type"] for event in deltas} == {"transcript.text.delta"}
        assert "".join(event["delta"] for event in deltas) == done["text"] == "Hello, world."
        assert done["type"] == "transcript.text.done"
        assert done["usage"]["output_tokens"] == len("Hello, world.") + 1


@pytest.mark.parametrize("name", ["include[]", "include"])
async def test_log_probabilities_come_with_the_transcript(name: str) -> None:
    form = {"model": TINY_MODEL, name: ["logprobs"]}
    async with served(**hearing()) as (cluster, client):
        cluster.workers[0].script.reply = "Grüße."
        response = await client.post(PATH, data=form, files={"file": SOUND})
        answer = SdkTranscription.model_validate(response.json())
        assert answer.logprobs is not None
        found = [bytes(map(int, entry.bytes or ())) for entry in answer.logprobs]
        assert b"".join(found) == "Grüße.".encode()
        assert all(set(entry) == {"token", "logprob", "bytes"} for entry in response.json()["logprobs"])
        response = await client.post(PATH, data=form | {"stream": "true"}, files={"file": SOUND})
        *deltas, done = events(response.content)
        assert len(deltas) > 1
        for event in deltas:
            TranscriptionTextDeltaEvent.model_validate(event)
        TranscriptionTextDoneEvent.model_validate(done)
        assert [entry for event in deltas for entry in event["logprobs"]] == done["logprobs"]
        assert [entry["token"] for entry in done["logprobs"]] == [entry.token for entry in answer.logprobs]


async def test_log_probabilities_come_only_if_they_are_asked_for() -> None:
    async with served(**hearing()) as (_, client):
        response = await client.post(PATH, data={"model": TINY_MODEL}, files={"file": SOUND})
        assert "logprobs" not in response.json()
        response = await client.post(PATH, data={"model": TINY_MODEL, "stream": "true"}, files={"file": SOUND})
        assert [event for event in events(response.content) if "logprobs" in event] == []


async def test_a_model_that_does_not_hear_says_so() -> None:
    async with served() as (_, client):
        refused = await client.post(PATH, data={"model": TINY_MODEL}, files={"file": SOUND})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_modality", "file")


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"model": TINY_MODEL}, {"other": SOUND}, "file"),
        ({"model": TINY_MODEL}, {"file": ("a.wav", b"", "audio/wav")}, "file"),
        ({}, {"file": SOUND}, "model"),
        ({"model": TINY_MODEL, "response_format": "srt"}, {"file": SOUND}, "response_format"),
        ({"model": TINY_MODEL, "timestamp_granularities[]": "word"}, {"file": SOUND}, "timestamp_granularities"),
        ({"model": TINY_MODEL, "include[]": ["logprobs", "words"]}, {"file": SOUND}, "include"),
        ({"model": TINY_MODEL, "include[]": "logprobs", "response_format": "text"}, {"file": SOUND}, "include"),
        ({"model": TINY_MODEL, "include[]": "logprobs", "response_format": "verbose_json"}, {"file": SOUND}, "include"),
        ({"model": TINY_MODEL, "temperature": "warm"}, {"file": SOUND}, "temperature"),
        ({"model": TINY_MODEL, "temperature": "9"}, {"file": SOUND}, "temperature"),
        ({"model": TINY_MODEL, "stream": "maybe"}, {"file": SOUND}, "stream"),
        ({"model": TINY_MODEL, "language": "e n"}, {"file": SOUND}, "language"),
        ({"model": TINY_MODEL, "prompt": "x" * 70_000}, {"file": SOUND}, "prompt"),
        ({f"f{number}": "x" for number in range(70)}, {"file": SOUND}, None),
    ],
)
async def test_bad_forms_are_named(fields: dict[str, object], files: dict[str, object], param: str | None) -> None:
    async with served(**hearing()) as (_, client):
        response = await client.post(PATH, data=fields, files=files)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", "multipart/form-data"),
        (b"garbage", "multipart/form-data; boundary=x"),
        (b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc', "multipart/form-data; boundary=x"),
        (b"--x\r\n" + b"a" * 100_000 + b"\r\n\r\nb\r\n--x--\r\n", "multipart/form-data; boundary=x"),
    ],
)
async def test_what_is_no_form_is_refused(body: bytes, content_type: str) -> None:
    async with served(**hearing()) as (_, client):
        response = await client.post(PATH, content=body, headers={"content-type": content_type})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")


def test_a_field_is_refused_before_the_rest_of_the_form_is_read() -> None:
    begin = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
    with pytest.raises(InvalidRequest, match="at most 65536 bytes") as refused:
        form_parts(begin % b"prompt" + b"9" * 65_537 + b"\r\n--xno form", "multipart/form-data; boundary=x")
    assert refused.value.param == "prompt"
    (part,) = form_parts(begin % b"file" + b"9" * 65_537 + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")
    assert len(part.data) == 65_537


@pytest.mark.parametrize("content_type", ["multipart/form-data", 'multipart/form-data; boundary=""'])
def test_a_form_without_a_boundary_is_told_so(content_type: str) -> None:
    with pytest.raises(InvalidRequest, match="`Content-Type: multipart/form-data` has no `boundary`"):
        form_parts(b"--x--", content_type)


def test_the_data_of_a_part_may_hold_anything_but_the_boundary() -> None:
    data = bytes(range(256)) + b"\r\n--y\r\n--x"
    body = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data + b"\r\n--xyz--\r\n"
    (part,) = form_parts(body, "multipart/form-data; boundary=xyz")
    assert (part.name, part.data) == ("file", data)
