"""Fetches from servers that send much beside the file, or more than they were asked for; in the router's loop and
through the process. Each such fetch ends as an error of its request, and those of others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from local_fetches import CHUNKED, MEDIUM, Make, fetch, fetching, silent, until
from media_servers import Answer, AskedRequest, media_server, response, write_certificate

from fabric.contracts import InvalidMedia, MachineBusy, MediaUnreachable
from router.fetch import FetchProcess, LoopFetcher, WantedMedium, fair_turns

PATIENT = {"wait_s": 60.0, "read_timeout_s": 60.0, "total_timeout_s": 60.0}
FEW_BYTES = 2**24
"""A server may have sent this much before it notices that its client has left; most of it lies in sockets' buffers."""


@pytest.fixture(params=[LoopFetcher, FetchProcess])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def flood(first: bytes, then: bytes, sent: list[int] | None = None) -> Answer:
    """Returns a page that begins with some bytes and then repeats others without end; `sent` gets their lengths."""

    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        block = then * (1 + 50_000 // len(then))
        while True:
            writer.write(block)
            await writer.drain()
            await asyncio.sleep(0)  # A buffer that is never full does not let the client's leaving be noticed.
            if sent is not None:
                sent.append(len(block))

    return page


OK = b"HTTP/1.1 200 OK\r\n"
FLOODS: dict[str, tuple[bytes, bytes, str]] = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "interim answers without end"),
    "early hints": (b"", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n", "interim answers without end"),
    "headers": (OK, b"x: y\r\n", "head of more than"),
    "a line": (OK + b"x: ", b"y", "head of more than"),
    "tiny chunks": (CHUNKED, b"1\r\nx\r\n", "file in too many small pieces"),
    "tiny chunks behind a file": (CHUNKED + b"%x\r\n%b\r\n" % (len(MEDIUM), MEDIUM), b"1\r\nx\r\n", "small pieces"),
    "extensions of chunks": (CHUNKED, b"100;" + b"a" * 2000 + b"\r\n" + b"x" * 256 + b"\r\n", "little of the file"),
    "an extension": (CHUNKED + b"1;", b"a", "little of the file|malformed"),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"a: b\r\n", "little of the file|malformed"),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_an_answer_that_is_no_file_is_not_read_further(make: Make, name: str) -> None:
    first, then, words = FLOODS[name]
    sent: list[int] = []
    async with (
        media_server({"/a": flood(first, then, sent), "/b": response(MEDIUM)}) as server,
        fetching(make, server, **PATIENT) as fetcher,
    ):
        with pytest.raises(MediaUnreachable, match=words):
            await fetch(fetcher, server.url("/a"))
        await until(lambda: server.num_open == 0)
        assert sum(sent) < FEW_BYTES
        assert (await fetch(fetcher, server.url("/b"))).data == MEDIUM


async def test_tls_records_of_one_byte_are_not_read_further(make: Make, tmp_path: Path) -> None:
    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"", content_length="100000"))
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0)

    public, context = write_certificate(tmp_path)
    async with (
        media_server({"/a": page}, tls=context) as server,
        fetching(make, server, ca_file=public, **PATIENT) as fetcher,
    ):
        with pytest.raises(MediaUnreachable, match="small pieces"):
            await fetch(fetcher, server.url("/a", "media.test", "https"))


async def test_a_few_interim_answers_and_small_chunks_are_ordinary(make: Make) -> None:
    pages = {
        "/hints": 2 * b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + response(MEDIUM),
        "/chunks": CHUNKED + b"1\r\nx\r\n" * 100 + b"0\r\nx-sum: 1\r\n\r\n",
        "/medium": CHUNKED + b"".join(b"200;a=b\r\n%b\r\n" % bytes(512) for _ in range(3000)) + b"0\r\n\r\n",
    }
    async with media_server(pages) as server, fetching(make, server) as fetcher:
        assert (await fetch(fetcher, server.url("/hints"))).data == MEDIUM
        assert (await fetch(fetcher, server.url("/chunks"))).data == b"x" * 100
        assert len((await fetch(fetcher, server.url("/medium"))).data) == 3000 * 512


async def test_a_small_file_passes_by_large_ones_in_many_pieces(make: Make) -> None:
    """The pieces are as small as they may be, so that each fetch of the one tenant takes long; the other one's comes
    after them and is done before them."""
    pieces = b"200\r\n" + bytes(512) + b"\r\n"
    pages: dict[str, bytes | Answer] = {f"/{number}": flood(CHUNKED, pieces) for number in range(8)}
    pages["/small"] = response(MEDIUM)
    async with media_server(pages) as server, fetching(make, server, **PATIENT) as fetcher:
        large = [
            asyncio.create_task(fetcher.fetch(WantedMedium(server.url(f"/{number}"), tenant="a"), lambda _: None))
            for number in range(8)
        ]
        await until(lambda: len(server.asked) == 8)
        for number in range(5):
            wanted = WantedMedium(server.url("/small", "media.test"), salt=str(number), tenant="b")
            assert (await fetcher.fetch(wanted, lambda _: None)).data == MEDIUM
        assert not any(task.done() for task in large)
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)


async def test_too_much_processor_time_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fetch.url_fetcher.PROCESSOR_S", 0.0)
    monkeypatch.setattr("router.fetch.url_fetcher.PROCESSOR_S_PER_BYTE", 0.0)
    async with media_server({"/a": response(MEDIUM)}) as server, fetching(LoopFetcher, server) as fetcher:
        with pytest.raises(MediaUnreachable, match="processor time"):
            await fetch(fetcher, server.url("/a"))
        await until(lambda: server.num_open == 0)


# ------------------------------------------------------------ whose fault it was


async def cut_off(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(response(b"half", content_length="80000"))
    await writer.drain()
    writer.transport.abort()


LATE: dict[str, Answer] = {"/silent": silent(b""), "/half": silent(CHUNKED + b"1\r\nx\r\n"), "/cut": cut_off}


@pytest.mark.parametrize("path", LATE)
@pytest.mark.parametrize("limit", ["read_timeout_s", "total_timeout_s"])
async def test_a_fetch_that_others_kept_back_may_be_tried_again(
    path: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with media_server(LATE) as server, fetching(LoopFetcher, server, **{limit: 0.3}) as fetcher:
        with pytest.raises(MediaUnreachable) as caught:
            await fetch(fetcher, server.url(path))
        assert not caught.value.retryable
        monkeypatch.setattr(fair_turns, "BUSY_SHARE", -1.0)  # The others always took more than that.
        with pytest.raises(MachineBusy, match="busy with other media") as busy:
            await fetch(fetcher, server.url(path))
        assert busy.value.retryable
        assert busy.value.retry_after_s


async def test_what_is_wrong_with_an_answer_is_its_servers_fault_however_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_turns, "BUSY_SHARE", -1.0)
    pages = {"/404": response(b"", "404 No"), "/empty": response(b""), "/flood": flood(b"", b"HTTP/1.1 100 C\r\n\r\n")}
    async with media_server(pages) as server, fetching(LoopFetcher, server) as fetcher:
        for path in pages:
            with pytest.raises((MediaUnreachable, InvalidMedia)):
                await fetch(fetcher, server.url(path))


# ------------------------------------------------------------ answers that nothing asked for


def with_a_second_answer(is_late: bool) -> Answer:
    """Returns a page whose server sends another answer behind that of the page: at once, or when it is complete."""

    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(MEDIUM))
        if is_late:
            await writer.drain()
            await asyncio.sleep(0.05)  # This gives the client time to finish with the first answer.
        writer.write(response(b"smuggled", cache_control="max-age=600"))
        await writer.drain()

    return page


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
async def test_a_second_answer_reaches_no_other_request(make: Make, is_late: bool) -> None:
    async with media_server({"/a": with_a_second_answer(is_late)}) as server, fetching(make, server) as fetcher:
        for number in range(3):
            assert (await fetch(fetcher, server.url("/a"), f"one {number}")).data == MEDIUM
            for _ in range(2):
                with pytest.raises(MediaUnreachable, match="status 404"):
                    await fetch(fetcher, server.url("/victim"), "two")


async def test_a_connection_is_used_once(make: Make) -> None:
    pages = {"/a": response(MEDIUM), "/go": response(b"", "302 Found", location="/a")}
    async with media_server(pages) as server, fetching(make, server) as fetcher:
        assert (await fetch(fetcher, server.url("/go"))).data == MEDIUM
        assert (await fetch(fetcher, server.url("/a"), "other")).data == MEDIUM
        assert server.num_connections == len(server.asked) == 3
        assert all(asked.headers["connection"] == "close" for asked in server.asked)
        await until(lambda: server.num_open == 0)
