"""Tests which thread reads what: media never keep other requests from being parsed, tokenised and planned."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping

import pytest
from router_chats import chat, expected, read, text
from router_media_fakes import MediaFamily, PlainPlugin, media_cluster, video

from fabric.contracts import ContextLengthExceeded, InvalidRequest, content_digest
from modalities.media import MediaLimits
from modalities.media import plugin as identify
from modalities.registry import Registry
from router.api import parse_chat
from router.prompt.prompt_builder import RequestThreads, Work

NUM_SLOW = 64
"""These are more videos than any executor has threads."""


class SlowVideos(PlainPlugin):
    """A `SlowVideos` parses a video only when the test lets it."""

    def __init__(self) -> None:
        super().__init__("video")
        self.may_end = threading.Event()

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        self.may_end.wait()
        return super().parse(part, param, limits)


async def test_others_are_read_while_media_fill_their_threads() -> None:
    registry, plugin = Registry(), SlowVideos()
    registry.register_modality(plugin)
    async with media_cluster(registry=registry) as cluster:
        slow = [asyncio.create_task(cluster.service.open(chat([video()]))) for _ in range(NUM_SLOW)]
        await asyncio.sleep(0)
        words = {"model": cluster.service.config.model_name, "messages": [{"role": "user", "content": "word " * 20}]}
        body = json.dumps(words | {"padding": "x" * 2**17, "guided_regex": "[a-z]+"}).encode()
        parsed = await cluster.service.parse(parse_chat, body)
        texts, _, _ = await read(await cluster.service.open(parsed))
        assert texts == [expected(cluster)]
        assert not any(task.done() for task in slow)
        plugin.may_end.set()
        for stream in await asyncio.gather(*slow):
            await read(stream)


async def test_each_kind_of_work_has_its_own_threads() -> None:
    threads, may_end = RequestThreads(), threading.Event()
    for filled in Work:
        may_end.clear()
        waiting = [asyncio.ensure_future(threads.run(filled, may_end.wait)) for _ in range(NUM_SLOW)]
        for other in set(Work) - {filled}:
            assert await threads.run(other, int, "7") == 7
        may_end.set()
        await asyncio.gather(*waiting)
    threads.close()


async def test_a_medium_is_hashed_once_however_often_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def hashed_again(data: bytes) -> bytes:
        raise AssertionError("its digest is known")

    monkeypatch.setattr(identify, "content_digest", hashed_again)
    async with media_cluster(MediaFamily(frame_text=" a long text before each frame ")) as cluster:
        await read(await cluster.service.open(chat([video(frames=900, seconds=30.0)])))
        (item,) = cluster.workers[0].requests[0].media
        (data,) = cluster.encoders[0].media
        family = cluster.service.family
        monkeypatch.undo()
        (wanted,) = (await cluster.service._prompt_builder.read(chat([video(frames=900, seconds=30.0)]))).media
        assert wanted.digest == content_digest(data)
        planned = identify.plan_media(
            family, data, wanted.header, 0, item.part, options=identify.MediaOptions.decode(item.options)
        )
        assert planned.item.mm_hash == item.mm_hash


async def test_a_text_that_fits_nowhere_is_refused_before_it_is_tokenised_whole() -> None:
    async with media_cluster(MediaFamily(max_model_len=100)) as cluster:
        codec = cluster.service._prompt_builder.codec
        seen: list[int] = []
        token_ids = codec._token_ids
        codec._token_ids = lambda piece, *terms: seen.append(len(piece)) or token_ids(piece, *terms)
        for num_chars in (1_000, 6_000, 1_000_000):
            with pytest.raises(ContextLengthExceeded, match="100 tokens"):
                await cluster.service.open(chat([text("x" * num_chars)]))
        assert sum(seen) <= 2 * 800, "of the first two a beginning, of the third nothing"
        with pytest.raises(ContextLengthExceeded, match="the prompt has 1"):
            await cluster.service.open(chat([text("x" * 120)]))


async def test_a_body_of_many_values_is_refused_before_it_is_parsed() -> None:
    async with media_cluster() as cluster:
        with pytest.raises(InvalidRequest, match="JSON values"):
            await cluster.service.parse(parse_chat, b'{"model":"m","messages":[' + b"{}," * 2**17 + b"{}]}")
