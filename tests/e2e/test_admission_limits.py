"""Checks admission on a real cluster in the process: more requests than the KV cache holds are all answered, what can
never fit or come in time costs no encoder anything, and keys find their tenants."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
from chat_media import image_part, user

from deploy.testing import in_process_cluster, small_config

pytestmark = pytest.mark.torch

NUM_BLOCKS, BLOCK_SIZE = 40, 16
KEYS = {"interactive": "sk-one", "batch": "sk-two"}
OPERATOR = "sk-operator"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


ACCESS = {"operator_key_digests": [digest(OPERATOR)]}


def text_of(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def metric(client: httpx.AsyncClient, name: str, *labels: str) -> float:
    """Returns the sum of the series of this name that have these labels."""
    lines = (await client.get("/metrics", headers={"authorization": f"Bearer {OPERATOR}"})).text.splitlines()
    rows = [line for line in lines if re.match(rf"{name}(_total)?[{{ ]", line)]
    return sum(float(line.rpartition(" ")[2]) for line in rows if all(label in line for label in labels))


async def test_more_than_the_kv_cache_holds_waits_at_the_router() -> None:
    tenants = {name: {"api_key_digests": [digest(key)], "service_class": name} for name, key in KEYS.items()}
    workers = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    config = small_config(workers=workers, encoders={"modalities": ["image"]}, tenants=tenants, access=ACCESS)
    async with in_process_cluster(config) as (cluster, client):

        async def ask(*parts: dict[str, Any] | str, key: str = KEYS["interactive"], **fields: object) -> httpx.Response:
            body = {"model": cluster.model.name, "messages": user(*parts), "temperature": 0, "max_tokens": 4} | fields
            return await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})

        assert (await ask("hello", key="sk-wrong")).status_code == 401
        long = "which colour is it? " * 400
        never = await ask(long, image_part(1))
        assert (never.status_code, never.json()["error"]["code"]) == (400, "context_length_exceeded")
        soon = await ask("What is it?", image_part(1), weft={"ttft_deadline_ms": 1})
        assert (soon.status_code, soon.json()["error"]["code"]) == (429, "deadline_out_of_reach")
        assert int(soon.headers["retry-after"]) >= 1
        assert await metric(client, "weft_encoder_items_received") == 0, "what is refused costs nothing"

        # Each of these takes over a third of the KV cache, so no more than two of them run at a time.
        words = "The picture follows. " * 45

        def question(number: int) -> Coroutine[Any, Any, httpx.Response]:
            key = KEYS["batch" if number % 2 else "interactive"]
            return ask(f"{number} {words}", image_part(number), key=key)

        answers = await asyncio.gather(*(question(number) for number in range(12)))
        assert [each.status_code for each in answers] == [200] * 12
        assert min(each.json()["usage"]["prompt_tokens"] for each in answers) > NUM_BLOCKS * BLOCK_SIZE / 3
        for number in (0, 5, 11):
            assert text_of(await question(number)) == text_of(answers[number])
        assert await metric(client, "weft_router_gate_wait_seconds_count") >= 6
        assert await metric(client, "weft_worker_preemptions") <= 3, "answers that grow may need a block more"
        for name in KEYS:
            assert await metric(client, "weft_router_admissions", f'tenant="{name}"', 'outcome="dispatched"') >= 6
            assert await metric(client, "weft_router_tenant_encoder_seconds", f'tenant="{name}"') >= 0
        assert await metric(client, "weft_router_prompt_tokens_in_flight") == 0
