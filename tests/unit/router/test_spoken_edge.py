"""Tests spoken answers over HTTP: chat completions with sound, whole and streamed, and texts that are read aloud."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import av
import httpx
import pytest
from described_api import description_of
from router_chats import chat_body, expected

from deploy.testing import TINY_MODEL, FakeCluster, fake_cluster, spoken_samples
from fabric.contracts import EngineFailed
from router.edge import create_app
from router.router_config import SpeechSettings

SPEECH = SpeechSettings(("anna", "ben"), 24_000)
CHAT, SPEAK = "/v1/chat/completions", "/v1/audio/speech"
SPOKEN = {"modalities": ["text", "audio"]}
INPUT = "read me"


@asynccontextmanager
async def speaking_edge(settings: SpeechSettings = SPEECH) -> AsyncIterator[tuple[FakeCluster, httpx.AsyncClient]]:
    async with fake_cluster(speech=settings) as cluster:
        cluster.add_stage(1, "talker", is_last=False)
        cluster.add_stage(2, "code2wav", is_last=True)
        cluster.publish()
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            yield cluster, client


def events(body: str) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def speech(**fields: object) -> dict[str, object]:
    return {"model": TINY_MODEL, "input": INPUT} | fields


async def test_a_whole_answer_has_its_sound_and_the_transcript() -> None:
    async with speaking_edge() as (cluster, client):
        response = await client.post(CHAT, content=chat_body(**SPOKEN), headers={"content-type": "application/json"})
        body = response.json()
        message = body["choices"][0]["message"]
        assert message["content"] is None
        assert message["audio"]["transcript"] == expected(cluster)
        assert message["audio"]["id"].startswith("audio_")
        with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
            assert file.readframes(file.getnframes()) == spoken_samples()
        assert body["choices"][0]["finish_reason"] == "stop"
        description = await description_of(client)
        assert description.mismatches(body, {"$ref": "#/components/schemas/ChatCompletion"}) == []


async def test_a_stream_has_the_transcript_and_pcm16_and_ends_with_the_finish() -> None:
    async with speaking_edge() as (cluster, client):
        body = chat_body(**SPOKEN, stream=True, stream_options={"include_usage": True})
        response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        chunks = events(response.text)
        description = await description_of(client)
        schema = {"$ref": "#/components/schemas/ChatCompletionChunk"}
        assert [each for each in chunks if description.mismatches(each, schema)] == []
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        audio = [delta["audio"] for delta in deltas if "audio" in delta]
        assert "".join(each.get("transcript", "") for each in audio) == expected(cluster)
        assert b"".join(base64.b64decode(each.get("data", "")) for each in audio) == spoken_samples()
        assert len({each["id"] for each in audio}) == 1
        assert "expires_at" in audio[-1]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
        assert reasons == [*[None] * (len(reasons) - 1), "stop"]
        assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("form", "media_type"),
    [("mp3", "audio/mpeg"), ("opus", "audio/ogg"), ("flac", "audio/flac"), ("aac", "audio/aac"), ("wav", "audio/wav")],
)
async def test_a_text_is_read_aloud_as_a_file(form: str, media_type: str) -> None:
    async with speaking_edge() as (cluster, client):
        cluster.workers[0].script.reply = INPUT
        response = await client.post(SPEAK, json=speech(response_format=form))
        assert (response.status_code, response.headers["content-type"]) == (200, media_type)
        # So short an AAC stream does not say what it is.
        with av.open(io.BytesIO(response.content), format="aac" if form == "aac" else None) as container:
            assert sum(frame.samples for frame in container.decode(audio=0)) >= len(spoken_samples()) // 2
        (asked,) = cluster.workers[0].requests
        ids = cluster.codec.encode_inside(INPUT)
        assert asked.emitted == ((*ids, cluster.codec.eos_token_ids[0]),)


async def test_a_text_is_computed_for_a_talker_that_needs_all_rows() -> None:
    """The worker draws one token, in place of the one that ends the text."""
    settings = dataclasses.replace(SPEECH, talker_rows="talker", needs_all_rows=True)
    async with speaking_edge(settings) as (cluster, client):
        response = await client.post(SPEAK, json=speech(response_format="pcm"))
        assert response.content == spoken_samples()
        (asked,) = cluster.workers[0].requests
        ids = tuple(cluster.codec.encode_inside(INPUT))
        assert (asked.emitted, asked.stop.max_tokens) == ((ids,), len(ids) + 1)
        assert asked.side_names == ("talker",)


@pytest.mark.parametrize("form", ["pcm", "wav"])
async def test_a_text_is_read_aloud_as_a_stream_of_samples(form: str) -> None:
    async with speaking_edge() as (cluster, client):
        cluster.workers[0].script.reply = INPUT
        response = await client.post(SPEAK, json=speech(response_format=form, stream=True))
        assert response.headers["content-type"] == ("audio/pcm" if form == "pcm" else "audio/wav")
        assert response.content[0 if form == "pcm" else 44 :] == spoken_samples()


async def test_a_text_is_read_aloud_as_events() -> None:
    async with speaking_edge() as (cluster, client):
        cluster.workers[0].script.reply = INPUT
        response = await client.post(SPEAK, json=speech(response_format="pcm", stream_format="sse"))
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response.text)
        description = await description_of(client)
        schema = {"$ref": "#/components/schemas/SpeechEvent"}
        assert [each for each in chunks if description.mismatches(each, schema)] == []
        assert b"".join(base64.b64decode(str(each.get("audio", ""))) for each in chunks) == spoken_samples()
        assert chunks[-1]["type"] == "speech.audio.done"


async def test_a_stream_of_samples_that_fails_is_cut_and_not_ended() -> None:
    async with speaking_edge() as (cluster, _):
        cluster.workers[0].script.reply = INPUT
        talker = next(each for each in cluster.pools.stages.values() if each.stage.model_stage == "talker")
        talker.script.error, talker.script.die_at = EngineFailed("the step failed"), 5
        for each in cluster.pools.stages.values():
            each.script.pause_at = 3
        ended = await sent_messages(cluster, speech(response_format="pcm", stream=True))
        assert [message.get("more_body", False) for message in ended if message["type"] == "http.response.body"][-1]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"voice": "carla"}, "voice", "has anna, ben"),
        ({"speed": 1.5}, "speed", "at one speed"),
        ({"instructions": "whisper"}, "instructions", "not supported"),
        ({"response_format": "mp3", "stream": True}, "response_format", "`pcm` or `wav` only"),
        ({"input": ""}, "input", "at least 1"),
        ({"pitch": 2}, "pitch", "not supported"),
    ],
)
async def test_a_text_that_can_not_be_read_so_is_refused(fields: dict[str, object], param: str, message: str) -> None:
    async with speaking_edge() as (_, client):
        response = await client.post(SPEAK, json=speech(**fields))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert message in error["message"]


async def test_the_model_says_that_it_speaks() -> None:
    async with speaking_edge() as (_, client):
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["output_modalities"], model["voices"]) == (["text", "audio"], ["anna", "ben"])


async def sent_messages(cluster: FakeCluster, body: dict[str, object]) -> list[dict[str, object]]:
    """Sends a request by ASGI and returns the messages of its answer, however it ends."""
    sent: list[dict[str, object]] = []
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"host", b"weft")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": SPEAK}
    scope |= {"raw_path": SPEAK.encode(), "query_string": b"", "headers": headers, "scheme": "http"}
    scope |= {"client": ("127.0.0.1", 1), "server": ("weft", 80), "root_path": ""}
    received = iter([{"type": "http.request", "body": data, "more_body": False}])

    async def receive() -> dict[str, object]:
        for message in received:
            return message
        return await asyncio.Event().wait()  # type: ignore[return-value]  # The client stays and sends nothing more.

    async def send(message: dict[str, object]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and message.get("body"):
            for each in cluster.pools.stages.values():
                each.script.resume.set()

    await create_app(cluster.service)(scope, receive, send)
    return sent
