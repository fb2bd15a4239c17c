"""Checks that an encoder that is slowed on purpose delays no other request, and that the text before the picture is
computed first."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from chat_media import image_part, user

from deploy.config import ClusterConfig
from deploy.testing import in_process_cluster

pytestmark = pytest.mark.torch


async def test_slow_encoder_delays_only_what_needs_it() -> None:
    config = ClusterConfig.model_validate(
        {
            "encoders": {"decode_processes": 0, "encode_delay_s": 1.5, "modalities": ["image"]},
            "workers": {"replicas": 1, "num_blocks": 256, "max_step_tokens": 64},
        }
    )
    order: list[str] = []
    async with in_process_cluster(config) as (_, client):

        async def ask(label: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": "weft-demo", "messages": messages, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            order.append(label)
            answer: dict[str, Any] = response.json()
            return answer

        prefix = "Before you look at the picture, read these words with care. " * 2
        picture = asyncio.create_task(ask("picture", user(prefix, image_part(81))))
        async with asyncio.timeout(60):
            while not _at_doorstep(await client.get("/metrics")):  # noqa: ASYNC110 -- it is HTTP that is polled
                await asyncio.sleep(0.01)  # the cluster's threads run in this process and need the interpreter too
        await ask("text", user("Hello"))
        answer = await picture
        trace = (await client.get(f"/weft/requests/{answer['id']}")).json()

    assert order == ["text", "picture"]
    names = [event["name"] for event in trace["events"]]
    prefills = [event for event in trace["events"] if event["name"] == "prefill"]
    landed = next(event for event in trace["events"] if event["name"] == "unit_landed")
    assert names.index("prefill") < names.index("unit_landed")
    in_front = [event for event in prefills if event["at_s"] <= landed["at_s"]]
    assert in_front, names
    assert max(event["detail"]["end"] for event in in_front) > 16
    assert all(event["detail"]["end"] < answer["usage"]["prompt_tokens"] for event in in_front)


def _at_doorstep(response: httpx.Response) -> bool:
    return any(
        line.startswith("weft_worker_num_waiting_for_features{") and float(line.rsplit(" ", 1)[1]) > 0
        for line in response.text.splitlines()
    )
