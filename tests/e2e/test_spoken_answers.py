"""Tests that the demo model speaks, through a whole cluster in one process: the same text as without speech, the same
samples however they travel, and nothing left behind when clients leave."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import wave
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
import pytest_asyncio
from chat_media import data_url, picture, png

from deploy.local import LocalCluster
from deploy.testing import in_process_cluster, small_config

pytestmark = [pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]
MODEL = "weft-demo"
CHAT, SPEAK = "/v1/chat/completions", "/v1/audio/speech"
SPOKEN = {"modalities": ["text", "audio"]}
FRAME_SAMPLES, TRIMMED_SAMPLES = 1920, 555
NUM_ABORTS = 300


def spoken_config(**stages: object) -> object:
    return small_config(stages=stages, workers={"num_blocks": 512})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speaking() -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    async with in_process_cluster(spoken_config()) as started:
        yield started


def chat(content: object = "What can you do?", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, "seed": 3} | fields


async def said(client: httpx.AsyncClient, **fields: object) -> tuple[str, np.ndarray]:
    """Returns the transcript and the samples of a whole answer."""
    response = await client.post(CHAT, json=chat(**(SPOKEN | fields)), timeout=120)
    assert response.status_code == 200, response.text
    audio = response.json()["choices"][0]["message"]["audio"]
    return audio["transcript"], samples_of(base64.b64decode(audio["data"]))


def samples_of(file: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(file)) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (24_000, 1)
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2")


def pictured(seed: int = 5) -> list[dict[str, object]]:
    image = {"type": "image_url", "image_url": {"url": data_url(png(picture(seed)))}}
    return [image, {"type": "text", "text": "What colour is it?"}]


def held(cluster: LocalCluster) -> dict[str, int]:
    """Returns everything that requests hold anywhere in the cluster; all of it is 0 at rest."""
    found = {"router": cluster.router.admission.num_in_flight}
    found["worker"] = sum(service.report().engine.num_running for service in cluster.workers.services.values())
    for service in cluster.stages.services.values():
        report = service.report()
        found[f"{report.model_stage} pool"] = report.pool_used
        found[f"{report.model_stage} calls"] = service.num_held
    return found


async def at_rest(cluster: LocalCluster) -> None:
    async with asyncio.timeout(60):
        while any(held(cluster).values()):  # noqa: ASYNC110 - several parts come to rest, each by its own turn
            await asyncio.sleep(0.01)


async def test_speech_changes_no_word(speaking: tuple[LocalCluster, httpx.AsyncClient]) -> None:
    cluster, client = speaking
    text = (await client.post(CHAT, json=chat(), timeout=60)).json()["choices"][0]["message"]["content"]
    transcript, samples = await said(client)
    assert transcript == text
    assert (len(samples) + TRIMMED_SAMPLES) % FRAME_SAMPLES == 0
    assert len(samples) > 2 * 24_000
    assert np.abs(samples).max() > 1000
    await at_rest(cluster)


async def test_a_stream_has_the_same_samples_as_a_whole_answer(
    speaking: tuple[LocalCluster, httpx.AsyncClient],
) -> None:
    cluster, client = speaking
    transcript, whole = await said(client)
    text, pieces = "", b""
    async with client.stream("POST", CHAT, json=chat(stream=True, **SPOKEN), timeout=60) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                audio = json.loads(line[6:])["choices"][0]["delta"].get("audio", {})
                text += audio.get("transcript", "")
                pieces += base64.b64decode(audio.get("data", ""))
    assert text == transcript
    np.testing.assert_allclose(np.frombuffer(pieces, "<i2"), whole, atol=2)
    await at_rest(cluster)


async def test_a_given_text_sounds_like_the_same_answer(speaking: tuple[LocalCluster, httpx.AsyncClient]) -> None:
    """The frames of a text depend a little on the prompt before it, so only its length is compared."""
    _, client = speaking
    transcript, answered = await said(client, content="Hello")
    response = await client.post(
        SPEAK, json={"model": MODEL, "input": transcript, "response_format": "wav", "seed": 3}, timeout=60
    )
    assert len(samples_of(response.content)) == pytest.approx(len(answered), rel=0.3)


async def test_voices_differ(speaking: tuple[LocalCluster, httpx.AsyncClient]) -> None:
    _, client = speaking
    (model,) = (await client.get("/v1/models")).json()["data"]
    first, second = [(await said(client, audio={"voice": voice}))[1] for voice in model["voices"]]
    shorter = min(len(first), len(second))
    assert not np.allclose(first[:shorter], second[:shorter], atol=2)


async def test_a_prefix_hit_changes_no_sample_about_a_picture(
    speaking: tuple[LocalCluster, httpx.AsyncClient],
) -> None:
    """The second request finds the picture in the prefix cache, with the rows that the talker needs; a request for text
    alone before it leaves blocks without these rows."""
    cluster, client = speaking
    await client.post(CHAT, json=chat(pictured()), timeout=60)
    first = await said(client, content=pictured())
    (worker,) = cluster.workers.services.values()
    num_before = worker.report().engine.prefix_hit_tokens
    second = await said(client, content=pictured())
    assert worker.report().engine.prefix_hit_tokens > num_before
    assert second[0] == first[0]
    np.testing.assert_allclose(second[1], first[1], atol=2)


async def test_the_sequential_pipeline_has_the_same_samples(
    speaking: tuple[LocalCluster, httpx.AsyncClient],
) -> None:
    _, client = speaking
    transcript, samples = await said(client, content=pictured())
    async with in_process_cluster(spoken_config(async_chunk=False)) as (_, other):
        again = await said(other, content=pictured())
    assert again[0] == transcript
    np.testing.assert_allclose(again[1], samples, atol=2)


async def test_clients_that_leave_at_any_moment_leave_nothing(
    speaking: tuple[LocalCluster, httpx.AsyncClient],
) -> None:
    cluster, client = speaking
    rng = random.Random(1)

    async def leave(delay_s: float) -> None:
        body = chat(stream=True, **SPOKEN)
        task = asyncio.create_task(client.post(CHAT, json=body, timeout=60))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(NUM_ABORTS // 10):
        await asyncio.gather(*(leave(rng.uniform(0.0, 0.4)) for _ in range(10)))
    await at_rest(cluster)
    transcript, samples = await said(client)
    assert transcript
    assert len(samples)
