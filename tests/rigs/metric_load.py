"""Sends a small load of every kind to a cluster, one request after the other, and keeps what it did, so that tests can
compare the metrics of the cluster with it.

The cluster serves the demo model and is fresh: nothing of the load may be in a cache.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from deploy.demo.ask import messages
from deploy.demo.tasks.catalogue import TASKS

CHATS = "/v1/chat/completions"
MAX_TOKENS = 24
LONG_TEXT = "The same long text, which fills several blocks of the cache, comes in front of each of these. " * 4
MODALITY_TO_TASK = {"image": "colour", "video": "direction", "audio": "beeps"}
BROKEN_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 64}}
PREFIXES = {"image": "image", "video": "video", "input_audio": "audio", "audio": "audio"}


@dataclass
class MetricLoad:
    """A `MetricLoad` is what the load has done so far."""

    client: httpx.AsyncClient
    model: str
    exchanges: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Counts the exchanges by route and status."""
    codes: Counter[str] = field(default_factory=Counter)
    """Counts the requests of endpoints that generate by the code of their end."""
    classes: Counter[str] = field(default_factory=Counter)
    """Counts the answers by the modality class of their requests."""
    items: Counter[str] = field(default_factory=Counter)
    with_media: Counter[str] = field(default_factory=Counter)
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_choices: int = 0
    durations_s: float = 0.0
    """Sums the times of the exchanges that were answered 200, as the client saw them."""

    @property
    def num_answers(self) -> int:
        return self.codes["ok"]

    async def exchange(self, method: str, path: str, route: str, body: object = None) -> httpx.Response:
        answer = await self.client.request(method, path, json=body)
        self.exchanges[route, answer.status_code] += 1
        return answer

    async def chat(self, content: list[dict[str, Any]], **fields: object) -> None:
        """Asks for a chat and counts its answer."""
        body = {"model": self.model, "messages": content, "max_tokens": MAX_TOKENS, "temperature": 0} | fields
        began_s = asyncio.get_running_loop().time()
        answer = await self.exchange("POST", CHATS, CHATS, body)
        taken_s = asyncio.get_running_loop().time() - began_s
        if answer.status_code != 200:
            self.codes[answer.json()["error"]["code"]] += 1
            return
        self.durations_s += taken_s
        usage, modalities = answer.json()["usage"], modalities_of(content)
        self.codes["ok"] += 1
        self.items.update(modalities)
        self.with_media.update(set(modalities))
        self.classes[next((each for each in ("video", "audio", "image") if each in modalities), "text")] += 1
        self.num_prompt += usage["prompt_tokens"]
        self.num_generated += usage["completion_tokens"]
        self.num_cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.num_choices += int(fields.get("n", 1))


def modalities_of(content: list[dict[str, Any]]) -> list[str]:
    """Returns the modality of each medium of a conversation."""
    parts = [part for message in content if not isinstance(message["content"], str) for part in message["content"]]
    return [PREFIXES[part["type"].removesuffix("_url")] for part in parts if part["type"] != "text"]


def question(task: str, seed: int) -> list[dict[str, Any]]:
    """Returns the messages of a question of the demo model."""
    drawn = next(each for each in TASKS if each.name == task).draw(np.random.default_rng((0xC0DE, seed)), 0)
    return messages(drawn)


async def send_load(client: httpx.AsyncClient, model: str, load: MetricLoad | None = None) -> MetricLoad:
    """Sends the load and returns what it did. Every kind of media comes twice: the second time with the same text, so
    that the KV cache has it. One picture comes once more behind another text, so that its feature is used again. Then
    come several choices, texts at one time, and errors. A `load` goes on where an earlier one has ended."""
    load = load or MetricLoad(client, model)
    for number in range(3):
        await load.chat([{"role": "user", "content": f"{LONG_TEXT}{number}"}])
    for task in MODALITY_TO_TASK.values():
        for _ in range(2):
            await load.chat(question(task, 1))
    picture = question("colour", 1)
    await load.chat([{"role": "user", "content": LONG_TEXT}, {"role": "assistant", "content": "Yes."}, *picture])
    await load.chat(question("which picture", 2))
    await load.chat([{"role": "user", "content": "Count."}], n=2, temperature=1.0, seed=3)
    burst = [load.chat([{"role": "user", "content": f"Number {number}. {LONG_TEXT}"}]) for number in range(6)]
    await asyncio.gather(*burst)
    await load.chat([{"role": "user", "content": "Hello."}], model="another")
    await load.chat([{"role": "user", "content": "Hello."}], temperature=-1)
    await load.chat([{"role": "user", "content": [BROKEN_PICTURE, {"type": "text", "text": "What is it?"}]}])
    await load.exchange("GET", "/v1/models", "/v1/models")
    await load.exchange("GET", "/v1/models/another", "/v1/models/{model_id:path}")
    await load.exchange("GET", "/no/such/path", "other")
    return load
