"""Checks that a process without the cluster's keys can neither send into the message plane nor receive from it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from fabric.contracts import AbortAttempt, PlaneMessage, RequestId, encode_message
from fabric.transport import PlaneKeys, ZmqPlane

PATIENCE_MS = 30_000
KEYS, OTHERS = PlaneKeys.make(), PlaneKeys.make()
FORGED, TRUE = AbortAttempt(RequestId("forged"), 1), AbortAttempt(RequestId("true"), 1)
TURNED_AWAY = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.DISCONNECTED,
}


@pytest.fixture
def make_plane() -> Iterator[Callable[..., ZmqPlane]]:
    planes: list[ZmqPlane] = []

    def make(keys: PlaneKeys = KEYS) -> ZmqPlane:
        planes.append(ZmqPlane(keys))
        return planes[-1]

    yield make
    for plane in planes:
        plane.close()


@pytest.fixture
def make_socket() -> Iterator[Callable[[int], zmq.Socket[bytes]]]:
    """Makes sockets in a stranger's own context."""
    context, sockets = zmq.Context(), []

    def make(kind: int) -> zmq.Socket[bytes]:
        sockets.append(context.socket(kind))
        sockets[-1].setsockopt(zmq.LINGER, 0)
        return sockets[-1]

    yield make
    for each in sockets:
        monitor = each.get_monitor_socket()  # it is the same monitor again, if there was one
        each.disable_monitor()
        monitor.close()
        each.close()
    context.term()


def wait_turned_away(monitor: zmq.Socket[bytes]) -> None:
    """Waits until the peer has ended the handshake."""
    while True:
        assert monitor.poll(PATIENCE_MS), "nobody turned the stranger away"
        if recv_monitor_message(monitor)["event"] in TURNED_AWAY:
            return


class Inbox:
    """Collects messages as a handler and lets a test wait for one."""

    def __init__(self) -> None:
        self.messages: list[PlaneMessage] = []
        self._news = asyncio.Event()

    def __call__(self, message: PlaneMessage) -> None:
        self.messages.append(message)
        self._news.set()

    async def wait_for(self, message: PlaneMessage) -> None:
        async with asyncio.timeout(PATIENCE_MS / 1000):
            while message not in self.messages:
                self._news.clear()
                await self._news.wait()


async def arrived_before_a_member_s(plane: ZmqPlane, member: ZmqPlane) -> list[PlaneMessage]:
    """Returns everything that the plane delivers before the message of a true member."""
    inbox = Inbox()
    plane.start(inbox)
    member.send(plane.address, TRUE)
    await inbox.wait_for(TRUE)
    return inbox.messages[:-1]


STRANGERS = {
    "no keys": None,
    "another cluster's": OTHERS,
    "the receivers' public key alone": replace(OTHERS, receiver_public=KEYS.receiver_public),
    "both public keys": replace(KEYS, sender_secret=OTHERS.sender_secret),
}


@pytest.mark.parametrize("keys", STRANGERS.values(), ids=STRANGERS.keys())
async def test_nothing_of_a_stranger_comes_in(
    make_plane: Callable[..., ZmqPlane], make_socket: Callable[[int], zmq.Socket[bytes]], keys: PlaneKeys | None
) -> None:
    plane, member, stranger = make_plane(), make_plane(), make_socket(zmq.PUSH)
    if keys is not None:
        keys.secure_sender(stranger)
    monitor = stranger.get_monitor_socket()
    stranger.connect(plane.address)
    stranger.send(encode_message(FORGED))
    wait_turned_away(monitor)
    assert await arrived_before_a_member_s(plane, member) == []


async def test_the_keys_let_one_in(
    make_plane: Callable[..., ZmqPlane], make_socket: Callable[[int], zmq.Socket[bytes]]
) -> None:
    """The socket is the same as a stranger's but has the right keys: this shows that the keys cause what the other
    tests see."""
    plane, third, inbox = make_plane(), make_socket(zmq.PUSH), Inbox()
    KEYS.secure_sender(third)
    third.connect(plane.address)
    third.send(encode_message(FORGED))
    plane.start(inbox)
    await inbox.wait_for(FORGED)
    assert inbox.messages == [FORGED]


@pytest.mark.parametrize("keys", [None, OTHERS], ids=["no keys", "another cluster's"])
async def test_nothing_goes_out_to_a_stranger(
    make_plane: Callable[..., ZmqPlane], make_socket: Callable[[int], zmq.Socket[bytes]], keys: PlaneKeys | None
) -> None:
    """A member sends to an address where a stranger listens."""
    member, listener = make_plane(), make_socket(zmq.PULL)
    if keys is not None:
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.CURVE_SECRETKEY, keys.receiver_secret)
    monitor = listener.get_monitor_socket()
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    member.send(f"tcp://127.0.0.1:{port}", TRUE)
    wait_turned_away(monitor)
    assert listener.poll(100) == 0


async def test_nothing_can_be_read_on_the_way(make_plane: Callable[..., ZmqPlane]) -> None:
    """A relay between two members sees the whole conversation, but cannot read any of the message."""
    plane, member, inbox = make_plane(), make_plane(), Inbox()
    plane.start(inbox)
    place = urlsplit(plane.address)
    seen, conversations = bytearray(), []

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(4096):
            seen.extend(data)
            sink.write(data)
        sink.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversations.append(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection(place.hostname, place.port)
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        await asyncio.gather(writer.wait_closed(), far_writer.wait_closed(), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    secret = AbortAttempt(RequestId("a-telling-name"), 1)
    member.send(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", secret)
    await inbox.wait_for(secret)
    member.close()
    server.close()
    await asyncio.gather(*conversations, return_exceptions=True)
    assert inbox.messages == [secret]
    assert b"CURVE" in seen
    assert b"a-telling-name" not in seen


async def test_bytes_that_are_no_handshake_harm_nobody(make_plane: Callable[..., ZmqPlane]) -> None:
    plane, member = make_plane(), make_plane()
    place = urlsplit(plane.address)
    with socket.create_connection((place.hostname, place.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\x00" * 4096)
        assert await arrived_before_a_member_s(plane, member) == []
    assert plane.is_alive


def test_secrets_are_in_no_representation() -> None:
    text = repr(KEYS)
    assert KEYS.receiver_public.decode() in text
    assert KEYS.receiver_secret.decode() not in text
    assert KEYS.sender_secret.decode() not in text
