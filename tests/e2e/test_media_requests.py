"""Checks videos, sounds and the degradation policy through the whole cluster: the plan matches what the request asks
for, and the answer names what was taken away."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
from chat_media import data_url, image_part, user
from media_corpus import sound_file, video_file

from deploy.config import ClusterConfig
from deploy.local import LocalCluster
from deploy.testing import in_process_cluster
from modalities.family import EncoderInput, EncoderModel

pytestmark = pytest.mark.torch

VIDEO = {"type": "video_url", "video_url": {"url": data_url(video_file("mp4-h264-aac"), "video/mp4")}}
SOUND = {"type": "audio_url", "audio_url": {"url": data_url(sound_file("flac"), "audio/flac")}}


class TightEncoder:
    """Runs out of memory on pictures of more than `max_patches`, and blocks on sounds until the test lets it
    continue."""

    def __init__(self, model: EncoderModel) -> None:
        self.max_patches: int | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._model = model

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        for each in inputs:
            if each.modality == "image" and self.max_patches is not None and each.num_patches > self.max_patches:
                raise torch.OutOfMemoryError("tight")
            if each.modality == "audio":
                assert self.goes_on.wait(60)
        return self._model.encode(inputs)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[LocalCluster, TightEncoder, httpx.AsyncClient]]:
    config = ClusterConfig.model_validate(
        {
            "encoders": {"modalities": ["image", "video", "audio"], "decode_processes": 0},
            "workers": {"replicas": 1, "num_blocks": 512},
            "media": {"probe_processes": 0, "max_frames": 8, "encode_timeout_ms": {"audio": 500}},
        }
    )
    async with in_process_cluster(config) as (cluster, client):
        (encoder,) = cluster.encoders.services.values()
        tight = encoder._forward._model = TightEncoder(encoder._forward._model)
        encoder._forward._probe_inputs = ()  # it has less memory than any device that has started
        yield cluster, tight, client


async def ask(client: httpx.AsyncClient, *parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    body = {"model": "weft-demo", "messages": user(*parts), "max_tokens": 2, "temperature": 0} | fields
    response = await client.post("/v1/chat/completions", json=body)
    answer: dict[str, Any] = response.json()
    return answer


def tokens(answer: dict[str, Any], modality: str) -> int:
    return int(answer["usage"]["prompt_tokens_details"].get(f"{modality}_tokens", 0))


async def test_media_are_planned_as_asked_and_the_answer_names_what_was_reduced() -> None:
    async with serving() as (cluster, tight, client):
        heard = await ask(client, VIDEO, "What is it?")
        silent = await ask(client, VIDEO, "What is it?", mm_processor_kwargs={"use_audio_in_video": False})
        more = await ask(
            client, VIDEO, "What is it?", mm_processor_kwargs={"use_audio_in_video": False, "num_frames": 12}
        )
        assert tokens(heard, "audio") > 0 == tokens(silent, "audio")
        assert tokens(heard, "video") == tokens(silent, "video")
        assert tokens(more, "video") > tokens(silent, "video")
        trace = (await client.get(f"/weft/requests/{heard['id']}")).json()
        assert [e["detail"]["items"] for e in trace["events"] if "items" in e["detail"] and e["name"] == "dispatched"]

        whole = await ask(client, image_part(5, width=256, height=256), "?")
        tight.max_patches = 4 * tokens(whole, "image") - 1
        picture = image_part(6, width=256, height=256)
        error = (await ask(client, picture, "?"))["error"]
        assert (error["code"], error["param"]) == ("encode_failed", "messages.0.content.0")
        smaller = await ask(client, picture, "?", on_encode_failure="reduce")
        assert 0 < tokens(smaller, "image") < tokens(whole, "image")
        (told,) = smaller["weft"]["degraded"]
        assert (told["part"], told["action"], told["reason"]) == ("messages.0.content.0", "reduced", "encode_failed")
        assert "too little memory for a unit of" in told["message"]
        tight.max_patches = 0
        without = await ask(client, picture, "?", on_encode_failure="text_only", cache_salt="not cached")
        assert tokens(without, "image") == 0
        assert [step["action"] for step in without["weft"]["degraded"]] == ["removed"]

        tight.goes_on.clear()
        body = {"model": "weft-demo", "messages": user(SOUND, "?"), "on_encode_failure": "text_only"}
        late = await client.post("/v1/chat/completions", json=body)
        tight.goes_on.set()
        error = late.json()["error"]
        assert (late.status_code, int(late.headers["retry-after"]) >= 1) == (503, True)
        assert (error["code"], error["param"]) == ("machine_busy", "messages.0.content.0")
        assert tokens(await ask(client, SOUND, "?"), "audio") > 0, "it was well, and so was its encoder"
        (encoder,) = cluster.encoders.services.values()
        assert encoder.report().num_items_pending == 0
        encoder.check_invariants()
        assert "weft" not in await ask(client, VIDEO, image_part(1), "?")
