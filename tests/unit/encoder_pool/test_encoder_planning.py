"""Tests the encoder's small decisions: life cycle, cost fit, cache events, admission and settings."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from encoder_pool.decode_process import check_inputs
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.planning import (
    CostEstimate,
    DecodeLine,
    DecodeRoom,
    EncodeJob,
    EncodeJobs,
    FeatureSpec,
    ForwardCosts,
    check_budget,
    choose_batch,
    refusal,
    split_cost,
    waiter_of,
)
from encoder_pool.planning.batcher import ForwardCost, InputSizes
from encoder_pool.planning.encode_job import Phase
from encoder_pool.planning.feature_table import FeatureState, advance
from fabric.contracts import (
    CHANGE_RUN,
    CallTurn,
    ConfigError,
    Destination,
    EncodeFailed,
    EncodeRequest,
    FeatureEvents,
    FeatureLog,
    InvalidMedia,
    MediaItem,
    MemberId,
    MmHash,
    Overloaded,
    RequestId,
    UnitKey,
    WorkerBackedUp,
)
from modalities.family import EncoderInput, MediaOptions

SPEC = FeatureSpec(2, 8, "float32")
ENCODER = MemberId("encoder-1")


def item(
    name: str, cost: int = 16, units: tuple[int, ...] = (4,), modality: str = "image", index: int = 0
) -> MediaItem:
    return MediaItem(index, modality, MmHash(name), (1, 4, cost // 4), units, cost, f"messages.0.content.{index}")


def request(*items: MediaItem, number: int = 1) -> EncodeRequest:
    destination = Destination(MemberId("worker-1"), "local://worker-1")
    return EncodeRequest(RequestId(f"req-{number}"), 0, MemberId("router-1"), items, destination, (float(number), ""))


def turn(number: int) -> CallTurn:
    return CallTurn(number, (float(number), ""), 0.0)


def free(modality: str, cost: int) -> float:
    return 0.0


ROOM = DecodeRoom(max_cost=20, max_items=8, max_long_cost=12, max_long_items=1)


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

    def test_a_line_below_zero_is_drawn_through_zero(self) -> None:
        cost = ForwardCost()
        cost.observe(1000, 1.0)
        cost.observe(2000, 4.0)
        kept = 0.97
        slope = (1000 * 1.0 * kept + 2000 * 4.0) / (1000**2 * kept + 2000**2)
        assert cost.estimate() == CostEstimate(pytest.approx(slope), 0.0)

    def test_a_line_is_found_again(self) -> None:
        cost = ForwardCost()
        for patches in (16, 784, 100, 4096):
            cost.observe(patches, 0.004 + 2e-5 * patches)
        assert cost.estimate() == pytest.approx((2e-5, 0.004, 0.0))

    def test_one_size_alone_goes_to_the_slope(self) -> None:
        cost = ForwardCost()
        for _ in range(5):
            cost.observe(100, 0.5)
        assert cost.estimate() == pytest.approx((0.005, 0.0, 100.0)), "and another size is asked for"

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

    def test_a_busy_moment_is_outweighed_after_a_silence_and_the_line_keeps_its_shape(self) -> None:
        cost, silent = ForwardCost(), ForwardCost()
        for each in (cost, silent):
            for number in range(60):
                patches = (100, 400)[number % 2]
                each.observe(patches, 3.0 * (0.004 + 2e-5 * patches), 0.01 * number)
        for number in range(8):
            patches = (100, 400)[number % 2]
            cost.observe(patches, 0.004 + 2e-5 * patches, 1.0 + 0.01 * number)
            silent.observe(patches, 0.004 + 2e-5 * patches, 101.0 + 0.01 * number)
        assert silent.estimate().seconds_per_cost == pytest.approx(2e-5, rel=0.5)
        assert silent.estimate().overhead_s == pytest.approx(0.004, rel=0.5)
        assert cost.estimate().overhead_s > 2 * 0.004


def seen_pictures_and_sounds() -> ForwardCosts:
    costs = ForwardCosts()
    for number in range(40):
        size = (100, 1000)[number % 2]
        costs.observe("image", size, 0.002 + 1e-5 * size, 0.05 * number)
        costs.observe("audio", size, 0.001 + 1e-6 * size, 0.05 * number)
    return costs


class TestForwardCosts:
    def test_a_patch_and_a_mel_frame_cost_what_each_was_seen_to(self) -> None:
        costs = ForwardCosts()
        for size in (100, 1000):
            costs.observe("image", size, 0.002 + 1e-5 * size)
            costs.observe("audio", size, 0.001 + 1e-6 * size)
        assert costs.estimate("image") == pytest.approx((1e-5, 0.002, 0.0))
        assert costs.estimate("audio") == pytest.approx((1e-6, 0.001, 0.0))
        assert costs.work_s("audio", 500) == pytest.approx(5e-4)
        assert 1e-6 < costs.mixed().seconds_per_cost < 1e-5

    def test_all_modalities_together_age_as_each_does(self) -> None:
        costs = ForwardCosts()
        for number in range(60):
            size = (100, 400)[number % 2]
            costs.observe("image", size, 3.0 * (0.004 + 2e-5 * size), 0.01 * number)
        for number in range(8):
            size = (100, 400)[number % 2]
            costs.observe("image", size, 0.004 + 2e-5 * size, 101.0 + 0.01 * number)
        assert costs.mixed() == costs.estimate("image")

    @pytest.mark.parametrize("factor", [2.0, 0.5])
    def test_a_few_passes_of_one_modality_show_a_change_of_all(self, factor: float) -> None:
        costs = seen_pictures_and_sounds()
        for number in range(CHANGE_RUN):
            size = (100, 1000)[number % 2]
            costs.observe("image", size, factor * (0.002 + 1e-5 * size), 2.0 + 0.01 * number)
        assert costs.pass_s("image", 500) == pytest.approx(factor * 0.007, rel=0.1)
        assert costs.pass_s("audio", 500) == pytest.approx(factor * 0.0015, rel=0.15)

    def test_a_pause_in_one_pass_is_no_change(self) -> None:
        costs = seen_pictures_and_sounds()
        for number in range(CHANGE_RUN):
            costs.observe("image", 1000, 0.024 if number == 1 else 0.012, 2.0 + 0.01 * number)
        assert costs.pass_s("image", 1000) == pytest.approx(0.012, rel=0.1)
        assert costs.pass_s("audio", 500) == pytest.approx(0.0015, rel=0.01)

    def test_a_size_that_was_never_seen_is_no_surprise(self) -> None:
        """Until two sizes differ, the overhead of a pass is unknown, so a larger pass says nothing of the device."""
        costs = ForwardCosts()
        for number in range(40):
            costs.observe("image", 100, 0.004, 0.01 * number)
            costs.observe("audio", 100, 0.002, 0.01 * number)
        for number in range(CHANGE_RUN):
            costs.observe("image", 800, 0.005, 1.0 + 0.01 * number)
        assert costs.pass_s("audio", 100) == pytest.approx(0.002)

    def test_what_was_never_seen_costs_nothing_yet(self) -> None:
        assert ForwardCosts().estimate("video") == CostEstimate(0.0, 0.0)
        assert ForwardCosts().work_s("video", 10) == 0.0

    def test_each_modality_has_seen_sizes_that_differ_or_not(self) -> None:
        costs = ForwardCosts()
        assert not costs.has_spread("image")
        for size in (100, 1000):
            costs.observe("image", size, 0.01)
            costs.observe("audio", 500, 0.01)
        assert costs.has_spread("image")
        assert not costs.has_spread("audio")
        assert not costs.has_spread("video")


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


class TestFeatureSpec:
    def test_an_item_has_the_models_levels_unless_it_says_how_many(self) -> None:
        assert (SPEC.shape(5), SPEC.nbytes(5)) == ((2, 5, 8), 2 * 5 * 8 * 4)
        assert (SPEC.shape(5, 1), SPEC.nbytes(5, 1)) == ((1, 5, 8), 5 * 8 * 4)


class TestAdmission:
    def test_what_can_never_be_encoded_is_named(self) -> None:
        refused = {
            "unsupported_modality": item("a", modality="video"),
            "protocol_error": item("a", units=()),
            "unit_too_large": item("a", units=(4, 17)),
        }
        for code, refused_item in refused.items():
            error = refusal(refused_item, ("image",), SPEC, arena_bytes=1024, max_decode_bytes=100)
            assert error is not None
            assert error.code == code
            assert (
                error.message
                == {
                    "unsupported_modality": "this encoder does not encode video; it encodes image",
                    "protocol_error": "every unit of item 0 must have tokens, and the item must have a cost",
                    "unit_too_large": "a feature takes 1088 bytes, but the encoder's arena has only 1024",
                }[code]
            )
        assert refusal(item("a", units=(16,)), ("image",), SPEC, arena_bytes=1024, max_decode_bytes=100) is None

    def test_what_can_never_be_decoded_is_refused_with_what_it_takes_and_what_there_is(self) -> None:
        large = msgspec.structs.replace(item("a"), decode_bytes=101)
        error = refusal(large, ("image",), SPEC, arena_bytes=1024, max_decode_bytes=100)
        assert isinstance(error, InvalidMedia)
        assert error.message == "decoding the medium takes 101 bytes of memory, but all media together have only 100"
        assert error.param == large.part
        assert refusal(large, ("image",), SPEC, arena_bytes=1024, max_decode_bytes=101) is None

    def test_the_budget_counts_only_what_is_new(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=lambda _, cost: 0.075 * cost)
        cached = {UnitKey(MmHash("cached"), 0)}

        def check(*items: MediaItem) -> None:
            check_budget(items, jobs, cached.__contains__, 32)

        check(item("huge", cost=1000))  # An item of any cost passes if it is alone and nothing is queued.
        jobs.join(waiter_of(request(item("a", cost=20)), turn(1), item("a", cost=20), b"", 0.0))
        check(item("b", cost=12))
        check(item("a", cost=20), item("b", cost=12), item("cached", cost=500))
        with pytest.raises(Overloaded) as caught:
            check(item("b", cost=13))
        assert caught.value.retry_after_s == 1.5

    def test_what_only_the_share_of_a_worker_is_too_small_for_names_the_worker(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=lambda _, cost: 0.075 * cost)
        wanted = request(item("a", cost=20))
        jobs.join(waiter_of(wanted, turn(1), item("a", cost=20), b"", 0.0))
        stuck, well = wanted.destination.worker_id, MemberId("another")
        new = [item("b", cost=6)]
        check_budget(new, jobs, lambda _: False, 32)
        check_budget(new, jobs, lambda _: False, 32, well)
        with pytest.raises(WorkerBackedUp, match=stuck):
            check_budget(new, jobs, lambda _: False, 32, stuck)
        check_budget(new, jobs, lambda _: True, 32, stuck)
        with pytest.raises(Overloaded):
            check_budget([item("b", cost=13)], jobs, lambda _: False, 32, stuck)

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

    def test_units_never_cut_a_group_of_frames_that_is_averaged(self) -> None:
        options = MediaOptions(num_pooled_frames=2).encode()
        planned = msgspec.structs.replace(item("film", 28, (4, 4), "video"), grid=(7, 2, 2), options=options)
        patches = np.zeros((4, 3), np.float32)

        def units(*steps: int) -> list[EncoderInput]:
            return [EncoderInput("video", np.tile(patches, (count, 1)), (count, 2, 2)) for count in steps]

        check_inputs(units(4, 3), planned)  # The last group may be shorter.
        with pytest.raises(EncodeFailed):
            check_inputs(units(3, 4), planned)
        check_inputs(units(3, 4), msgspec.structs.replace(planned, options=""))


class TestInputSizes:
    def test_what_takes_less_memory_counts_for_less(self) -> None:
        sizes = InputSizes()
        sizes.observe("image", 1, 1000)
        sizes.observe("audio", 10, 100)
        assert (sizes.in_patches("image", 3), sizes.in_patches("audio", 10)) == (3, 0.1)
        assert sizes.in_patches("video", 7) == 7, "none was seen"


class TestEncodeJobs:
    def test_units_stand_where_the_rows_before_them_end(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        wanted = item("film", cost=16, units=(1, 3, 4))
        job = jobs.join(waiter_of(request(wanted), turn(1), wanted, b"film", 0.0))
        assert job.places == (0.0, 0.125, 0.5, 1.0)

    def test_long_items_are_left_out_where_none_may_begin(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        for number, one in enumerate((item("film", 8, (2, 2)), item("picture", 8))):
            jobs.join(waiter_of(request(one, number=number), turn(number), one, b"file", 0.0))

        def found(*, may_be_long: bool) -> list[str]:
            in_line = jobs.to_decode(lambda worker_id, job: True, may_be_long=may_be_long)
            return [job.item.mm_hash for _, job in in_line]

        assert (found(may_be_long=True), found(may_be_long=False)) == (["film", "picture"], ["picture"])

    def test_waiters_share_a_job_and_its_last_one_ends_it(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        one, two = (waiter_of(request(item("a"), number=n), turn(n), item("a"), b"png", 0.0) for n in (1, 2))
        job = jobs.join(one)
        assert jobs.join(two) is job
        assert jobs.totals.queued_cost == 16
        assert jobs.leave(one) is None
        assert jobs.leave(one) is None
        assert jobs.leave(two) is job
        assert jobs.totals.queued_cost == 0
        jobs.check_invariants()

    def test_a_unit_in_the_forward_outlives_its_waiters(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        wanted = item("a", cost=32, units=(4, 4))
        waiter = waiter_of(request(wanted), turn(1), wanted, b"png", 0.0)
        job = jobs.join(waiter)
        jobs.decode_started(job)
        jobs.decoded(job, [EncoderInput("image", np.zeros((16, 3), np.float32), (1, 4, 4))] * 2)
        assert job.phase is Phase.ENCODING
        jobs.forward_started(UnitKey(MmHash("a"), 0))
        assert jobs.leave(waiter) is None
        assert list(jobs.queued_units()) == []
        assert jobs.totals.queued_cost == 16
        jobs.check_invariants()
        assert jobs.forward_ended(UnitKey(MmHash("a"), 0)) is job
        assert jobs.totals.queued_cost == 0

    def test_what_a_decoder_still_gives_for_nobody_is_not_taken(self) -> None:
        """The item's last waiter leaves while a unit is in the forward pass, and the job ends after that pass; the
        job takes no parts in either state."""
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        wanted = item("a", cost=32, units=(4, 4))
        waiter = waiter_of(request(wanted), turn(1), wanted, b"png", 0.0)
        job = jobs.join(waiter)
        jobs.decode_started(job)
        pixels = EncoderInput("image", np.zeros((16, 3), np.float32), (1, 4, 4))
        assert jobs.decoded_part(job, [pixels])
        jobs.forward_started(UnitKey(MmHash("a"), 0))
        assert jobs.leave(waiter) is None
        assert not jobs.decoded_part(job, [pixels])
        assert jobs.forward_ended(UnitKey(MmHash("a"), 0)) is job
        assert not jobs.decoded_part(job, [pixels])
        assert job.num_decoded == 1
        jobs.check_invariants()

    def test_a_job_that_made_all_that_is_missed_ends_while_it_is_decoded(self) -> None:
        """The job's last waiter misses a unit that the job has already passed, so this waiter must join
        another job, and this job takes no more parts."""
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        wanted = item("a", cost=32, units=(4, 4))
        first, second = (waiter_of(request(wanted, number=n), turn(n), wanted, b"png", 0.0) for n in (1, 2))
        job = jobs.join(first)
        jobs.decode_started(job)
        pixels = EncoderInput("image", np.zeros((16, 3), np.float32), (1, 4, 4))
        assert jobs.decoded_part(job, [pixels])
        jobs.forward_started(UnitKey(MmHash("a"), 0))
        first.missing.discard(0)
        assert jobs.forward_ended(UnitKey(MmHash("a"), 0)) is None
        second.missing.discard(1)
        jobs.join(second)
        assert jobs.leave(first) is job
        assert not jobs.decoded_part(job, [pixels])
        assert jobs.take_waiters(job) == [second]
        jobs.check_invariants()
        assert jobs.totals.queued_cost == 0

    def test_pixels_lie_decoded_within_their_budget_but_one_item_always_may(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        for number, cost in enumerate((40, 8, 8)):
            wanted = item(f"item-{number}", cost=cost)
            jobs.join(waiter_of(request(wanted, number=number), turn(number), wanted, b"png", 0.0))
        order = []
        while job := DecodeLine(jobs, ROOM).next(0.0):
            jobs.decode_started(job)
            order.append(job.item.mm_hash)
        assert order == ["item-0"]
        order = []
        shortest_first = EncodeJobs(patience=4.0, to_seconds=lambda _, cost: cost)
        for number, cost in enumerate((40, 8, 8)):
            wanted = item(f"item-{number}", cost=cost)
            shortest_first.join(waiter_of(request(wanted, number=number), turn(number), wanted, b"png", 0.0))
        while job := DecodeLine(shortest_first, ROOM).next(0.0):
            shortest_first.decode_started(job)
            order.append(job.item.mm_hash)
        assert order == ["item-1", "item-2"]

    def test_sounds_count_by_the_memory_they_take(self) -> None:
        """A mel frame takes an eighth of a patch's memory here, which is known once the encoder has seen one of
        each."""
        jobs = EncodeJobs(patience=4.0, to_seconds=lambda modality, cost: cost * (1 if modality == "audio" else 1000))

        def join(name: str, modality: str, cost: int) -> EncodeJob:
            one = item(name, cost, (2,), modality)
            return jobs.join(waiter_of(request(one), turn(1), one, b"file", 0.0))

        for modality, width in (("image", 16), ("audio", 2)):
            job = join(modality, modality, 10)
            jobs.decode_started(job)
            assert jobs.decoded_cost == 10, "nothing smaller was seen before"
            jobs.decoded(job, [EncoderInput(modality, np.zeros((10, width), np.float32), (1, 1, 10))])
            assert jobs.decoded_cost == (10 if modality == "image" else 1.25)
            jobs.leave(next(iter(job.waiters)))
        for number in range(4):  # These are 160 frames, which take as much memory as 20 patches and fill the room.
            join(f"sound-{number}", "audio", 40)
        job = join("picture", "image", 1)
        order = []
        while found := DecodeLine(jobs, ROOM).next(0.0):
            jobs.decode_started(found)
            order.append(found.item.modality)
        assert order == ["audio"] * 4
        jobs.leave(next(iter(job.waiters)))
        assert jobs.decoded_cost == 20

    def test_long_items_never_take_the_last_decoder_nor_the_last_room(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        wanted = [item("film", 8, (2, 2)), item("clip", 8, (2, 2)), item("picture", 8)]
        for number, one in enumerate(wanted):
            jobs.join(waiter_of(request(one, number=number), turn(number), one, b"file", 0.0))
        first = DecodeLine(jobs, ROOM).next(0.0)
        assert first is not None
        assert first.item.mm_hash == "film"
        jobs.decode_started(first)
        second = DecodeLine(jobs, ROOM).next(0.0)
        assert second is not None
        assert second.item.mm_hash == "picture"
        jobs.decode_started(second)
        assert DecodeLine(jobs, ROOM).next(0.0) is None, "one long item is being decoded"
        jobs.decoded(first, [EncoderInput("video", np.zeros((4, 3), np.float32), (1, 2, 2))] * 2)
        assert DecodeLine(jobs, ROOM).next(0.0) is None, "a long item leaves room for a short one"
        jobs.leave(next(iter(first.waiters)))
        third = DecodeLine(jobs, ROOM._replace(max_long_cost=16)).next(0.0)
        assert third is not None
        assert third.item.mm_hash == "clip"

    def test_no_more_items_are_prepared_than_may_be_in_flight(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        for number in range(3):
            one = item(f"item-{number}", cost=1)
            jobs.join(waiter_of(request(one, number=number), turn(number), one, b"png", 0.0))
        room = ROOM._replace(max_items=2)
        for _ in range(2):
            job = DecodeLine(jobs, room).next(0.0)
            assert job is not None
            jobs.decode_started(job)
        assert DecodeLine(jobs, room).next(0.0) is None
        jobs.decoded(job, [EncoderInput("image", np.zeros((1, 3), np.float32), (1, 1, 1))])
        assert DecodeLine(jobs, room).next(0.0) is None
        jobs.forward_started(UnitKey(job.item.mm_hash, 0))
        assert DecodeLine(jobs, room).next(0.0) is not None, "what is in the forward is prepared no more"
        assert jobs.totals.num_in_flight == 2

    def test_priority_comes_before_length_and_age(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=lambda _, cost: float(cost))
        for number, (name, cost, priority) in enumerate([("old", 4, 1), ("long", 400, 0), ("short", 40, 0)]):
            one = turn(number)
            one.priority = priority
            job = jobs.join(waiter_of(request(item(name, cost)), one, item(name, cost), b"", 0.0))
            jobs.decode_started(job)
            jobs.decoded(job, [EncoderInput("image", np.zeros((1, 3), np.float32), (1, 1, cost))])
        assert [unit.key.mm_hash for unit in jobs.queued_units()] == ["short", "long", "old"]

    def test_a_video_and_its_sound_track_take_turns(self) -> None:
        jobs = EncodeJobs(patience=4.0, to_seconds=free)
        video = item("video", 16, (4, 4), "video", index=1)
        sound = msgspec.structs.replace(item("sound", 8, (2, 2, 2, 2), "audio", index=2), anchor=1)
        shared = turn(1)
        for one in (video, sound):
            job = jobs.join(waiter_of(request(video, sound), shared, one, b"mp4", 0.0))
            jobs.decode_started(job)
            inputs = [EncoderInput(one.modality, np.zeros((1, 3), np.float32), (1, 1, 1)) for _ in one.unit_tokens]
            jobs.decoded(job, inputs)
        order = []
        while units := list(jobs.queued_units()):
            (first, *_) = choose_batch(units, 1, lambda _: CostEstimate(1.0, 0.0))
            jobs.forward_started(first.key)
            jobs.forward_ended(first.key)
            order.append((first.key.mm_hash, first.key.unit))
        assert order == [("video", 0), ("sound", 0), ("sound", 1), ("video", 1), ("sound", 2), ("sound", 3)]


class TestConfig:
    def test_contradictions_are_refused(self) -> None:
        for wrong in (
            {"modalities": ()},
            {"num_decode_processes": 1},
            {"num_decode_processes": -1},
            {"max_batch_cost": 0},
            {"max_items_in_flight": 0},
            {"lease_s": 0.0},
        ):
            with pytest.raises(ConfigError):
                EncoderConfig(**{"modalities": ("image",), "num_decode_processes": 0, **wrong})
        assert EncoderConfig(("image",), model_dir="/models/demo").num_decode_processes == 2
