"""Fetches media from real servers on this machine, over HTTP and HTTPS, in the router's loop and through the process:
both pass the same tests. Servers are slow, endless, wrong or gone; memory, places and connections are given back."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_fetches import CHUNKED, MEDIUM, Make, at_most, endless, fetch, fetching, silent, until
from media_servers import Answer, AskedRequest, media_server, response, write_certificate

from fabric.contracts import (
    InvalidMedia,
    MachineBusy,
    MediaUnreachable,
    NoCapacity,
    Overloaded,
    UrlRefused,
    content_digest,
)
from router.fetch import (
    FetchedFile,
    FetchProcess,
    LoopFetcher,
    WantedMedium,
    fetch_process,
)


@pytest.fixture(params=[LoopFetcher, FetchProcess])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


# ------------------------------------------------------------ what arrives


async def test_a_file_arrives_whole_with_its_digest(make: Make) -> None:
    taken: list[int] = []
    async with media_server({"/a": response(MEDIUM)}) as server, fetching(make, server) as fetcher:
        found = await fetcher.fetch(WantedMedium(server.url("/a", "media.test")), taken.append)
        assert found == FetchedFile(MEDIUM, content_digest(MEDIUM), False)
        assert taken == [len(MEDIUM)]


@pytest.mark.parametrize("num_bytes", [1, 4096, 65536, 2**20, 2**20 + 1, 5_000_001])
async def test_files_of_all_sizes_arrive(make: Make, num_bytes: int) -> None:
    medium = os.urandom(num_bytes)
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(piece), piece)
        for piece in (medium[at : at + 100_000] for at in range(0, num_bytes, 100_000))
    )
    pages = {"/sized": response(medium), "/chunked": CHUNKED + chunks + b"0\r\n\r\n"}
    async with media_server(pages) as server, fetching(make, server) as fetcher:
        assert (await fetch(fetcher, server.url("/sized"))).data == medium
        assert (await fetch(fetcher, server.url("/chunked"))).data == medium


async def test_https_is_checked_against_the_name_of_the_host(make: Make, tmp_path: Path) -> None:
    public, context = write_certificate(tmp_path)
    async with (
        media_server({"/a": response(MEDIUM)}, tls=context) as server,
        fetching(make, server, ca_file=public) as fetcher,
    ):
        assert (await fetch(fetcher, server.url("/a", "media.test", "https"))).data == MEDIUM
        with pytest.raises(MediaUnreachable, match="certificate"):
            await fetch(fetcher, server.url("/a", scheme="https"))
        async with fetching(make, server) as fetcher:
            with pytest.raises(MediaUnreachable, match="certificate"):
                await fetch(fetcher, server.url("/a", "media.test", "https"))


async def test_redirects_are_followed_up_to_the_limit(make: Make) -> None:
    pages = {f"/{left}": response(b"", "302 Found", location=f"/{left - 1}") for left in range(1, 5)}
    async with media_server(pages | {"/0": response(MEDIUM)}) as server, fetching(make, server) as fetcher:
        assert (await fetch(fetcher, server.url("/3"))).data == MEDIUM
        with pytest.raises(MediaUnreachable, match="more than 3 times"):
            await fetch(fetcher, server.url("/4"))


async def test_a_file_is_read_under_its_root_alone(make: Make, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "in/a b.png").write_bytes(MEDIUM)
    (root / "empty").touch()
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "inner").symlink_to(root / "in/a b.png")
    os.mkfifo(root / "pipe")
    async with (
        media_server() as server,
        fetching(make, server, schemes=("file",), file_root=root, media_limits=at_most(len(MEDIUM))) as fetcher,
    ):
        assert (await fetch(fetcher, f"file://{root}/in/a%20b.png")).data == MEDIUM
        assert (await fetch(fetcher, f"file://{root}/inner")).data == MEDIUM
        with pytest.raises(InvalidMedia, match="empty"):
            await fetch(fetcher, f"file://{root}/empty")
        messages = set()
        for path in ("link", "pipe", "in", "missing", "../secret", "in/%2e%2e/%2e%2e/secret", "in%00", "a" * 300, ""):
            with pytest.raises(UrlRefused) as caught:
                await fetch(fetcher, f"file://{root}/{path}")
            messages.add(caught.value.message)
        assert len(messages) == 1
        assert str(root) not in messages.pop()
        (root / "in/a b.png").write_bytes(MEDIUM + b"x")
        with pytest.raises(InvalidMedia, match=f"limit of {len(MEDIUM)}"):
            await fetch(fetcher, f"file://{root}/inner")


# ------------------------------------------------------------ what does not arrive


WRONG: dict[str, tuple[object, type[Exception], str]] = {
    "missing": (response(b"", "404 Not Found"), MediaUnreachable, "status 404"),
    "forbidden": (response(b"the secret reason", "403 Forbidden"), MediaUnreachable, "status 403"),
    "failed": (response(b"", "500 Oops"), MediaUnreachable, "status 500"),
    "partial": (response(MEDIUM, "206 Partial Content"), MediaUnreachable, "status 206"),
    "not modified": (response(b"", "304 Not Modified"), MediaUnreachable, "status 304"),
    "empty": (response(b""), InvalidMedia, "empty"),
    "nowhere": (response(b"", "302 Found"), MediaUnreachable, "nowhere"),
    "zipped": (response(gzip.compress(bytes(10**6)), content_encoding="gzip"), MediaUnreachable, "compressed"),
    "no http": (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", MediaUnreachable, "malformed"),
    "long header": (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 300_000, MediaUnreachable, "more than 32768 bytes"),
    "two lengths": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\nabcde",
        MediaUnreachable,
        "malf",
    ),
    "large": (response(b"x" * 2_000_001), InvalidMedia, "limit of 2000000"),
    "announced": (response(b"x", content_length="99999999999"), InvalidMedia, "limit of 2000000"),
    "endless": (endless(CHUNKED), InvalidMedia, "limit of 2000000"),
    "silent": (silent(b""), MediaUnreachable, "in time"),
    "half": (silent(response(b"half", content_length="8")), MediaUnreachable, "in time"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_answer_is_an_error_of_the_request(make: Make, name: str) -> None:
    page, error, words = WRONG[name]
    limits = {"media_limits": at_most(2_000_000), "read_timeout_s": 1.0}
    async with (
        media_server({"/a": page, "/b": response(MEDIUM)}) as server,
        fetching(make, server, **limits) as fetcher,
    ):
        with pytest.raises(error, match=words) as caught:
            await fetch(fetcher, server.url("/a"))
        assert "secret" not in str(caught.value)
        assert "127.0.0" not in str(caught.value)
        assert (await fetch(fetcher, server.url("/b"))).data == MEDIUM


async def test_an_answer_that_breaks_off_is_no_medium(make: Make) -> None:
    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"half", content_length="8"))
        writer.close()

    async with media_server({"/a": page}) as server, fetching(make, server) as fetcher:
        with pytest.raises(MediaUnreachable, match="cut off"):
            await fetch(fetcher, server.url("/a"))


async def test_nothing_listens(make: Make) -> None:
    async with media_server() as server:
        pass
    async with fetching(make, server) as fetcher:
        with pytest.raises(MediaUnreachable, match="no connection"):
            await fetch(fetcher, server.url("/a"))


async def test_a_name_that_is_resolved_for_ever_is_unreachable(make: Make) -> None:
    async with media_server() as server, fetching(make, server, connect_timeout_s=0.2) as fetcher:
        with pytest.raises(MediaUnreachable, match="in time"):
            await fetch(fetcher, server.url("/a", "hanging.test"))


async def test_the_second_address_is_tried_where_the_first_is_dead(make: Make) -> None:
    async with media_server({"/a": response(MEDIUM)}) as server, fetching(make, server) as fetcher:
        assert (await fetch(fetcher, server.url("/a", "two.test"))).data == MEDIUM


async def test_a_slow_body_ends_at_the_total_time(make: Make) -> None:
    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"", content_length="1000"))
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with media_server({"/a": page}) as server, fetching(make, server, total_timeout_s=0.4) as fetcher:
        with pytest.raises(MediaUnreachable, match=r"more than 0\.4 s"):
            await fetch(fetcher, server.url("/a"))
        await until(lambda: server.num_open == 0)


# ------------------------------------------------------------ the cache


async def test_a_fresh_file_is_not_asked_for_again_by_its_tenant(make: Make) -> None:
    async with (
        media_server({"/a": response(MEDIUM, cache_control="max-age=600")}) as server,
        fetching(make, server) as fetcher,
    ):
        assert not (await fetch(fetcher, server.url("/a"), "one")).is_cached
        assert await fetch(fetcher, server.url("/a"), "one") == (MEDIUM, content_digest(MEDIUM), True, None)
        assert len(server.asked) == 1
        assert not (await fetch(fetcher, server.url("/a"), "two")).is_cached
        assert len(server.asked) == 2


async def test_a_file_is_asked_for_with_its_validators(make: Make) -> None:
    async def page(request: AskedRequest, writer: asyncio.StreamWriter) -> None:
        is_same = request.headers.get("if-none-match") == '"v1"'
        writer.write(response(b"", "304 Not Modified") if is_same else response(MEDIUM, etag='"v1"'))

    async with media_server({"/a": page}) as server, fetching(make, server) as fetcher:
        assert not (await fetch(fetcher, server.url("/a"))).is_cached
        assert await fetch(fetcher, server.url("/a")) == (MEDIUM, content_digest(MEDIUM), True, None)
        assert "if-none-match" not in server.asked[0].headers
        assert server.asked[1].headers["if-none-match"] == '"v1"'
        server.pages["/a"] = response(b"new", etag='"v2"')
        assert await fetch(fetcher, server.url("/a")) == (b"new", content_digest(b"new"), False, None)


async def test_what_may_not_be_kept_is_fetched_again(make: Make) -> None:
    async with (
        media_server({"/a": response(MEDIUM, cache_control="no-store, max-age=60", etag='"v"')}) as server,
        fetching(make, server) as fetcher,
    ):
        for _ in range(2):
            assert not (await fetch(fetcher, server.url("/a"))).is_cached
        assert "if-none-match" not in server.asked[1].headers


# ------------------------------------------------------------ many at once


def gated(gate: asyncio.Event, body: bytes = MEDIUM) -> Answer:
    """Returns a page that answers when the gate is open."""

    async def page(_: AskedRequest, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.write(response(body))

    return page


async def test_requests_for_one_url_share_a_fetch_within_a_tenant(make: Make) -> None:
    gate = asyncio.Event()
    async with media_server({"/a": gated(gate)}) as server, fetching(make, server) as fetcher:
        tasks = [asyncio.create_task(fetch(fetcher, server.url("/a"), "one", number)) for number in range(5)]
        tasks.append(asyncio.create_task(fetch(fetcher, server.url("/a"), "two", 9)))
        await until(lambda: len(server.asked) == 2)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert [each.data for each in found[1:]] == [MEDIUM] * 5
        assert len(server.asked) == 2


async def test_cancelling_the_last_request_closes_the_connection(make: Make) -> None:
    async with (
        media_server({"/a": silent(response(b"h", content_length="8"))}) as server,
        fetching(make, server) as fetcher,
    ):
        tasks = [asyncio.create_task(fetch(fetcher, server.url("/a"), request=number)) for number in range(2)]
        await until(lambda: len(server.asked) == 1)
        tasks[0].cancel()
        await asyncio.sleep(0.1)
        assert server.num_open == 1
        tasks[1].cancel()
        await until(lambda: server.num_open == 0)
        assert server.num_connections == 1


async def test_the_media_of_a_request_share_what_it_may_fetch(make: Make) -> None:
    pages = {f"/{name}": response(bytes([name]) * 600) for name in range(3)}
    gate = asyncio.Event()
    pages["/shared"] = gated(gate, b"y" * 600)
    async with media_server(pages) as server, fetching(make, server, max_request_bytes=1000) as fetcher:
        shared = [asyncio.create_task(fetch(fetcher, server.url("/shared"), request=number)) for number in (1, 2)]
        await until(lambda: len(server.asked) == 1)
        assert len((await fetch(fetcher, server.url("/0"), request=1)).data) == 600
        gate.set()
        found = await asyncio.gather(*shared, return_exceptions=True)
        assert isinstance(found[0], InvalidMedia)
        assert "more than 1000 bytes together" in str(found[0])
        assert found[1].data == b"y" * 600
        assert len((await fetch(fetcher, server.url("/1"), request=1)).data) == 600


async def test_fetches_wait_for_places_and_for_memory(make: Make) -> None:
    gates = [asyncio.Event() for _ in range(2)]
    pages = {"/0": gated(gates[0], b"0" * 700), "/1": gated(gates[1], b"1" * 700), "/2": response(b"2" * 700)}
    async with media_server(pages) as server:
        limits = {"max_concurrent": 2, "in_flight_bytes": 1000, "wait_s": 20.0}
        async with fetching(make, server, **limits) as fetcher:
            hosts = ("127.0.0.2", "media.test", "127.0.0.2")
            urls = [server.url(f"/{name}", host) for name, host in enumerate(hosts)]
            tasks = [asyncio.create_task(fetch(fetcher, url, request=name)) for name, url in enumerate(urls)]
            await until(lambda: len(server.asked) == 2)
            await asyncio.sleep(0.05)
            assert len(server.asked) == 2
            gates[0].set()
            gates[1].set()
            assert [(await task).data for task in tasks] == [b"0" * 700, b"1" * 700, b"2" * 700]
            assert len(server.asked) == 3


async def test_a_fetch_without_a_place_in_time_is_overloaded(make: Make) -> None:
    gate = asyncio.Event()
    async with (
        media_server({"/0": gated(gate), "/1": response(b"1")}) as server,
        fetching(make, server, max_concurrent=1, wait_s=0.2) as fetcher,
    ):
        first = asyncio.create_task(fetch(fetcher, server.url("/0")))
        await until(lambda: len(server.asked) == 1)
        with pytest.raises(Overloaded, match="no place"):
            await fetch(fetcher, server.url("/1"))
        gate.set()
        assert (await first).data == MEDIUM


async def test_what_the_router_has_no_room_for_is_given_back(make: Make) -> None:
    def full(num_bytes: int) -> None:
        raise Overloaded(f"no room for {num_bytes}")

    async with (
        media_server({"/a": response(MEDIUM)}) as server,
        fetching(make, server, in_flight_bytes=len(MEDIUM), wait_s=5.0) as fetcher,
    ):
        for _ in range(3):
            with pytest.raises(Overloaded, match=f"no room for {len(MEDIUM)}"):
                await fetcher.fetch(WantedMedium(server.url("/a")), full)
        assert (await fetch(fetcher, server.url("/a"))).data == MEDIUM


async def test_the_loop_gives_all_memory_and_descriptors_back() -> None:
    pages = {"/a": response(MEDIUM, etag='"v"'), "/big": endless(CHUNKED), "/404": response(b"", "404 No")}
    async with media_server(pages) as server:
        before = len(os.listdir("/proc/self/fd"))
        async with fetching(LoopFetcher, server, media_limits=at_most(300_000)) as fetcher:
            for path in ("/a", "/a", "/big", "/404", "/a"):
                await asyncio.gather(fetch(fetcher, server.url(path)), return_exceptions=True)
            await until(lambda: fetcher.fetcher.num_fetches == 0)
            assert fetcher.fetcher.num_bytes == 0
        await until(lambda: len(os.listdir("/proc/self/fd")) == before)
        assert server.num_open == 0


# ------------------------------------------------------------ the process


async def test_a_dead_process_fails_its_fetches_and_is_replaced() -> None:
    async with (
        media_server({"/a": silent(b""), "/b": response(MEDIUM)}) as server,
        fetching(FetchProcess, server) as fetcher,
    ):
        first, pid = asyncio.create_task(fetch(fetcher, server.url("/a"))), fetcher.pid
        await until(lambda: len(server.asked) == 1)
        os.kill(pid, 9)
        with pytest.raises(NoCapacity, match="has ended"):
            await first
        assert (await fetch(fetcher, server.url("/b"))).data == MEDIUM
        assert fetcher.pid != pid
        assert fetcher.num_ended == 1


async def test_a_process_that_is_stuck_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_process, "GRACE_S", -29.7)  # The limits below and this leave 0.3 s.
    limits = {"wait_s": 5.0, "total_timeout_s": 20.0}
    async with media_server({"/a": response(MEDIUM)}) as server, fetching(FetchProcess, server, **limits) as fetcher:
        pid = fetcher.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(MachineBusy, match="does not get to its work"):
            await fetch(fetcher, server.url("/a"))
        monkeypatch.setattr(fetch_process, "GRACE_S", 10.0)
        assert (await fetch(fetcher, server.url("/a"))).data == MEDIUM
        assert fetcher.pid != pid


async def test_a_closed_process_is_gone_and_fetches_nothing() -> None:
    async with media_server({"/b": response(MEDIUM)}) as server:
        async with fetching(FetchProcess, server) as fetcher:
            pid = fetcher.pid
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(20):
                await fetch(fetcher, server.url("/b"))
            await until(lambda: len(os.listdir("/proc/self/fd")) == before)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(NoCapacity, match="stopped"):
            await fetch(fetcher, server.url("/b"))


ORPHAN_MAKER = """
import asyncio
from router.fetch import FetchProcess, FetchSettings

async def main() -> None:
    fetcher = FetchProcess(FetchSettings())
    await fetcher.start()
    print(fetcher.pid, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_process_dies_with_its_router(tmp_path: Path) -> None:
    script = tmp_path / "orphan_maker.py"
    script.write_text(ORPHAN_MAKER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}/stat").exists()
        parent.kill()
        parent.wait()
    deadline_s = time.monotonic() + 30
    while is_alive(child):
        assert time.monotonic() < deadline_s, "the process has outlived its router"
        os.sched_yield()


def is_alive(pid: int) -> bool:
    """Returns whether the process is alive and is not a zombie that nothing has reaped yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def test_a_certificate_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    async with media_server() as server:
        with pytest.raises(ssl.SSLError):
            async with fetching(LoopFetcher, server, ca_file=tmp_path / "ca.pem"):
                pass
        with pytest.raises(NoCapacity, match="died at its start"):
            async with fetching(FetchProcess, server, ca_file=tmp_path / "ca.pem"):
                pass
