"""Fetches files that will be refused, which are not received to their end, and files of slow servers, which leave
places and memory to others; in the router's loop and through the process."""

from __future__ import annotations

import asyncio
import struct

import pytest
from local_fetches import CHUNKED, MEDIUM, Make, fetch, fetching, silent, until
from media_corpus import sound_file
from media_servers import AskedRequest, media_server, response
from modalities_files import encode, picture

from fabric.contracts import InvalidMedia
from modalities.family import ImageHeader
from modalities.media import MediaLimits
from router.fetch import FetchedFile, FetchProcess, LoopFetcher, MediaFetcher, WantedMedium

PATIENT = {"wait_s": 60.0, "read_timeout_s": 60.0}


@pytest.fixture(params=[LoopFetcher, FetchProcess])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


async def fetch_as(fetcher: MediaFetcher, modality: str, url: str) -> FetchedFile:
    return await fetcher.fetch(WantedMedium(url, modality=modality), lambda _: None)


async def test_the_header_of_an_ordinary_picture_comes_with_it(make: Make) -> None:
    picture_file = encode(picture(31, 17))
    pages = {"/a": response(picture_file, cache_control="max-age=600"), "/b": response(sound_file("wav-16"))}
    async with media_server(pages) as server, fetching(make, server) as fetcher:
        for is_cached in (False, True):
            found = await fetch_as(fetcher, "image", server.url("/a"))
            assert found[2:] == (is_cached, ImageHeader("PNG", 31, 17, "RGB"))
            assert found.data == picture_file
        assert (await fetch_as(fetcher, "audio", server.url("/b"))).header is None


HUGE_PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBBI", 13, b"IHDR", 60_000, 50_000, 8, 2, 0, 0, 0, 0)
LONG_WAV = b"RIFF\0\0\0\x60WAVEfmt " + struct.pack("<IHHIIHH4sI", 16, 1, 1, 8000, 16000, 2, 16, b"data", 0x60000000)
EARLY = {
    "pixels": ("image", HUGE_PNG, "the image has 60000x50000 pixels"),
    "seconds": ("audio", LONG_WAV, "the sound lasts 100663.3 s"),
    "a page": ("image", b"<html><body>sign in first</body></html>", "it seems to be an HTML page"),
    "a sound": ("video", LONG_WAV, "no video that can be decoded"),
}


@pytest.mark.parametrize("name", EARLY)
async def test_a_file_that_will_be_refused_is_not_received_to_its_end(make: Make, name: str) -> None:
    modality, first, words = EARLY[name]
    sent: list[int] = []

    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(first, content_length=str(200 * 2**20)))
        for _ in range(3200):
            writer.write(bytes(65536))
            sent.append(65536)
            await writer.drain()

    async with media_server({"/a": page, "/b": response(encode(picture(9, 9)))}) as server:
        limits = MediaLimits(max_audio_bytes=2**28)
        async with fetching(make, server, media_limits=limits) as fetcher:
            with pytest.raises(InvalidMedia, match=words):
                await fetch_as(fetcher, modality, server.url("/a"))
            await until(lambda: server.num_open == 0)
            assert sum(sent) < 100 * 2**20
            assert (await fetch_as(fetcher, "image", server.url("/b"))).header is not None


async def test_a_sound_may_have_as_many_bytes_as_sounds_may_have(make: Make) -> None:
    sound = sound_file("wav-16")
    limits = MediaLimits(max_audio_bytes=len(sound) - 1)
    pages = {"/sized": response(sound), "/chunked": CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(sound), sound)}
    async with media_server(pages) as server, fetching(make, server, media_limits=limits) as fetcher:
        for path in pages:
            with pytest.raises(InvalidMedia, match=f"more bytes than the limit of {len(sound) - 1}"):
                await fetch_as(fetcher, "audio", server.url(path))
            assert (await fetch(fetcher, server.url(path))).data == sound


async def test_a_cached_file_is_judged_as_what_it_is_wanted_for(make: Make) -> None:
    pages = {"/a": response(encode(picture(31, 17)), cache_control="max-age=600")}
    async with media_server(pages) as server, fetching(make, server) as fetcher:
        await fetch_as(fetcher, "image", server.url("/a"))
        for modality in ("video", "audio"):
            with pytest.raises(InvalidMedia, match="it seems to be a PNG image"):
                await fetch_as(fetcher, modality, server.url("/a"))
        assert (await fetch_as(fetcher, "image", server.url("/a"))).is_cached
        assert len(server.asked) == 1


# ------------------------------------------------------------ fair shares


@pytest.mark.parametrize("shared_by", ["hosts", "tenants"])
async def test_a_slow_server_leaves_places_to_others(make: Make, shared_by: str) -> None:
    """Fetches of which no server sends a byte hold their places; one of another host, or of another tenant, is served
    at once."""
    slow, other = (
        (WantedMedium("media.test"), WantedMedium("127.0.0.2"))
        if shared_by == "hosts"
        else (WantedMedium("media.test", tenant="a"), WantedMedium("media.test", tenant="b"))
    )
    pages = {f"/{number}": silent(b"") for number in range(8)} | {"/quick": response(MEDIUM)}
    async with media_server(pages) as server, fetching(make, server, max_concurrent=6, **PATIENT) as fetcher:
        stuck = [
            asyncio.create_task(fetcher.fetch(slow._replace(url=server.url(f"/{number}", slow.url)), lambda _: None))
            for number in range(8)
        ]
        most = 3 if shared_by == "hosts" else 2
        await until(lambda: len(server.asked) == most)
        quick = await fetcher.fetch(other._replace(url=server.url("/quick", other.url)), lambda _: None)
        assert quick.data == MEDIUM
        assert len(server.asked) == most + 1
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        await until(lambda: server.num_open <= 1)
        found = await asyncio.gather(*(fetch(fetcher, server.url("/quick"), str(number)) for number in range(8)))
        assert [each.data for each in found] == [MEDIUM] * 8


async def test_a_server_that_announces_much_leaves_memory_to_others(make: Make) -> None:
    announced = response(b"x", content_length=str(500))
    pages = {"/0": silent(announced), "/1": silent(announced), "/small": response(b"small")}
    async with (
        media_server(pages) as server,
        fetching(make, server, in_flight_bytes=1000, **PATIENT) as fetcher,
    ):
        stuck = [asyncio.create_task(fetch(fetcher, server.url(f"/{name}", "media.test"))) for name in range(2)]
        await until(lambda: len(server.asked) == 2)
        assert (await fetch(fetcher, server.url("/small"))).data == b"small"
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
