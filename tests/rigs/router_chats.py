"""Builds chat requests for tests of the router and reads their streams."""

from __future__ import annotations

import json

from chat_media import data_url, picture, png

from deploy.testing import TINY_MODEL, FakeCluster, reply_text
from router.api import ChatRequest, Usage, parse_chat
from router.run import RequestStream


def chat_body(content: object = "hello", **fields: object) -> bytes:
    body = {"model": TINY_MODEL, "messages": [{"role": "user", "content": content}], "seed": 7}
    return json.dumps(body | fields).encode()


def chat(content: object = "hello", **fields: object) -> ChatRequest:
    return parse_chat(chat_body(content, **fields))


def image(seed: int = 1, **size: int) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(png(picture(seed, **size)))}}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


async def read(stream: RequestStream) -> tuple[list[str], list[str | None], Usage]:
    """Returns texts and finish reasons per choice, and the usage. Raises the error that ended the request."""
    texts = [""] * len(stream.choices)
    reasons: list[str | None] = [None] * len(stream.choices)
    async for deltas in stream:
        for delta in deltas:
            texts[delta.choice] += delta.text
            reasons[delta.choice] = delta.finish_reason or reasons[delta.choice]
    assert stream.usage is not None
    return texts, reasons, stream.usage


def expected(cluster: FakeCluster, choice: int = 0) -> str:
    """Returns the answer of the fake workers to the last request."""
    requests = [request for worker in cluster.workers for request in worker.requests]
    request = max(requests, key=lambda each: (each.age, each.attempt))
    return reply_text(request.token_ids, request.sampling.seed, choice)
