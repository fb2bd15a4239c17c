"""Tests that a whole Qwen2.5-Omni speaks through a cluster in one process: the samples are those that its stages make
of the hidden states of transformers, however the answer travels and whatever the prefix cache holds."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio
from chat_media import data_url, picture, png
from served_single_code import save_single_code, spoken_alone

from deploy.local import LocalCluster
from deploy.testing import in_process_cluster, small_config
from modalities.text import TextCodec

pytestmark = [pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]
MODEL, SEED, MAX_TOKENS = "tiny-omni", 3, 12
CHAT, SPEAK = "/v1/chat/completions", "/v1/audio/speech"
SPOKEN = {"modalities": ["text", "audio"]}
QUESTION = "What can you do, and what would you rather leave to others?"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(MODEL)
    save_single_code(directory)
    return directory


def spoken_config(checkpoint: Path, **stages: object) -> object:
    return small_config(
        model={"path": str(checkpoint), "name": MODEL},
        stages=stages,
        workers={"num_blocks": 256, "max_step_tokens": 16},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speaking(checkpoint: Path) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    async with in_process_cluster(spoken_config(checkpoint)) as started:
        yield started


def chat(content: object = QUESTION, **fields: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "seed": SEED,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    } | fields


async def said(client: httpx.AsyncClient, **fields: object) -> tuple[dict[str, object], np.ndarray]:
    """Returns a whole answer and its samples."""
    response = await client.post(CHAT, json=chat(**(SPOKEN | fields)))
    assert response.status_code == 200, response.text
    answer = response.json()
    audio = answer["choices"][0]["message"]["audio"]
    return answer, samples_of(base64.b64decode(audio["data"]))


def samples_of(file: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(file)) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (24_000, 1)
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2")


def assert_same(samples: np.ndarray, expected: np.ndarray) -> None:
    assert expected.std() > 30
    np.testing.assert_allclose(samples, expected, atol=2)


def hits(cluster: LocalCluster) -> int:
    (worker,) = cluster.workers.services.values()
    found: int = worker.report().engine.prefix_hit_tokens
    return found


def pictured() -> list[dict[str, object]]:
    image = {"type": "image_url", "image_url": {"url": data_url(png(picture(5)))}}
    return [image, {"type": "text", "text": "What colour is it?"}]


async def test_an_answer_sounds_like_its_stages_alone(
    speaking: tuple[LocalCluster, httpx.AsyncClient], checkpoint: Path
) -> None:
    """A request for text alone leaves blocks without rows; the first spoken answer does not use them, and the second
    one finds those of the first."""
    cluster, client = speaking
    plain = (await client.post(CHAT, json=chat())).json()
    before = hits(cluster)
    answer, samples = await said(client)
    assert hits(cluster) == before
    choice = answer["choices"][0]
    assert choice["token_ids"] == plain["choices"][0]["token_ids"]
    assert choice["message"]["audio"]["transcript"] == plain["choices"][0]["message"]["content"]
    expected = spoken_alone(checkpoint, answer["prompt_token_ids"], choice["token_ids"], voice="chelsie", seed=SEED)
    assert_same(samples, expected)
    _, again = await said(client)
    assert hits(cluster) > before
    assert_same(again, expected)


@pytest.mark.parametrize("content", [QUESTION, pictured()], ids=["text", "picture"])
async def test_streamed_whole_cached_and_sequential_answers_sound_the_same(
    speaking: tuple[LocalCluster, httpx.AsyncClient], checkpoint: Path, content: object
) -> None:
    cluster, client = speaking
    answer, whole = await said(client, content=content)
    before = hits(cluster)
    text, pieces = "", b""
    async with client.stream("POST", CHAT, json=chat(content, stream=True, **SPOKEN)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                audio = json.loads(line[6:])["choices"][0]["delta"].get("audio", {})
                text += audio.get("transcript", "")
                pieces += base64.b64decode(audio.get("data", ""))
    assert hits(cluster) > before
    assert text == answer["choices"][0]["message"]["audio"]["transcript"]
    assert_same(np.frombuffer(pieces, "<i2"), whole)
    async with in_process_cluster(spoken_config(checkpoint, async_chunk=False)) as (_, other):
        for _ in range(2):
            again, samples = await said(other, content=content)
            assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
            assert_same(samples, whole)


async def test_voices_differ(speaking: tuple[LocalCluster, httpx.AsyncClient]) -> None:
    _, client = speaking
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["voices"] == ["chelsie", "ethan"]
    first, second = [(await said(client, audio={"voice": voice}))[1] for voice in model["voices"]]
    shorter = min(len(first), len(second))
    assert not np.allclose(first[:shorter], second[:shorter], atol=2)


async def test_a_given_text_is_read_whole(speaking: tuple[LocalCluster, httpx.AsyncClient], checkpoint: Path) -> None:
    """The worker computes the text's rows, and draws one token behind it, which is not spoken."""
    _, client = speaking
    request = {"model": MODEL, "input": "Hello, this is a text.", "response_format": "wav", "seed": SEED}
    response = await client.post(SPEAK, json=request)
    assert response.status_code == 200, response.text
    codec = TextCodec.load(checkpoint)
    prompt_ids = codec.render([{"role": "user", "content": ""}])
    text_ids = [*codec.encode_inside(request["input"]), codec.eos_token_ids[0]]
    assert_same(
        samples_of(response.content), spoken_alone(checkpoint, prompt_ids, text_ids, voice="chelsie", seed=SEED)
    )
