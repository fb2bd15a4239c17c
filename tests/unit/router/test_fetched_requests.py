"""Sends requests with URLs of media through the router's HTTP API: they are fetched, answered, traced and counted, and
refused with the part that is at fault."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from chat_media import picture, png
from router_chats import chat, chat_body, expected, image, text

from deploy.testing import FakeCluster, fake_cluster, settled
from fabric.contracts import InvalidMedia, ManualClock, MediaUnreachable, NoCapacity, WeftError, content_digest
from modalities.family import ImageHeader
from modalities.media import MediaLimits
from router.edge import create_app
from router.fetch import SHARED_TENANT, FetchedFile, FetchSettings, UrlPolicy, WantedMedium, parse_url
from router.router_config import Tenant

CHAT = "/v1/chat/completions"
PICTURE = png(picture(1))
CAT, DOG, GONE = "https://example.com/cat.png", "https://example.com/dog.png", "https://example.com/gone.png"


class HandFetcher:
    """Fetches what a test has given it: the bytes of a URL, or an error. A URL that it does not know is fetched for
    ever."""

    def __init__(self, url_to_file: Mapping[str, bytes | WeftError]) -> None:
        self.url_to_file = dict(url_to_file)
        self.asked: list[tuple[str, str, int]] = []
        self.wanted: list[WantedMedium] = []
        self.header: ImageHeader | None = None
        self.num_cancelled = 0
        self.is_closed = False

    async def start(self) -> None:
        return

    async def close(self) -> None:
        self.is_closed = True

    def check(self, url: str) -> None:
        UrlPolicy(FetchSettings()).check(parse_url(url))

    async def fetch(self, wanted: WantedMedium, take: Callable[[int], None]) -> FetchedFile:
        url = wanted.url
        self.wanted.append(wanted)
        self.asked.append((url, wanted.salt, wanted.request))
        try:
            await asyncio.sleep(0 if url in self.url_to_file else 3600)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        file = self.url_to_file[url]
        if isinstance(file, WeftError):
            raise file
        take(len(file))
        return FetchedFile(file, content_digest(file), url == DOG, self.header)


def by_url(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


@asynccontextmanager
async def served(
    url_to_file: Mapping[str, bytes | WeftError], **settings: object
) -> AsyncIterator[tuple[FakeCluster, httpx.AsyncClient, HandFetcher]]:
    fetcher = HandFetcher(url_to_file)
    async with fake_cluster(fetcher=fetcher, **settings) as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            yield cluster, client, fetcher
    assert fetcher.is_closed


async def answer(client: httpx.AsyncClient, *parts: object, **fields: object) -> httpx.Response:
    return await client.post(CHAT, content=chat_body([text("what is this?"), *parts], **fields))


def fetches(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [event["detail"] for event in record["events"] if event["name"] == "fetched"]


async def test_a_picture_by_url_is_the_same_medium_as_one_in_the_request() -> None:
    async with served({CAT: PICTURE}) as (cluster, client, fetcher):
        inside = await answer(client, image(1))
        found = await answer(client, by_url(CAT))
        assert (inside.status_code, found.status_code) == (200, 200)
        assert found.json()["choices"][0]["message"]["content"] == expected(cluster)
        first, second = cluster.workers[0].requests
        assert first.media == second.media
        assert first.token_ids == second.token_ids
        assert [url for url, _, _ in fetcher.asked] == [CAT]


async def test_the_url_may_be_a_plain_string_or_upper_case_data() -> None:
    async with served({CAT: PICTURE}) as (_, client, fetcher):
        plain = await answer(client, {"type": "image_url", "image_url": CAT})
        data = image(1)["image_url"]["url"].replace("data:", "DATA:")
        upper = await answer(client, by_url(data))
        assert (plain.status_code, upper.status_code) == (200, 200)
        assert len(fetcher.asked) == 1


async def test_the_media_of_a_request_are_fetched_at_once_for_its_tenant() -> None:
    files = {CAT: PICTURE, DOG: png(picture(2))}
    async with served(files) as (cluster, client, fetcher):
        found = await answer(client, by_url(CAT), image(3), by_url(DOG), cache_salt="mine")
        assert found.status_code == 200
        (one, two) = fetcher.asked
        assert one == (CAT, "0:/mine", two[2])
        assert two[:2] == (DOG, "0:/mine")
        assert [item.part for item in cluster.workers[0].requests[0].media] == [
            f"messages.0.content.{n}" for n in (1, 2, 3)
        ]
        assert (await answer(client, by_url(CAT))).status_code == 200
        assert fetcher.asked[2][1:] != one[1:]


async def test_a_fetch_is_a_stage_of_the_trace_and_of_the_metrics() -> None:
    async with served({CAT: PICTURE, DOG: png(picture(2))}) as (cluster, client, _):
        found = await answer(client, by_url(CAT), by_url(DOG))
        record = (await client.get(f"/weft/requests/{found.headers['x-request-id']}")).json()
        assert fetches(record) == [
            {"part": "messages.0.content.1", "num_bytes": len(PICTURE), "is_cached": False, "code": "ok"}
            | {"from_s": fetches(record)[0]["from_s"]},
            {"part": "messages.0.content.2", "num_bytes": len(png(picture(2))), "is_cached": True, "code": "ok"}
            | {"from_s": fetches(record)[1]["from_s"]},
        ]
        spans = [span for span in record["timeline"] if span["name"] == "fetched"]
        assert len(spans) == 2
        assert all(span["begin_s"] <= span["end_s"] for span in spans)
        first = record["first_token"]
        assert first["parts"]["fetched"] >= 0
        assert sum(first["parts"].values()) == pytest.approx(first["at_s"])
        assert CAT not in str(record)
        text_of = (await client.get("/metrics")).text
        assert f'weft_router_fetched_bytes_total{{outcome="ok"}} {float(len(PICTURE))}' in text_of
        assert 'weft_router_fetch_seconds_count{outcome="cached"} 1.0' in text_of
        assert cluster.service.admission.bodies_bytes == 0


REFUSED = [
    ("http://example.com/cat.png", 400, "url_refused", "scheme"),
    ("https://user@example.com/", 400, "url_refused", "user name"),
    ("https://example.com:22/", 400, "url_refused", "port"),
    ("https://127.1/", 400, "url_refused", "address"),
    ("file:///etc/passwd", 400, "url_refused", "scheme"),
    ("cat.png", 400, "url_refused", "absolute"),
]


@pytest.mark.parametrize(("url", "status", "code", "words"), REFUSED)
async def test_a_url_that_may_not_be_asked_ends_the_request_before_any_fetch(
    url: str, status: int, code: str, words: str
) -> None:
    async with served({CAT: PICTURE}) as (cluster, client, fetcher):
        found = await answer(client, by_url(CAT), by_url(url))
        error = found.json()["error"]
        assert (found.status_code, error["code"], error["param"]) == (status, code, "messages.0.content.2")
        assert error["message"].startswith("messages.0.content.2: the ")
        assert words in error["message"]
        assert fetcher.asked == []
        assert cluster.workers[0].requests == []


FAILED: list[tuple[WeftError | bytes, int, str, str | None]] = [
    (
        MediaUnreachable("the server of the URL answered with the status 404"),
        422,
        "media_unreachable",
        "messages.0.content.1",
    ),
    (InvalidMedia("the file behind the URL is empty"), 400, "invalid_media", "messages.0.content.1"),
    (NoCapacity("the process that fetches media has ended"), 503, "no_capacity", None),
    (b"<html>an error page</html>", 400, "invalid_media", "messages.0.content.1"),
]


@pytest.mark.parametrize(("file", "status", "code", "param"), FAILED)
async def test_a_failed_fetch_is_an_answer_that_names_the_part(
    file: WeftError | bytes, status: int, code: str, param: str | None
) -> None:
    async with served({GONE: file}) as (cluster, client, fetcher):
        found = await answer(client, by_url(GONE), by_url(CAT) if isinstance(file, WeftError) else text("?"))
        error = found.json()["error"]
        assert (found.status_code, error["code"], error["param"]) == (status, code, param)
        assert error["message"].startswith(param or "the process")
        assert fetcher.num_cancelled == isinstance(file, WeftError)
        record = (await client.get(f"/weft/requests/{found.headers['x-weft-request-id']}")).json()
        assert record["outcome"] == code
        assert [each["code"] for each in fetches(record)] == [code if isinstance(file, WeftError) else "ok"]
        assert cluster.service.admission.bodies_bytes == 0


async def test_fetched_bytes_count_among_the_bodies_in_flight() -> None:
    async with served({CAT: PICTURE + bytes(60_000)}, max_bodies_bytes=50_000) as (cluster, client, _):
        found = await answer(client, by_url(CAT))
        assert found.status_code == 429
        assert "the bodies in flight would have" in found.json()["error"]["message"]
        assert cluster.service.admission.bodies_bytes == 0


async def test_a_client_that_leaves_ends_its_fetches() -> None:
    async with served({}) as (cluster, _, fetcher):
        asking = asyncio.create_task(cluster.service.open(chat([by_url(CAT), by_url(DOG)])))
        await settled(lambda: len(fetcher.asked) == 2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert fetcher.num_cancelled == 2
        assert cluster.service.admission.num_in_flight == 0


async def test_the_deadline_counts_the_time_of_fetching() -> None:
    """A deadline for the first token counts from the arrival of the request, so it passes while a medium is fetched."""
    clock = ManualClock(100.0)

    async with served({CAT: PICTURE}, clock=clock) as (_, client, fetcher):
        fetch = fetcher.fetch

        async def slow(*arguments: object) -> FetchedFile:
            clock.advance(5.0)
            return await fetch(*arguments)

        fetcher.fetch = slow
        late = await answer(client, by_url(CAT), weft={"ttft_deadline_ms": 4000})
        assert (late.status_code, late.json()["error"]["code"]) == (429, "deadline_out_of_reach")


async def test_the_time_of_fetching_is_a_part_of_the_time_to_first_token() -> None:
    """Two fetches that run at once count once, and what else reading takes is another part."""
    clock = ManualClock(100.0)
    async with served({CAT: PICTURE, DOG: png(picture(2))}, clock=clock) as (_, client, fetcher):
        fetch = fetcher.fetch

        async def slow(wanted: WantedMedium, take: Callable[[int], None]) -> FetchedFile:
            file = await fetch(wanted, take)
            clock.advance(2.0)
            return file

        fetcher.fetch = slow
        found = await answer(client, by_url(CAT), by_url(DOG))
        assert found.status_code == 200
        record = (await client.get(f"/weft/requests/{found.headers['x-request-id']}")).json()
        first = record["first_token"]
        assert first["parts"]["fetched"] == pytest.approx(4.0)
        assert first["parts"]["read"] == pytest.approx(0.0)
        assert first["at_s"] == pytest.approx(sum(first["parts"].values()))
        assert first["at_s"] - first["actual_s"] == pytest.approx(4.0)
        spans = {span["begin_s"]: span["end_s"] for span in record["timeline"] if span["name"] == "fetched"}
        assert (min(spans), max(spans.values())) == (pytest.approx(0.0), pytest.approx(4.0))


async def test_a_fetch_says_what_the_medium_is_to_be_and_for_whom() -> None:
    async with served({CAT: PICTURE}) as (_, client, fetcher):
        assert (await answer(client, by_url(CAT))).status_code == 200
        assert fetcher.wanted[0][2:] == (1, "image", SHARED_TENANT)
    shop = Tenant("shop", (hashlib.sha256(b"sk-shop").hexdigest(),))
    async with served({CAT: PICTURE}, tenants=(shop,)) as (_, client, fetcher):
        client.headers["authorization"] = "Bearer sk-shop"
        assert (await answer(client, by_url(CAT))).status_code == 200
        assert fetcher.wanted[0][2:] == (1, "image", "shop")


async def test_a_header_that_came_with_the_file_is_not_read_again() -> None:
    """The bytes are no picture at all, so the request would be refused if the router looked at them."""
    async with served({CAT: b"not a picture"}) as (cluster, client, fetcher):
        assert (await answer(client, by_url(CAT))).status_code == 400
        fetcher.header = ImageHeader("PNG", 96, 96, "RGB")
        inside = await answer(client, image(1))
        assert (await answer(client, by_url(CAT))).status_code == inside.status_code == 200
        first, second = cluster.workers[0].requests
        assert first.media[0].grid == second.media[0].grid


async def test_a_file_that_is_too_large_for_its_modality_is_refused() -> None:
    """A fetcher has refused such a file before; the router relies on no fetcher for that."""
    limits = MediaLimits(max_bytes_per_item=len(PICTURE) - 1)
    async with served({CAT: PICTURE}, media_limits=limits) as (_, client, _):
        error = (await answer(client, by_url(CAT))).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_media", "messages.0.content.1")
        assert f"more than the limit of {len(PICTURE) - 1}" in error["message"]


async def test_without_a_fetcher_a_url_is_refused_plainly() -> None:
    async with fake_cluster() as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
            found = await answer(client, by_url(CAT))
            assert found.status_code == 400
            assert "only data: URLs are accepted" in found.json()["error"]["message"]
