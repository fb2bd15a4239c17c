"""Runs one suite for every feature channel: a copy inside one process, and NIXL from a process of its own, each with
slots in the host's memory, on a simulated device, on one that is reached over the host, and on a CUDA device if there
is one.

A frozen source is one that was stopped before the sink ever connected; a pull from it then stays in progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait

import msgspec
import numpy as np
import pytest
from fabric_peers import ARENA_BYTES, Peer, World, landed_bytes, payload

from fabric.contracts import ArenaFull, LeaseLost, ManualClock, ProtocolError, TransferFailed, UnitTooLarge
from fabric.transport import HEADER_BYTES, DeviceView, FeatureSink, LandedFeature, num_devices

PATIENCE_S = 30.0
TIMEOUT_S = 5.0
"""Limits pulls on the sink's own clock, which advances when a test says so."""
SHAPE = (1, 64, 16)
NBYTES = 4096
SLOT_BYTES = NBYTES + HEADER_BYTES
INBOX_SLOTS = 4


WORLDS = [
    pytest.param((transport, memory), id=f"{transport}-{memory}", marks=marks)
    for transport, marks in (("local", []), ("nixl", [pytest.mark.nixl]))
    for memory in ("host", "device", "staged")
]
CUDA = [pytest.mark.gpu, pytest.mark.skipif(num_devices() == 0, reason="no CUDA device")]
WORLDS += [
    pytest.param(("local", "cuda"), id="local-cuda", marks=CUDA),
    pytest.param(("nixl", "cuda"), id="nixl-cuda", marks=[pytest.mark.nixl, *CUDA]),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(*request.param)
    yield world
    for peer in world.shared:
        peer.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def sink(world: World, clock: ManualClock) -> Iterator[FeatureSink]:
    """Yields a sink that is not connected to any peer yet."""
    sink = world.make_sink(INBOX_SLOTS * SLOT_BYTES, clock)
    yield sink
    sink.close()


@pytest.fixture
def peer(world: World) -> Iterator[Peer]:
    peer = world.shared_peer(0)
    yield peer
    peer.thaw()


@pytest.fixture
def other(world: World) -> Iterator[Peer]:
    other = world.shared_peer(1)
    yield other
    other.thaw()


@pytest.fixture
def mortal(world: World) -> Iterator[Peer]:
    """Yields a peer that a test may kill."""
    mortal = world.make_peer()
    yield mortal
    mortal.close()


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for an event in another thread or process that sends no notification."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, "did not happen"
        time.sleep(0.002)


def is_empty(sink: FeatureSink) -> bool:
    usage = sink.usage()
    return usage.used_bytes == usage.quarantined_bytes == usage.num_slots == usage.num_quarantined == 0


def freeze_with_pull(peer: Peer, sink: FeatureSink) -> Future[LandedFeature]:
    """Returns a pull in progress from a peer that will not answer. Pulls begin in order, so once the pull from an
    unknown source has failed, the one before it has begun."""
    ticket = peer.offer(1, SHAPE)
    peer.freeze()
    future = sink.pull(ticket, TIMEOUT_S)
    nowhere = msgspec.structs.replace(ticket, source="enc-unknown", metadata=b"no metadata")
    with pytest.raises(TransferFailed):
        sink.pull(nowhere, TIMEOUT_S).result(PATIENCE_S)
    return future


def address_of(landed: LandedFeature) -> int:
    view = landed.view
    return view.place.address if isinstance(view, DeviceView) else view.ctypes.data


def test_a_feature_lands_whole_again_and_again(world: World, peer: Peer, sink: FeatureSink) -> None:
    for seed in range(2 * INBOX_SLOTS):
        ticket = peer.offer(seed, SHAPE)
        landed = sink.pull(ticket, TIMEOUT_S).result(PATIENCE_S)
        assert np.array_equal(landed_bytes(landed), payload(seed, NBYTES))
        assert landed.ticket == ticket
        assert world.memory == "cuda" or landed.is_staged == (world.memory == "staged")
        assert address_of(landed) % 64 == 0
        assert sink.usage().used_bytes == SLOT_BYTES
        sink.free(landed.slot_id)
        sink.free(landed.slot_id)
        assert is_empty(sink)
        peer.free(seed)


def test_a_ticket_survives_the_wire(peer: Peer, sink: FeatureSink) -> None:
    ticket = peer.offer(3, SHAPE)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=type(ticket))
    assert copy == ticket
    assert np.array_equal(landed_bytes(sink.pull(copy, TIMEOUT_S).result(PATIENCE_S)), payload(3, NBYTES))


def test_a_slot_given_to_something_else_is_a_lost_lease(peer: Peer, sink: FeatureSink) -> None:
    freed, reused = peer.offer(1, SHAPE), peer.offer(2, SHAPE)
    peer.free(1)
    with pytest.raises(LeaseLost, match="has given the slot to another feature"):
        sink.pull(freed, TIMEOUT_S).result(PATIENCE_S)
    peer.free(2)
    fresh = peer.offer(3, SHAPE)
    for old in (freed, reused):
        with pytest.raises(LeaseLost, match="has given the slot to another feature"):
            sink.pull(old, TIMEOUT_S).result(PATIENCE_S)
    assert is_empty(sink)
    landed = sink.pull(fresh, TIMEOUT_S).result(PATIENCE_S)
    assert np.array_equal(landed_bytes(landed), payload(3, NBYTES))


def test_a_source_tells_full_from_too_large_and_frees_once(peer: Peer) -> None:
    with pytest.raises(UnitTooLarge):
        peer.offer(0, (1, ARENA_BYTES // 64 + 1, 16))
    peer.offer(1, (1, ARENA_BYTES // 128, 16))
    with pytest.raises(ArenaFull):
        peer.offer(2, (1, ARENA_BYTES // 128, 16))
    peer.free(1)
    peer.offer(3, (1, ARENA_BYTES // 128, 16))
    peer.free(1)
    with pytest.raises(ArenaFull):
        peer.offer(4, (1, ARENA_BYTES // 128, 16))


def test_a_source_names_idle_slots_where_giving_them_up_makes_room(peer: Peer) -> None:
    """There are four slots of a quarter each: the requested slot must fit between the slots that stay."""
    quarter = (1, ARENA_BYTES // 256 - 1, 16)
    quarter_bytes, half_bytes = ARENA_BYTES // 4 - 64, ARENA_BYTES // 2 - 64
    for seed in range(4):
        peer.offer(seed, quarter)
    assert peer.victims(half_bytes) is None
    for seed in (3, 1, 2):
        peer.set_idle(seed, True)
    assert peer.victims(half_bytes) == [3, 2]
    assert peer.victims(ARENA_BYTES - 64) is None
    peer.set_idle(3, False)
    assert peer.victims(half_bytes) == [1, 2]
    peer.set_idle(2, False)
    assert peer.victims(half_bytes) is None
    assert peer.victims(quarter_bytes) == [1]
    peer.free(1)
    assert peer.victims(quarter_bytes) == []
    peer.offer(5, quarter)


def test_a_source_keeps_a_claimed_range_for_what_it_was_claimed_for(peer: Peer) -> None:
    """No other slot is placed in the range, and it is available once the slots that lie in it are freed."""
    quarter, half = (1, ARENA_BYTES // 256 - 1, 16), (1, ARENA_BYTES // 128 - 1, 16)
    for seed in range(3):
        peer.offer(seed, quarter)
    (in_the_way,) = peer.claim(ARENA_BYTES // 2 - 64)
    assert in_the_way == 2, "beside what is free"
    with pytest.raises(ArenaFull):
        peer.offer(4, quarter)
    with pytest.raises(ArenaFull):
        peer.offer(4, half, is_claimed=True)
    peer.free(2)
    with pytest.raises(ArenaFull):
        peer.offer(4, quarter)
    assert peer.offer(4, half, is_claimed=True).nbytes == ARENA_BYTES // 2 - 64
    peer.free(4)
    assert peer.claim(3 * ARENA_BYTES // 4 - 64) == [1]
    peer.unclaim()
    peer.offer(5, half)


def test_a_full_inbox_refuses_at_once_and_takes_again_after_a_free(peer: Peer, sink: FeatureSink) -> None:
    tickets = [peer.offer(seed, SHAPE) for seed in range(INBOX_SLOTS)]
    landed = [sink.pull(ticket, TIMEOUT_S).result(PATIENCE_S) for ticket in tickets]
    with pytest.raises(ArenaFull):
        sink.pull(tickets[0], TIMEOUT_S)
    sink.free(landed[2].slot_id)
    again = sink.pull(tickets[0], TIMEOUT_S).result(PATIENCE_S)
    assert np.array_equal(landed_bytes(again), payload(0, NBYTES))
    for index in (0, 1, 3):
        assert np.array_equal(landed_bytes(landed[index]), payload(index, NBYTES)), "others are untouched"


def test_what_never_fits_is_told_apart_from_what_does_not_fit_now(peer: Peer, sink: FeatureSink) -> None:
    large = peer.offer(1, (1, 64 * INBOX_SLOTS + 5, 16))
    with pytest.raises(UnitTooLarge):
        sink.pull(large, TIMEOUT_S)
    assert is_empty(sink)


def test_a_ticket_that_contradicts_itself_is_refused(peer: Peer, sink: FeatureSink) -> None:
    ticket = peer.offer(1, SHAPE)
    for field, value in [("nbytes", NBYTES - 4), ("dtype", "int8"), ("shape", (0, 64, 16))]:
        with pytest.raises(ProtocolError):
            sink.pull(msgspec.structs.replace(ticket, **{field: value}), TIMEOUT_S)
    assert is_empty(sink)


def test_a_ticket_of_nobody_or_of_nowhere_fails(peer: Peer, sink: FeatureSink) -> None:
    ticket = peer.offer(1, SHAPE)
    for field, value in [("source", "enc-unknown"), ("address", 64), ("generation_address", 64)]:
        future = sink.pull(msgspec.structs.replace(ticket, **{field: value}), TIMEOUT_S)
        with pytest.raises(TransferFailed):
            future.result(PATIENCE_S)
    assert is_empty(sink)
    assert np.array_equal(landed_bytes(sink.pull(ticket, TIMEOUT_S).result(PATIENCE_S)), payload(1, NBYTES))


def test_a_pull_that_times_out_quarantines_its_slot_until_the_peer_is_dead(
    clock: ManualClock, mortal: Peer, other: Peer, sink: FeatureSink
) -> None:
    future = freeze_with_pull(mortal, sink)
    assert sink.usage().num_slots == 1
    clock.advance(TIMEOUT_S)
    with pytest.raises(TransferFailed):
        future.result(PATIENCE_S)
    assert sink.usage() == (0, INBOX_SLOTS * SLOT_BYTES, 0, SLOT_BYTES, 1)
    tickets = [other.offer(seed, SHAPE) for seed in range(INBOX_SLOTS)]
    landed = [sink.pull(ticket, TIMEOUT_S).result(PATIENCE_S) for ticket in tickets[:-1]]
    with pytest.raises(ArenaFull):
        sink.pull(tickets[-1], TIMEOUT_S)
    mortal.kill()
    sink.peer_dead(mortal.name)
    eventually(lambda: sink.usage().num_quarantined == 0)
    last = sink.pull(tickets[-1], TIMEOUT_S).result(PATIENCE_S)
    for seed, feature in enumerate([*landed, last]):
        assert np.array_equal(landed_bytes(feature), payload(seed, NBYTES))


def test_the_quarantine_of_a_peer_that_wakes_up_ends_with_the_transfer(
    clock: ManualClock, peer: Peer, sink: FeatureSink
) -> None:
    future = freeze_with_pull(peer, sink)
    clock.advance(TIMEOUT_S + 1)
    with pytest.raises(TransferFailed):
        future.result(PATIENCE_S)
    assert sink.usage().num_quarantined == 1
    peer.thaw()
    eventually(lambda: is_empty(sink))
    landed = sink.pull(peer.offer(2, SHAPE), TIMEOUT_S).result(PATIENCE_S)
    assert np.array_equal(landed_bytes(landed), payload(2, NBYTES))


def test_a_peer_that_wakes_up_in_time_delivers(peer: Peer, sink: FeatureSink) -> None:
    future = freeze_with_pull(peer, sink)
    peer.thaw()
    assert np.array_equal(landed_bytes(future.result(PATIENCE_S)), payload(1, NBYTES))


def test_others_are_served_while_one_is_frozen(peer: Peer, other: Peer, sink: FeatureSink) -> None:
    stuck = freeze_with_pull(peer, sink)
    landed = sink.pull(other.offer(2, SHAPE), TIMEOUT_S).result(PATIENCE_S)
    assert np.array_equal(landed_bytes(landed), payload(2, NBYTES))
    assert not stuck.done()


def test_pulling_from_a_killed_peer_fails_and_frees(mortal: Peer, sink: FeatureSink) -> None:
    ticket = mortal.offer(1, SHAPE)
    sink.free(sink.pull(ticket, TIMEOUT_S).result(PATIENCE_S).slot_id)
    mortal.kill()
    for _ in range(2):
        with pytest.raises(TransferFailed):
            sink.pull(ticket, TIMEOUT_S).result(PATIENCE_S)
    sink.peer_dead(mortal.name)
    eventually(lambda: is_empty(sink))


def test_a_peer_killed_during_a_pull_never_frees_a_slot_that_is_under_way(mortal: Peer, sink: FeatureSink) -> None:
    future = freeze_with_pull(mortal, sink)
    mortal.kill()
    usage = sink.usage()
    assert usage.num_slots + usage.num_quarantined == 1 or future.done()
    sink.peer_dead(mortal.name)
    with pytest.raises(TransferFailed):
        future.result(PATIENCE_S)
    eventually(lambda: is_empty(sink))


def test_peer_dead_ends_open_pulls_of_that_peer_alone(peer: Peer, other: Peer, sink: FeatureSink) -> None:
    stuck = freeze_with_pull(peer, sink)
    stuck_too = freeze_with_pull(other, sink)
    sink.peer_dead(peer.name)
    with pytest.raises(TransferFailed, match="has left the cluster"):
        stuck.result(PATIENCE_S)
    assert sink.usage().num_slots == 1
    assert not stuck_too.done()
    other.thaw()
    assert np.array_equal(landed_bytes(stuck_too.result(PATIENCE_S)), payload(1, NBYTES))
    sink.peer_dead("enc-unknown")


def test_a_frozen_peer_that_was_declared_dead_writes_into_nobodys_slot(
    peer: Peer, other: Peer, sink: FeatureSink
) -> None:
    stuck = freeze_with_pull(peer, sink)
    sink.peer_dead(peer.name)
    with pytest.raises(TransferFailed, match="has left the cluster"):
        stuck.result(PATIENCE_S)
    tickets = [other.offer(seed, SHAPE) for seed in range(INBOX_SLOTS)]
    landed = [sink.pull(ticket, TIMEOUT_S).result(PATIENCE_S) for ticket in tickets[:-1]]
    with pytest.raises(ArenaFull):
        sink.pull(tickets[-1], TIMEOUT_S)
    peer.thaw()
    eventually(lambda: sink.usage().num_quarantined == 0)
    landed.append(sink.pull(tickets[-1], TIMEOUT_S).result(PATIENCE_S))
    for seed, feature in enumerate(landed):
        assert np.array_equal(landed_bytes(feature), payload(seed, NBYTES))


def test_another_peer_is_reached_after_one_died(mortal: Peer, peer: Peer, sink: FeatureSink) -> None:
    sink.free(sink.pull(mortal.offer(1, SHAPE), TIMEOUT_S).result(PATIENCE_S).slot_id)
    mortal.kill()
    sink.peer_dead(mortal.name)
    landed = sink.pull(peer.offer(2, SHAPE), TIMEOUT_S).result(PATIENCE_S)
    assert np.array_equal(landed_bytes(landed), payload(2, NBYTES))


def test_one_wrongly_declared_dead_is_connected_anew(peer: Peer, sink: FeatureSink) -> None:
    sink.free(sink.pull(peer.offer(1, SHAPE), TIMEOUT_S).result(PATIENCE_S).slot_id)
    sink.peer_dead(peer.name)
    landed = sink.pull(peer.offer(2, SHAPE), TIMEOUT_S).result(PATIENCE_S)
    assert np.array_equal(landed_bytes(landed), payload(2, NBYTES))


def test_a_cancelled_pull_keeps_its_slot_until_the_transfer_ended(peer: Peer, sink: FeatureSink) -> None:
    future = freeze_with_pull(peer, sink)
    assert future.cancel()
    assert sink.usage().num_slots == 1, "bytes may still land there"
    peer.thaw()
    eventually(lambda: is_empty(sink))
    with pytest.raises(CancelledError):
        future.result(0)


def test_a_cancelled_pull_that_times_out_is_quarantined_too(clock: ManualClock, peer: Peer, sink: FeatureSink) -> None:
    future = freeze_with_pull(peer, sink)
    assert future.cancel()
    clock.advance(TIMEOUT_S)
    eventually(lambda: sink.usage().num_quarantined == 1)
    peer.thaw()
    eventually(lambda: is_empty(sink))


def test_many_pulls_at_once_from_many_threads_and_two_peers(
    world: World, clock: ManualClock, peer: Peer, other: Peer
) -> None:
    sink = world.make_sink(8 << 20, clock)
    tickets = {
        seed: (peer if seed % 2 else other).offer(seed, (1 + seed % 3, 7 + 31 * (seed % 11), 16)) for seed in range(60)
    }
    futures: dict[int, Future[LandedFeature]] = {}

    def pull(seeds: range) -> None:
        for seed in seeds:
            futures[seed] = sink.pull(tickets[seed], TIMEOUT_S)

    threads = [threading.Thread(target=pull, args=(range(start, 60, 3),)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done, open_pulls = wait(futures.values(), PATIENCE_S)
    assert (len(done), len(open_pulls)) == (60, 0)
    for seed, future in futures.items():
        assert np.array_equal(landed_bytes(future.result()), payload(seed, tickets[seed].nbytes))
    assert sink.usage().num_slots == 60
    for future in futures.values():
        sink.free(future.result().slot_id)
    assert is_empty(sink)
    sink.close()


def test_closing_a_sink_ends_its_pulls_and_refuses_new_ones(peer: Peer, sink: FeatureSink) -> None:
    future = freeze_with_pull(peer, sink)
    assert sink.is_alive
    sink.close()
    assert not sink.is_alive
    with pytest.raises(TransferFailed, match="closed"):
        future.result(PATIENCE_S)
    peer.thaw()
    with pytest.raises(TransferFailed, match="closed"):
        sink.pull(peer.offer(2, SHAPE), TIMEOUT_S)
    assert is_empty(sink)
    sink.close()


def test_a_transfer_thread_that_died_shows_and_ends_its_pulls(
    peer: Peer, sink: FeatureSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = freeze_with_pull(peer, sink)
    monkeypatch.setattr(sink, "_disconnect_dead", None)
    sink.peer_dead("nobody")
    with pytest.raises(TransferFailed, match="closed"):
        future.result(PATIENCE_S)
    sink._thread.join(PATIENCE_S)
    assert not sink.is_alive


def test_callbacks_may_use_the_sink(peer: Peer, sink: FeatureSink) -> None:
    first, second = peer.offer(1, SHAPE), peer.offer(2, SHAPE)
    pulled: Future[Future[LandedFeature]] = Future()

    def swap(landed: Future[LandedFeature]) -> None:
        sink.free(landed.result().slot_id)
        pulled.set_result(sink.pull(second, TIMEOUT_S))

    sink.pull(first, TIMEOUT_S).add_done_callback(swap)
    landed = pulled.result(PATIENCE_S).result(PATIENCE_S)
    assert np.array_equal(landed_bytes(landed), payload(2, NBYTES))
    assert sink.usage().num_slots == 1
