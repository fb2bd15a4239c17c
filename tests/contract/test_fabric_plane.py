"""Runs one suite for every message plane: inside a process and over ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from fabric.contracts import (
    AbortAttempt,
    ConfigError,
    MemberId,
    PlaneMessage,
    RequestId,
    RouterHeartbeat,
    TokenFrame,
    TokenFrames,
    decode_bundle,
    encode_bundle,
    encode_message,
)
from fabric.transport import LocalHub, LocalPlane, Plane, PlaneKeys, ZmqPlane

PATIENCE_S = 30.0
QUEUE = 64
"""The planes of this suite queue this many messages, or a multiple of it, for each peer; sockets have queues of their
own."""
MORE_THAN_ANY_QUEUE = 20_000
KEYS = PlaneKeys.make()


def message(number: int, request: str = "r") -> AbortAttempt:
    return AbortAttempt(RequestId(request), number)


class Inbox:
    """Collects messages as a handler and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.messages: list[PlaneMessage] = []
        self.threads: set[int] = set()
        self._changed = asyncio.Event()

    def __call__(self, arrived: PlaneMessage) -> None:
        self.messages.append(arrived)
        self.threads.add(threading.get_ident())
        self._changed.set()

    async def wait_for(self, count: int) -> list[PlaneMessage]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.messages) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.messages


@pytest.fixture(params=["local", "zmq"])
def make_plane(request: pytest.FixtureRequest) -> Iterator[Callable[..., Plane]]:
    """Makes endpoints that reach each other, and closes all of them at the end."""
    hub, numbers, planes = LocalHub(max_messages=QUEUE * 20), itertools.count(), []

    def make() -> Plane:
        if request.param == "local":
            planes.append(LocalPlane(hub, f"local-{next(numbers)}"))
        else:
            planes.append(ZmqPlane(KEYS, max_queued_messages=QUEUE * 20))
        return planes[-1]

    yield make
    for plane in planes:
        plane.close()


async def test_messages_of_a_pair_arrive_in_order_and_whole(make_plane: Callable[..., Plane]) -> None:
    sender, receiver, inbox = make_plane(), make_plane(), Inbox()
    receiver.start(inbox)
    sent = [
        TokenFrames(MemberId("w"), (TokenFrame(RequestId("r"), 1, 0, number, (number, -1), None),))
        for number in range(500)
    ]
    assert all(sender.send(receiver.address, each) for each in sent)
    assert await inbox.wait_for(500) == sent


async def test_what_arrived_before_the_start_is_kept_and_comes_first(make_plane: Callable[..., Plane]) -> None:
    sender, receiver, inbox = make_plane(), make_plane(), Inbox()
    for number in range(20):
        assert sender.send(receiver.address, message(number))
    assert inbox.messages == []
    receiver.start(inbox)
    for number in range(20, 40):
        assert sender.send(receiver.address, message(number))
    assert await inbox.wait_for(40) == [message(number) for number in range(40)]


async def test_the_handler_runs_in_the_loop_that_started_it(make_plane: Callable[..., Plane]) -> None:
    sender, receiver, inbox = make_plane(), make_plane(), Inbox()
    receiver.start(inbox)
    await asyncio.to_thread(sender.send, receiver.address, message(1))
    await inbox.wait_for(1)
    assert inbox.threads == {threading.get_ident()}


async def test_two_endpoints_talk_both_ways_and_to_themselves(make_plane: Callable[..., Plane]) -> None:
    left, right, left_inbox, right_inbox = make_plane(), make_plane(), Inbox(), Inbox()
    left.start(left_inbox)
    right.start(right_inbox)
    left.send(right.address, message(1))
    assert await right_inbox.wait_for(1) == [message(1)]
    right.send(left.address, message(2))
    assert await left_inbox.wait_for(1) == [message(2)]
    left.send(left.address, message(3))
    assert await left_inbox.wait_for(2) == [message(2), message(3)]


async def test_senders_do_not_mix_up_their_receivers(make_plane: Callable[..., Plane]) -> None:
    sender, receivers = make_plane(), [make_plane() for _ in range(3)]
    inboxes = [Inbox() for _ in receivers]
    for receiver, inbox in zip(receivers, inboxes, strict=True):
        receiver.start(inbox)
    for number in range(90):
        sender.send(receivers[number % 3].address, message(number))
    for index, inbox in enumerate(inboxes):
        assert await inbox.wait_for(30) == [message(number) for number in range(index, 90, 3)]


async def test_send_is_safe_from_many_threads_and_keeps_each_ones_order(make_plane: Callable[..., Plane]) -> None:
    sender, receiver, inbox = make_plane(), make_plane(), Inbox()
    receiver.start(inbox)

    def burst(name: str) -> bool:
        return all(sender.send(receiver.address, message(number, name)) for number in range(100))

    assert all(await asyncio.gather(*[asyncio.to_thread(burst, f"t{index}") for index in range(8)]))
    await inbox.wait_for(800)
    for index in range(8):
        numbers = [each.attempt for each in inbox.messages if each.request_id == f"t{index}"]
        assert numbers == list(range(100))
    assert sender.num_dropped == 0


async def test_an_exception_of_the_handler_is_logged_and_does_not_stop_delivery(
    make_plane: Callable[..., Plane], caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver, inbox = make_plane(), make_plane(), Inbox()

    def fragile(arrived: PlaneMessage) -> None:
        inbox(arrived)
        if arrived == message(1):
            raise RuntimeError("could not digest it")

    receiver.start(fragile)
    for number in range(3):
        sender.send(receiver.address, message(number))
    assert await inbox.wait_for(3) == [message(0), message(1), message(2)]
    assert "could not digest it" in caplog.text


async def test_a_dead_peer_fills_its_own_queue_and_nobody_elses(make_plane: Callable[..., Plane]) -> None:
    sender, dead, alive, inbox = make_plane(), make_plane(), make_plane(), Inbox()
    alive.start(inbox)
    dead.close()
    taken = sum(1 for _ in itertools.takewhile(bool, (sender.send(dead.address, message(n)) for n in range(20_000))))
    assert QUEUE <= taken < MORE_THAN_ANY_QUEUE
    assert sender.num_dropped == 1
    assert sender.send(dead.address, message(0)) is False
    assert sender.num_dropped == 2
    assert sender.send(alive.address, message(7)) is True
    assert await inbox.wait_for(1) == [message(7)]


async def test_forgetting_a_peer_drops_what_waits_for_it(make_plane: Callable[..., Plane]) -> None:
    sender, dead = make_plane(), make_plane()
    dead.close()
    while sender.send(dead.address, message(0)):
        pass
    sender.forget(dead.address)
    assert sender.send(dead.address, message(1)) is True
    sender.forget(dead.address)
    sender.forget("tcp://127.0.0.1:9")


async def test_a_forgotten_peer_can_be_written_to_again(make_plane: Callable[..., Plane]) -> None:
    sender, receiver, inbox = make_plane(), make_plane(), Inbox()
    receiver.start(inbox)
    sender.send(receiver.address, message(1))
    await inbox.wait_for(1)
    sender.forget(receiver.address)
    sender.send(receiver.address, message(2))
    assert await inbox.wait_for(2) == [message(1), message(2)]


async def test_a_closed_endpoint_refuses_and_counts(make_plane: Callable[..., Plane]) -> None:
    sender, receiver = make_plane(), make_plane()
    assert sender.is_alive
    sender.close()
    assert not sender.is_alive
    assert sender.send(receiver.address, message(1)) is False
    assert sender.num_dropped == 1
    sender.forget(receiver.address)
    sender.close()


async def test_nothing_is_delivered_after_close(make_plane: Callable[..., Plane]) -> None:
    sender, receiver, inbox = make_plane(), make_plane(), Inbox()
    receiver.start(inbox)
    sender.send(receiver.address, message(1))
    await inbox.wait_for(1)
    sender.send(receiver.address, message(2))
    receiver.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert inbox.messages in ([message(1)], [message(1), message(2)])
    count = len(inbox.messages)
    sender.send(receiver.address, message(3))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(inbox.messages) == count


async def test_starting_twice_is_refused(make_plane: Callable[..., Plane]) -> None:
    plane = make_plane()
    plane.start(Inbox())
    with pytest.raises(RuntimeError, match="already begun"):
        plane.start(Inbox())


async def test_what_can_not_be_sent_fails_at_the_sender(make_plane: Callable[..., Plane]) -> None:
    sender, receiver, inbox = make_plane(), make_plane(), Inbox()
    receiver.start(inbox)
    with pytest.raises(TypeError):
        sender.send(receiver.address, AbortAttempt(RequestId("r"), object()))
    assert sender.send(receiver.address, message(1))
    assert await inbox.wait_for(1) == [message(1)]


# ---------------------------------------------------------------- tests of one plane only


@pytest.fixture
def zmq_planes() -> Iterator[Callable[..., ZmqPlane]]:
    planes: list[ZmqPlane] = []

    def make(**options: int) -> ZmqPlane:
        planes.append(ZmqPlane(KEYS, **options))
        return planes[-1]

    yield make
    for plane in planes:
        plane.close()


async def test_zmq_binds_the_loopback_unless_told_otherwise(zmq_planes: Callable[..., ZmqPlane]) -> None:
    assert zmq_planes().address.startswith("tcp://127.0.0.1:")
    with pytest.raises(ConfigError, match="can't bind"):
        ZmqPlane(KEYS, bind_host="198.51.100.7")


async def test_zmq_counts_and_drops_what_is_no_message(zmq_planes: Callable[..., ZmqPlane]) -> None:
    receiver, inbox = zmq_planes(), Inbox()
    receiver.start(inbox)
    with zmq.Context() as context, context.socket(zmq.PUSH) as member:
        KEYS.secure_sender(member)
        member.connect(receiver.address)
        member.send(b"\x80\x04 not for you")
        member.send(msgspec.msgpack.encode(["AbortAttempt", "r", "one"]))
        member.send(msgspec.msgpack.encode(["AbortAttempt", "r", 1]))
        assert await inbox.wait_for(1) == [message(1)]
    assert receiver.num_malformed == 2


@contextlib.contextmanager
def bound_later(port: int) -> Iterator[zmq.Socket[bytes]]:
    """Binds a receiver of raw data to a port."""
    with zmq.Context() as context, context.socket(zmq.REP) as zap, context.socket(zmq.PULL) as pull:
        zap.bind("inproc://zeromq.zap.01")
        KEYS.secure_receiver(pull)
        pull.bind(f"tcp://127.0.0.1:{port}")
        assert zap.poll(int(PATIENCE_S * 1e3))
        zap.send_multipart(KEYS.zap_reply(zap.recv_multipart()))
        yield pull


async def test_zmq_sends_together_what_waits_for_one_peer(zmq_planes: Callable[..., ZmqPlane]) -> None:
    sender = zmq_planes()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sent = [message(number) for number in range(100)]
    large = AbortAttempt(RequestId("r" * 100_000), 1)
    for each in (*sent, large, message(100)):
        sender.send(f"tcp://127.0.0.1:{port}", each)
    with bound_later(port) as pull:
        arrived = []
        while sum(map(len, arrived)) < 102:
            assert pull.poll(int(PATIENCE_S * 1e3))
            arrived.append(decode_bundle(pull.recv()))
    assert [item for bundle in arrived for item in bundle] == [*sent, large, message(100)]
    assert [len(bundle) for bundle in arrived] == [64, 36, 1, 1], "a large message travels alone"


async def test_zmq_delivers_what_travelled_together_one_by_one(zmq_planes: Callable[..., ZmqPlane]) -> None:
    receiver, inbox = zmq_planes(), Inbox()
    receiver.start(inbox)
    bundle = encode_bundle([encode_message(message(number)) for number in range(3)])
    with zmq.Context() as context, context.socket(zmq.PUSH) as member:
        KEYS.secure_sender(member)
        member.connect(receiver.address)
        member.send(bundle[:-1])
        member.send(bundle)
        assert await inbox.wait_for(3) == [message(0), message(1), message(2)]
    assert receiver.num_malformed == 1


async def test_zmq_closed_from_its_loop_or_from_a_thread_keeps_no_file() -> None:
    async def open_and_close(is_in_thread: bool) -> None:
        plane, inbox = ZmqPlane(KEYS), Inbox()
        plane.start(inbox)
        plane.send(plane.address, message(1))
        await inbox.wait_for(1)
        await (asyncio.to_thread(plane.close) if is_in_thread else asyncio.sleep(0, plane.close()))
        await asyncio.sleep(0)

    await open_and_close(True)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(4):
        await open_and_close(number % 2 == 0)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_zmq_handler_sees_nothing_of_the_task_that_started_it(zmq_planes: Callable[..., ZmqPlane]) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")
    variable.set("of the task")
    plane, seen, has_come = zmq_planes(), [], asyncio.Event()

    def handle(_: PlaneMessage) -> None:
        seen.append(variable.get())
        has_come.set()

    plane.start(handle)
    plane.send(plane.address, message(1))
    async with asyncio.timeout(PATIENCE_S):
        await has_come.wait()
    assert seen == ["nothing"]


async def test_zmq_survives_an_address_that_is_none(zmq_planes: Callable[..., ZmqPlane]) -> None:
    sender, receiver, inbox = zmq_planes(), zmq_planes(), Inbox()
    receiver.start(inbox)
    sender.send("no address at all", message(1))
    sender.send(receiver.address, message(2))
    assert await inbox.wait_for(1) == [message(2)]
    assert sender.num_dropped == 1


async def test_zmq_serves_more_peers_than_zeromq_has_sockets_by_default(
    zmq_planes: Callable[..., ZmqPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver, inbox = zmq_planes(), zmq_planes(), Inbox()
    receiver.start(inbox)
    for number in range(1100):
        assert sender.send(f"ipc:///nowhere/{number}", message(number)), "each absent peer has a socket of its own"
    sender.send(receiver.address, message(1))
    assert await inbox.wait_for(1) == [message(1)]
    async with asyncio.timeout(30):
        while len(sender._pushes) < 1101:  # noqa: ASYNC110 - the plane's thread connects to the others meanwhile
            await asyncio.sleep(0.005)
    assert sender.num_dropped == 0


async def test_zmq_goes_on_when_no_further_socket_can_be_opened(
    zmq_planes: Callable[..., ZmqPlane], caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver, inbox = zmq_planes(), zmq_planes(), Inbox()
    receiver.start(inbox)
    sender.send(receiver.address, message(1))
    await inbox.wait_for(1)
    open_socket = sender._context.socket

    def refuse(_: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    sender._context.socket = refuse
    for number in range(3):
        sender.send("tcp://127.0.0.1:9", message(number))
        sender.send(receiver.address, message(2 + number))
    assert await inbox.wait_for(4) == [message(number) for number in range(1, 5)]
    async with asyncio.timeout(PATIENCE_S):
        while sender.num_dropped < 3:  # noqa: ASYNC110 - a count has no event, and the thread takes each peer by itself
            await asyncio.sleep(0.01)
    assert sender.num_dropped == 3
    assert caplog.text.count("can't connect to 'tcp://127.0.0.1:9'") == 1, "one line for each peer"
    sender._context.socket = open_socket


async def test_a_slow_message_lets_other_callbacks_run_before_the_next(make_plane: Callable[..., Plane]) -> None:
    """This holds for the messages of one turn of the loop, which are delivered together when they are quick."""
    sender, receiver, turns = make_plane(), make_plane(), []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(arrived: PlaneMessage) -> None:
        turns.append(arrived)
        loop.call_soon(turns.append, None)
        end_s = time.perf_counter() + 0.006
        while time.perf_counter() < end_s:
            pass
        if len(turns) >= 9:
            done.set()

    for number in range(5):
        sender.send(receiver.address, message(number))
    receiver.start(handle)
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    assert turns[:9] == [message(0), None, message(1), None, message(2), None, message(3), None, message(4)]


async def test_zmq_shows_that_its_thread_has_died(
    zmq_planes: Callable[..., ZmqPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = zmq_planes()
    monkeypatch.setattr(plane, "_close_forgotten", None)
    plane.forget("tcp://127.0.0.1:9")
    plane._thread.join(PATIENCE_S)
    assert not plane.is_alive
    assert plane.send(plane.address, message(1)) is False


async def test_zmq_slow_reader_holds_the_sender_back_and_loses_nothing(zmq_planes: Callable[..., ZmqPlane]) -> None:
    sender, receiver, inbox = zmq_planes(), zmq_planes(max_queued_messages=8), Inbox()
    receiver.start(inbox)
    assert all(sender.send(receiver.address, message(number)) for number in range(2000))
    assert await inbox.wait_for(2000) == [message(number) for number in range(2000)]


async def test_zmq_full_queue_of_a_living_peer_is_refused_and_drains_in_order(
    zmq_planes: Callable[..., ZmqPlane],
) -> None:
    sender, receiver, inbox = zmq_planes(max_queued_messages=QUEUE), zmq_planes(), Inbox()
    big = RouterHeartbeat(MemberId("r" * 100_000), "a", 1.0)
    taken = 0
    while sender.send(receiver.address, big):
        taken += 1
        assert taken < MORE_THAN_ANY_QUEUE
    assert sender.num_dropped == 1
    receiver.start(inbox)
    assert await inbox.wait_for(taken) == [big] * taken


async def test_local_messages_take_the_form_of_the_wire() -> None:
    hub = LocalHub()
    sender, receiver, inbox = LocalPlane(hub, "a"), LocalPlane(hub, "b"), Inbox()
    receiver.start(inbox)
    sender.send("b", AbortAttempt(RequestId("r"), 1, [0, 2]))
    assert await inbox.wait_for(1) == [AbortAttempt(RequestId("r"), 1, (0, 2))]
    with pytest.raises(ValueError, match="taken"):
        LocalPlane(hub, "b")
