"""Tests media that clients name, and media and texts that they send as files."""

from __future__ import annotations

import base64
import hashlib
import os
import tracemalloc
from typing import Any

import pytest
from chat_media import data_url, picture, png
from edge_client import served
from router_chats import chat_body, image, text
from router_media_fakes import MediaFamily, media_registry, video

from deploy.testing.tiny_family import tiny_codec
from router.prompt.named_media import NamedFile, NamedMedia, kept_bytes
from router.router_config import Tenant

CHAT = "/v1/chat/completions"


def named(seed: int, uuid: str) -> dict[str, object]:
    return {**image(seed), "uuid": uuid}


def alone(uuid: str) -> dict[str, object]:
    """Returns a part as a load client sends it after the first time: stripped of its content."""
    return {"type": "image_url", "image_url": {"url": ""}, "uuid": uuid}


async def test_a_name_stands_for_the_medium_that_was_sent_with_it() -> None:
    async with served() as (cluster, client):
        assert (await client.post(CHAT, content=chat_body([named(1, "cat"), text("?")]))).status_code == 200
        assert (await client.post(CHAT, content=chat_body([alone("cat"), text("?")]))).status_code == 200
        first, second = (request.media for request in cluster.workers[0].requests)
        assert first == second
        assert (await client.post(CHAT, content=chat_body([named(2, "cat"), text("?")]))).status_code == 200
        assert (await client.post(CHAT, content=chat_body([alone("cat"), text("?")]))).status_code == 200
        third, fourth = (request.media for request in cluster.workers[0].requests[2:])
        assert third == fourth != first


async def test_an_unknown_name_is_refused_and_so_is_that_of_another_salt() -> None:
    async with served() as (cluster, client):
        await client.post(CHAT, content=chat_body([named(1, "cat"), text("?")], cache_salt="mine"))
        for body in (chat_body([alone("cat"), text("?")]), chat_body([alone("dog"), text("?")], cache_salt="mine")):
            refused = await client.post(CHAT, content=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content.0")
            assert "names no medium that this router keeps" in refused.json()["error"]["message"]
        assert len(cluster.workers[0].requests) == 1


async def test_nothing_is_kept_without_room() -> None:
    async with served(named_media_bytes=0) as (_, client):
        assert (await client.post(CHAT, content=chat_body([named(1, "cat"), text("?")]))).status_code == 200
        assert (await client.post(CHAT, content=chat_body([alone("cat"), text("?")]))).status_code == 400


def named_file(data: bytes) -> NamedFile:
    return NamedFile(data, data, None)


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    empty = kept_bytes(("", "image", "a"), named_file(b""))
    media = NamedMedia(3 * empty + 10)
    for uuid in ("a", "b", "c"):
        media.keep("", "", "image", uuid, named_file(b"123"))
    assert media.find("", "image", "a") == named_file(b"123")
    media.keep("", "", "image", "d", named_file(b"12"))
    assert [media.find("", "image", uuid) is not None for uuid in ("a", "b", "c", "d")] == [True, False, True, True]
    assert media.num_bytes == 3 * empty + 8
    media.keep("", "", "image", "a", named_file(b"x" * (2 * empty + 11)))
    assert media.find("", "image", "a") is None
    assert media.num_bytes == 2 * empty + 5
    assert media.find("x", "image", "c") is None
    assert media.find("", "video", "c") is None


def test_small_files_count_what_they_take() -> None:
    """The files have 35 bytes and long names, so that a count of their bytes alone would be a small part of what they
    take."""
    media = NamedMedia(2**40)
    tracemalloc.start()
    try:
        for number in range(2000):
            media.keep("one", f"salt {number}", "image", f"\U0001f408{number:0255d}", named_file(os.urandom(35)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 * media.num_bytes < taken < media.num_bytes


async def test_one_tenant_can_not_push_out_the_media_of_another() -> None:
    def bearer(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    tenants = tuple(Tenant(name, (hashlib.sha256(name.encode()).hexdigest(),)) for name in ("shop", "greedy"))
    room = 4 * kept_bytes(("salt of a tenant", "image", "cat"), named_file(png(picture(1))))
    async with served(tenants=tenants, named_media_bytes=room) as (_, client):
        await client.post(CHAT, content=chat_body([named(1, "cat"), text("?")]), headers=bearer("shop"))
        for seed in range(20):
            body = chat_body([named(seed, f"cat-{seed}"), text("?")], cache_salt=str(seed))
            assert (await client.post(CHAT, content=body, headers=bearer("greedy"))).status_code == 200
        kept = await client.post(CHAT, content=chat_body([alone("cat"), text("?")]), headers=bearer("shop"))
        assert kept.status_code == 200


# ---------------------------------------------------------------- These tests cover files.


def file_part(**fields: object) -> dict[str, object]:
    return {"type": "file", "file": fields}


def as_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


async def test_a_file_with_a_picture_is_a_picture() -> None:
    async with served() as (cluster, client):
        url = data_url(png(picture(1)))
        payload = url.partition(",")[2]
        files = [
            file_part(file_data=url, filename="a.png"),
            file_part(file_data=payload, filename="a.png"),
            file_part(file_data=f"data:application/octet-stream;base64,{payload}", filename="a.PNG"),
        ]
        for file in (*files, image(1)):
            response = await client.post(CHAT, content=chat_body([file, text("?")]))
            assert response.status_code == 200, response.text
        hashes = {item.mm_hash for request in cluster.workers[0].requests for item in request.media}
        assert len(hashes) == 1


async def test_a_file_with_text_is_text() -> None:
    async with served() as (cluster, client):
        file: Any = file_part(file_data=as_url("text/plain", "grüß <|end|>".encode()), filename="a.txt")
        await client.post(CHAT, content=chat_body([file, text("?")]))
        (request,) = cluster.workers[0].requests
        assert "grüß <|end|>?" in cluster.codec.decode(request.token_ids)


async def test_a_name_stands_for_a_file_whose_kind_it_alone_tells() -> None:
    async with served() as (cluster, client):
        url = data_url(png(picture(1)))
        parts: list[dict[str, object]] = [
            {**file_part(file_data=url), "uuid": "f9"},
            {"type": "file", "uuid": "f9"},
            {**file_part(filename="a.png"), "uuid": "f9"},
            {**alone("f9")},
        ]
        for part in parts:
            response = await client.post(CHAT, content=chat_body([part, text("?")]))
            assert response.status_code == 200, response.text
        first, *others = (request.media for request in cluster.workers[0].requests)
        assert [other == first for other in others] == [True, True, True]
        refused = await client.post(CHAT, content=chat_body([{"type": "file", "uuid": "f8"}, text("?")]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.content.0")
        assert "names no medium that this router keeps" in refused.json()["error"]["message"]


async def test_a_file_with_a_name_of_several_media_is_refused() -> None:
    settings = {"model": (MediaFamily(), tiny_codec()), "registry": media_registry()}
    async with served(encoder_modalities=("image", "video"), **settings) as (_, client):
        for part in (image(1), video()):
            body = chat_body([{**part, "uuid": "f9"}, text("?")])
            assert (await client.post(CHAT, content=body)).status_code == 200
        refused = await client.post(CHAT, content=chat_body([{"type": "file", "uuid": "f9"}, text("?")]))
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "messages.0.content.0")
        assert "`image_url` or `video_url`" in error["message"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"file_id": "file-1"}, "keeps no files"),
        ({}, "needs its content"),
        ({"file_data": 7}, "needs its content"),
        ({"file_data": as_url("application/pdf", b"%PDF"), "filename": "a.pdf"}, "`file_data`|application/pdf"),
        ({"file_data": "AAAA"}, "octet-stream"),
        ({"file_data": as_url("text/plain", b"\xff")}, "UTF-8"),
        ({"file_data": "data:text/plain;base64," + "A" * 2**21}, "at most 262144 bytes"),
    ],
)
async def test_files_that_can_not_be_read_are_refused(file: dict[str, object], words: str) -> None:
    async with served() as (_, client):
        response = await client.post(CHAT, content=chat_body([{"type": "file", "file": file}, text("?")]))
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"].startswith("messages.0.content.0")
        assert any(word in error["message"] for word in words.split("|"))
