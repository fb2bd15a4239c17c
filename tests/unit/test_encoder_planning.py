"""The encoder's small decisions: life cycle, cost fit, cache events, admission, settings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from encoder_pool.config import EncoderConfig
from encoder_pool.decode import check_inputs
from encoder_pool.planning.admission import check_budget, refusal
from encoder_pool.planning.batcher import split_cost
from encoder_pool.planning.cost import CostEstimate, ForwardCost
from encoder_pool.planning.feature_log import FeatureLog
from encoder_pool.planning.features import FeatureSpec
from encoder_pool.planning.flights import Flights, Phase, follower_of
from encoder_pool.planning.lifecycle import FeatureState, advance
from fabric.errors import ConfigError, InvalidMedia, Overloaded
from fabric.ids import MemberId, MmHash, RequestId, UnitKey
from fabric.messages import Destination, EncodeRequest, FeatureEvents, MediaItem
from modalities.family import EncoderInput

SPEC = FeatureSpec(2, 8, "float32", 4)
ENCODER = MemberId("encoder-1")


def item(
    name: str, cost: int = 16, units: tuple[int, ...] = (4,), modality: str = "image", index: int = 0
) -> MediaItem:
    return MediaItem(index, modality, MmHash(name), (1, 4, cost // 4), units, cost, f"messages.0.content.{index}")


def request(*items: MediaItem, number: int = 1) -> EncodeRequest:
    destination = Destination(MemberId("worker-1"), "local://worker-1")
    return EncodeRequest(RequestId(f"req-{number}"), 0, MemberId("router-1"), items, destination, (float(number), ""))


class TestLifecycle:
    def test_only_the_drawn_steps_are_possible(self) -> None:
        drawn = {
            ("encoding", "encoded"),
            ("encoding", "failed"),
            ("encoded", "staged"),
            ("encoded", "discarded"),
            ("staged", "encoded"),
        }
        for start, end in itertools.product(FeatureState, FeatureState):
            if (start.value, end.value) in drawn:
                assert advance(start, end) is end
            else:
                with pytest.raises(AssertionError):
                    advance(start, end)


class TestForwardCost:
    def test_nothing_is_known_before_the_first_forward(self) -> None:
        assert ForwardCost().estimate() == CostEstimate(0.0, 0.0)

    def test_a_line_is_found_again(self) -> None:
        cost = ForwardCost()
        for patches in (16, 784, 100, 4096):
            cost.observe(patches, 0.004 + 2e-5 * patches)
        assert cost.estimate() == pytest.approx((2e-5, 0.004))
        assert cost.predict_s(1000) == pytest.approx(0.024)

    def test_one_size_alone_goes_to_the_slope(self) -> None:
        cost = ForwardCost()
        for _ in range(5):
            cost.observe(100, 0.5)
        assert cost.estimate() == pytest.approx((0.005, 0.0))

    def test_neither_number_is_ever_negative(self) -> None:
        falling, through_zero = ForwardCost(), ForwardCost()
        for patches, seconds in ((10, 1.0), (1000, 0.5)):
            falling.observe(patches, seconds)
        for patches, seconds in ((100, 0.1), (1000, 10.0)):
            through_zero.observe(patches, seconds)
        assert falling.estimate().seconds_per_cost == 0.0
        assert falling.estimate().overhead_s > 0.0
        assert through_zero.estimate().overhead_s == 0.0
        assert through_zero.estimate().seconds_per_cost > 0.0

    def test_a_device_that_slows_down_is_followed(self) -> None:
        cost = ForwardCost()
        for slope in [1e-5] * 200 + [4e-5] * 200:
            for patches in (100, 1000):
                cost.observe(patches, slope * patches)
        assert cost.estimate().seconds_per_cost == pytest.approx(4e-5, rel=0.01)


class TestFeatureLog:
    def test_an_item_is_stored_with_its_last_unit_and_gone_with_its_first(self) -> None:
        log = FeatureLog(ENCODER, 3)
        first, second = UnitKey(MmHash("a"), 0), UnitKey(MmHash("a"), 1)
        log.unit_ready(first, 2)
        assert log.drain() == []
        log.unit_ready(second, 2)
        assert log.drain() == [FeatureEvents(ENCODER, 3, 1, stored=(MmHash("a"),))]
        log.unit_gone(first)
        log.unit_gone(second)
        assert log.drain() == [FeatureEvents(ENCODER, 3, 2, removed=(MmHash("a"),))]
        assert log.snapshot() == FeatureEvents(ENCODER, 3, 2, is_snapshot=True)

    def test_order_is_kept_between_messages_and_numbers_have_no_gap(self) -> None:
        log = FeatureLog(ENCODER, 1)
        a, b = UnitKey(MmHash("a"), 0), UnitKey(MmHash("b"), 0)
        log.unit_ready(a, 1)
        log.unit_ready(b, 1)
        log.unit_gone(a)
        log.unit_ready(a, 1)
        assert log.drain() == [
            FeatureEvents(ENCODER, 1, 1, stored=(MmHash("a"), MmHash("b"))),
            FeatureEvents(ENCODER, 1, 3, removed=(MmHash("a"),)),
            FeatureEvents(ENCODER, 1, 4, stored=(MmHash("a"),)),
        ]
        assert log.snapshot() == FeatureEvents(ENCODER, 1, 4, stored=(MmHash("b"), MmHash("a")), is_snapshot=True)


class TestAdmission:
    def test_what_can_never_be_encoded_is_named(self) -> None:
        refused = {
            "unsupported_modality": item("a", modality="video"),
            "protocol_error": item("a", units=()),
            "unit_too_large": item("a", units=(4, 17)),
        }
        for code, refused_item in refused.items():
            error = refusal(refused_item, ("image",), SPEC, arena_bytes=1024)
            assert error is not None
            assert error.code == code
        assert refusal(item("a", units=(16,)), ("image",), SPEC, arena_bytes=1024) is None

    def test_the_budget_counts_only_what_is_new(self) -> None:
        flights = Flights(patience=4.0)
        cached = {UnitKey(MmHash("cached"), 0)}

        def check(*items: MediaItem) -> None:
            check_budget(items, flights, cached.__contains__, 32, drain_s=1.5)

        check(item("huge", cost=1000))  # alone, with nothing queued
        flights.join(follower_of(request(item("a", cost=20)), 1, item("a", cost=20), b"", 0.0))
        check(item("b", cost=12))
        check(item("a", cost=20), item("b", cost=12), item("cached", cost=500))
        with pytest.raises(Overloaded) as caught:
            check(item("b", cost=13))
        assert caught.value.retry_after_s == 1.5

    def test_an_items_cost_is_split_over_its_units(self) -> None:
        assert split_cost(16, (4,)) == [16]
        assert split_cost(10, (1, 1, 1)) == [3, 3, 4]
        assert split_cost(100, (30, 10)) == [75, 25]


class TestDecodedInputs:
    def inputs(self, *shapes: tuple[int, tuple[int, int, int]]) -> list[EncoderInput]:
        return [EncoderInput("image", np.zeros((num, 3), np.float32), grid) for num, grid in shapes]

    def test_what_was_planned_passes(self) -> None:
        check_inputs(self.inputs((16, (1, 4, 4))), item("a"))

    @pytest.mark.parametrize("found", [(), ((16, (1, 4, 4)),) * 2, ((12, (1, 4, 3)),), ((16, (1, 2, 8)),)])
    def test_anything_else_is_invalid_media(self, found: tuple[tuple[int, tuple[int, int, int]], ...]) -> None:
        with pytest.raises(InvalidMedia):
            check_inputs(self.inputs(*found), item("a"))


class TestFlights:
    def test_followers_share_a_flight_and_its_last_one_ends_it(self) -> None:
        flights = Flights(patience=4.0)
        one, two = (follower_of(request(item("a"), number=n), n, item("a"), b"png", 0.0) for n in (1, 2))
        flight = flights.join(one)
        assert flights.join(two) is flight
        assert flights.queued_cost == 16
        assert flights.leave(one) is None
        assert flights.leave(one) is None
        assert flights.leave(two) is flight
        assert flights.queued_cost == 0
        flights.check_invariants()

    def test_a_unit_in_the_forward_outlives_its_followers(self) -> None:
        flights = Flights(patience=4.0)
        wanted = item("a", cost=32, units=(4, 4))
        follower = follower_of(request(wanted), 1, wanted, b"png", 0.0)
        flight = flights.join(follower)
        flights.decode_started(flight)
        flights.decoded(flight, [EncoderInput("image", np.zeros((16, 3), np.float32), (1, 4, 4))] * 2)
        assert flight.phase is Phase.ENCODING
        flights.forward_started(UnitKey(MmHash("a"), 0))
        assert flights.leave(follower) is None
        assert flights.queued_units(0.0) == []
        assert flights.queued_cost == 16
        flights.check_invariants()
        assert flights.forward_ended(UnitKey(MmHash("a"), 0)) is flight
        assert flights.queued_cost == 0

    def test_pixels_lie_decoded_within_their_budget_but_one_item_always_may(self) -> None:
        flights = Flights(patience=4.0)
        for number, cost in enumerate((40, 8, 8)):
            wanted = item(f"item-{number}", cost=cost)
            flights.join(follower_of(request(wanted, number=number), number, wanted, b"png", 0.0))
        order = []
        while flight := flights.next_to_decode(max_decoded_cost=20, seconds_per_cost=0.0):
            flights.decode_started(flight)
            order.append(flight.item.mm_hash)
        assert order == ["item-0"]
        order = []
        shortest_first = Flights(patience=4.0)
        for number, cost in enumerate((40, 8, 8)):
            wanted = item(f"item-{number}", cost=cost)
            shortest_first.join(follower_of(request(wanted, number=number), number, wanted, b"png", 0.0))
        while flight := shortest_first.next_to_decode(max_decoded_cost=20, seconds_per_cost=1.0):
            shortest_first.decode_started(flight)
            order.append(flight.item.mm_hash)
        assert order == ["item-1", "item-2"]


class TestConfig:
    def test_contradictions_are_refused(self) -> None:
        for wrong in (
            {"modalities": ()},
            {"num_decode_processes": 1},
            {"num_decode_processes": -1},
            {"max_batch_cost": 0},
            {"lease_s": 0.0},
        ):
            with pytest.raises(ConfigError):
                EncoderConfig(**{"num_decode_processes": 0, **wrong})
        assert EncoderConfig(num_decode_processes=2, model_dir="/models/demo").modalities == ("image",)
