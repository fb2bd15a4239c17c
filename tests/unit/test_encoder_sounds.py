"""Tests sounds that wait for the device: a batch begins with the first in line and stays within its cost, and a sound
is dropped when its last follower leaves."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from encoder_pool.planning.batcher import QueuedSound, choose_sounds
from encoder_pool.planning.decode_line import DecodeLine
from encoder_pool.planning.flight import DecodeRoom, EncodeJob, EncodeWaiter, Phase, follower_of
from encoder_pool.planning.flights import Flights
from encoder_pool.planning.turns import CallTurn
from fabric.ids import MemberId, MmHash, RequestId
from fabric.messages import Destination, EncodeRequest, MediaItem
from modalities.family import EncoderInput
from modalities.waveform import Waveform

WAVEFORM = Waveform(np.zeros(4800, np.float32), 48000, 1600)
ROOM = DecodeRoom(max_cost=100, max_items=3, max_long_cost=100, max_long_items=1)


def free(modality: str, cost: int) -> float:
    return 0.0


def by_cost(modality: str, cost: int) -> float:
    return float(cost)


def sound(name: str, cost: int = 10, units: tuple[int, ...] = (2, 2)) -> MediaItem:
    return MediaItem(0, "audio", MmHash(name), (cost, 1, 1), units, cost, f"part.{name}")


def wish(item: MediaItem, number: int) -> EncodeWaiter:
    destination = Destination(MemberId("worker-1"), "local://worker-1")
    request_id = RequestId(f"req-{number}")
    request = EncodeRequest(request_id, 0, MemberId("router-1"), (item,), destination, (float(number), request_id))
    return follower_of(request, CallTurn(number, request.age, 0.0), item, b"wav", 0.0)


def decoded(flights: Flights, item: MediaItem, number: int = 1) -> tuple[EncodeJob, EncodeWaiter]:
    follower = wish(item, number)
    flight = flights.join(follower)
    flights.decode_started(flight)
    flights.decoded_sound(flight, WAVEFORM)
    return flight, follower


def inputs(item: MediaItem) -> list[EncoderInput]:
    return [EncoderInput("audio", np.zeros((5, 8), np.float32), (5, 1, 1)) for _ in item.unit_tokens]


@settings(deadline=None, max_examples=50)
@given(costs=st.lists(st.integers(1, 60), max_size=12), max_cost=st.integers(1, 100))
@example(costs=[4, 6], max_cost=10)
def test_a_batch_is_led_by_the_first_and_filled_within_its_cost(costs: list[int], max_cost: int) -> None:
    turns = [CallTurn(number, (float(number), ""), 0.0) for number in range(len(costs))]
    queued = [
        QueuedSound(turn.rank(0.0, 4.0, 0), MmHash(f"{turn.call}"), cost)
        for turn, cost in zip(turns, costs, strict=True)
    ]
    batch = choose_sounds(queued, max_cost)
    assert batch[:1] == queued[:1]
    cost = sum(one.cost for one in batch)
    assert cost <= max_cost or len(batch) == 1
    assert all(cost + left.cost > max_cost for left in set(queued) - set(batch)), "what fits is not left out"


def test_a_sound_waits_for_the_device_and_then_for_its_forward() -> None:
    flights = Flights(patience=4.0, to_seconds=free)
    item = sound("a")
    flight, _ = decoded(flights, item)
    assert (flight.phase, flight.data) == (Phase.DECODED, b"")
    assert [one.mm_hash for one in flights.queued_sounds()] == ["a"]
    totals = flights.totals
    assert (list(flights.queued_units()), totals.queued_cost, totals.num_prepared, totals.num_in_flight) == (
        [],
        10,
        1,
        1,
    )
    flights.check_invariants()
    assert flights.sound_started(item.mm_hash) == (flight, WAVEFORM)
    assert list(flights.queued_sounds()) == []
    flights.check_invariants()
    flights.decoded(flight, inputs(item))
    assert flight.phase is Phase.ENCODING
    assert [one.key.unit for one in flights.queued_units()] == [0, 1]
    flights.check_invariants()


def test_sounds_are_ranked_as_units_are() -> None:
    flights = Flights(patience=4.0, to_seconds=by_cost)
    for number, (name, cost) in enumerate((("long", 30), ("short", 10), ("middle", 20))):
        decoded(flights, sound(name, cost), number)
    ranked = list(flights.queued_sounds())
    assert [one.mm_hash for one in ranked] == ["short", "middle", "long"]


def test_who_leaves_takes_the_sound_along_wherever_it_is() -> None:
    flights = Flights(patience=4.0, to_seconds=free)
    item = sound("a")
    flight, follower = decoded(flights, item)
    assert flights.leave(follower) is flight
    assert (list(flights.queued_sounds()), flights.totals.queued_cost, flights.is_live(flight)) == ([], 0, False)
    flight, follower = decoded(flights, item)
    flights.sound_started(item.mm_hash)
    assert flights.leave(follower) is flight, "on the device"
    assert not flights.is_live(flight)
    another, _ = decoded(flights, item, 2)
    assert another is not flight
    flights.check_invariants()


def test_who_comes_while_it_is_on_the_device_is_served_too() -> None:
    flights = Flights(patience=4.0, to_seconds=free)
    item = sound("a")
    flight, first = decoded(flights, item)
    flights.sound_started(item.mm_hash)
    second = wish(item, 2)
    assert flights.join(second) is flight
    assert flights.leave(first) is None
    flights.decoded(flight, inputs(item))
    assert len(list(flights.queued_units())) == 2


def test_one_that_fails_on_the_device_ends_its_flight() -> None:
    flights = Flights(patience=4.0, to_seconds=free)
    item = sound("a")
    flight, follower = decoded(flights, item)
    assert flights.end(flight) == [follower]
    assert (list(flights), list(flights.queued_sounds())) == ([], [])


def test_a_waveform_counts_by_its_bytes_and_holds_no_decoder() -> None:
    flights = Flights(patience=4.0, to_seconds=free)
    flights.join(wish(sound("next"), 2))
    flight, _ = decoded(flights, sound("a"))
    following = DecodeLine(flights, ROOM).next(0.0)
    assert following is not None, "no long item is being decoded"
    before = flights.decoded_cost
    picture = MediaItem(0, "image", MmHash("p"), (1, 1, 10), (4,), 10, "part.p")
    other = flights.join(wish(picture, 3))
    flights.decode_started(other)
    flights.decoded(other, [EncoderInput("image", np.zeros((10, 4 * 480), np.float32), (1, 1, 10))])
    assert flights.decoded_cost == before / 4 + 10, "480 samples for a mel frame, four times as much for a patch"
    flights.sound_started(flight.item.mm_hash)
    flights.decoded(flight, inputs(flight.item))
    assert flights.decoded_cost == before / 4 + 10
