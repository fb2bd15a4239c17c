"""Tests that the stage times of an item tell its stages apart, in a pipeline whose decoder, device and clock the test
drives by hand."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from encoder_doubles import HandDecoder, HandForward, RecordingPlane

from encoder_pool.decode_process import Decoded
from encoder_pool.encode_call import Announcer
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.encoder_service import encoder_report
from encoder_pool.pipeline import Pipeline
from encoder_pool.planning import FeatureSpec, FeatureTable, ForwardResult, SoundResult
from fabric.contracts import (
    NUM_BINS,
    Destination,
    EncodeRequest,
    EncodeResult,
    EncoderReport,
    FeatureLog,
    ManualClock,
    MediaItem,
    MemberId,
    MmHash,
    RequestId,
    StageTimes,
    key_of,
    wait_s,
)
from fabric.transport import LocalChannelHub, LocalFeatureSource
from modalities.family import EncoderInput, Waveform

ENCODER = MemberId("encoder-1")
SECONDS_PER_COST = 1e-5
PIXELS = np.zeros((1, 1), np.float32)
CONFIG = EncoderConfig(modalities=("image", "video", "audio"), num_decode_processes=0)


class Bench:
    """A `Bench` is a pipeline that does nothing by itself."""

    def __init__(self) -> None:
        self.clock, self.decoder = ManualClock(), HandDecoder()
        self.forward = HandForward(CONFIG.max_batch_cost)
        source = LocalFeatureSource(LocalChannelHub(), ENCODER, 2**20)
        self.log = FeatureLog(ENCODER, 1)
        self.table = FeatureTable(source, self.clock, 60.0, self.log)
        self.table.worker_came(MemberId("worker-1"))
        announcer = Announcer(ENCODER, RecordingPlane(), source, self.table, 60.0)
        self.pipeline = Pipeline(
            ENCODER, CONFIG, self.table, announcer, self.decoder, self.forward, self.clock, lambda: None
        )
        for modality in CONFIG.modalities:
            for cost in (100, 1000):
                self.pipeline.costs.observe(modality, cost, cost * SECONDS_PER_COST)
            self.pipeline.decode_costs.calibrate(modality, (100, 0.01), (1000, 0.1))
        self.pipeline.device_queue.prepare_costs.calibrate("audio", (100, 0.002), (1000, 0.02))
        self.pipeline.open(FeatureSpec(1, 4, "float32"))

    def call(self, name: str, modality: str, cost: int, num_units: int = 1) -> asyncio.Task[EncodeResult]:
        item = MediaItem(0, modality, MmHash(name), (1, 1, 1), (2,) * num_units, cost, "part")
        destination = Destination(MemberId("worker-1"), "local://worker-1")
        number = len(self.pipeline.live_attempts())
        request = EncodeRequest(
            RequestId(f"{name}-{number}"), 0, MemberId("router-1"), (item,), destination, (self.clock.now(), name)
        )
        return asyncio.create_task(self.pipeline.encode(request, [b"file"]))

    def report(self) -> EncoderReport:
        return encoder_report(ENCODER, 1, 1, self.pipeline, self.table, CONFIG.max_items_in_flight)

    async def after(self, seconds: float) -> None:
        """Lets the loop do everything that can be done, and then lets time pass."""
        await settle()
        self.clock.advance(seconds)

    async def end_decode(self, name: str, decode_s: float = 0.0, waveform: Waveform | None = None) -> None:
        await settle()
        (entry,) = [one for one in self.decoder.open if one.item.mm_hash == name]
        inputs = [] if waveform else entry.inputs(entry.num_left)
        entry.future.set_result(Decoded(inputs, decode_s, waveform=waveform))
        await settle()

    async def end_forward(self, seconds: float) -> None:
        await settle()
        self.clock.advance(seconds)
        assert self.forward.job is not None, "no pass is running"
        (batch, done), self.forward.job = self.forward.job, None
        done(ForwardResult([None] * len(batch), seconds))
        await settle()

    async def end_sounds(self, seconds: float) -> None:
        await settle()
        self.clock.advance(seconds)
        assert self.forward.sounds is not None, "no sound is being prepared"
        (batch, done), self.forward.sounds = self.forward.sounds, None
        units = [[EncoderInput("audio", PIXELS, (1, 1, 1))] * len(job.item.unit_tokens) for job in batch]
        done(SoundResult(list(units), seconds))
        await settle()


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def times_of(call: asyncio.Task[EncodeResult]) -> StageTimes:
    (item,) = (await call).items
    assert item.error is None
    return item.times


def seconds_of(times: StageTimes) -> dict[str, float]:
    names = ("decode_wait_s", "decode_s", "preprocess_s", "device_wait_s", "device_prepare_s", "encode_s", "queue_s")
    return {name: getattr(times, name) for name in (*names, "total_s")}


async def test_the_stages_of_a_picture_follow_each_other(bench: Bench) -> None:
    others = [bench.call(name, "image", 500) for name in ("first", "second")]
    await bench.after(0.0)
    picture = bench.call("picture", "image", 1000)
    await bench.after(0.25)
    await bench.end_decode("first", 0.2)
    await bench.after(0.5)
    await bench.end_decode("picture", 0.3)
    await bench.end_forward(1.0)
    await bench.end_forward(2.0)
    assert seconds_of(await times_of(picture)) == {
        "decode_wait_s": 0.25,
        "decode_s": 0.3,
        "preprocess_s": pytest.approx(0.2),
        "device_wait_s": 1.0,
        "device_prepare_s": 0.0,
        "encode_s": 2.0,
        "queue_s": 1.25,
        "total_s": 3.75,
    }
    for call in others:
        call.cancel()


async def test_a_sound_is_prepared_on_the_device(bench: Bench) -> None:
    first, second = (bench.call(name, "audio", cost) for name, cost in (("first", 1000), ("second", 3000)))
    waveform = Waveform(np.zeros(4, np.float32), 16_000, 4)
    await bench.after(0.5)
    await bench.end_decode("first", 0.5, waveform)
    await bench.end_decode("second", 0.5, waveform)
    await bench.end_sounds(1.0)
    await bench.end_forward(2.0)
    await bench.end_sounds(0.5)
    await bench.end_forward(4.0)
    assert (await times_of(first)).device_wait_s == 0.0
    times = await times_of(second)
    assert seconds_of(times) == {
        "decode_wait_s": 0.0,
        "decode_s": 0.5,
        "preprocess_s": 0.5,
        "device_wait_s": 3.0,
        "device_prepare_s": 0.5,
        "encode_s": 4.0,
        "queue_s": 3.0,
        "total_s": 8.0,
    }
    assert times.device_prepare_cost == 3000


async def test_a_video_is_encoded_while_it_is_decoded(bench: Bench) -> None:
    film = bench.call("film", "video", 300, num_units=3)
    await bench.after(1.0)
    (entry,) = bench.decoder.open
    entry.on_units(entry.inputs(1))
    await bench.end_forward(0.5)
    await bench.after(0.25)
    entry.on_units(entry.inputs(1))
    await bench.after(0.0)
    await bench.end_decode("film", 1.0)
    await bench.end_forward(0.5)
    await bench.end_forward(0.5)
    times = await times_of(film)
    assert seconds_of(times) == {
        "decode_wait_s": 0.0,
        "decode_s": 1.0,
        "preprocess_s": 0.75,
        "device_wait_s": 0.0,
        "device_prepare_s": 0.0,
        "encode_s": 1.5,
        "queue_s": 0.0,
        "total_s": 2.75,
    }
    assert (times.num_passes, times.batch_cost, times.batch_items) == (3, 300, 1)


async def test_who_joins_a_flight_waits_from_then_on_and_a_cached_item_has_no_stages(bench: Bench) -> None:
    blocking = bench.call("blocking", "image", 100)
    first = bench.call("picture", "image", 1000)
    await bench.end_decode("blocking")
    await bench.after(0.5)
    second = bench.call("picture", "image", 1000)
    await bench.end_decode("picture", 0.5)
    await bench.end_forward(1.0)
    await bench.end_forward(2.0)
    await blocking
    times = [await times_of(call) for call in (first, second)]
    assert [one.is_shared for one in times] == [False, True]
    assert [one.total_s for one in times] == [3.5, 3.0]
    assert [(one.decode_s, one.device_wait_s, one.encode_s) for one in times] == [(0.5, 1.0, 2.0)] * 2
    cached = await times_of(bench.call("picture", "image", 1000))
    assert cached == StageTimes(is_cache_hit=True)


async def test_a_picture_behind_a_video_of_61440_patches_waits_for_one_unit_of_it(bench: Bench) -> None:
    """The router predicts from the report what the pipeline then does: 29 ms, and not the 614 ms of the video."""
    film = bench.call("film", "video", 61_440, num_units=20)
    await bench.end_decode("film")
    unit_s = 61_440 / 20 * SECONDS_PER_COST
    await bench.after(unit_s - 0.029)
    report = bench.report()
    assert report.forward_left_s == pytest.approx(0.029)
    assert sum(report.queue_profile[:NUM_BINS]) == pytest.approx(19 * unit_s)
    key = key_of(500 * SECONDS_PER_COST, report.patience)
    predicted_s = wait_s(report.queue_profile, report.forward_left_s, key, 0.0, report.unit_s)
    picture = bench.call("picture", "image", 500)
    await bench.end_decode("picture")
    await bench.end_forward(0.029)
    await bench.end_forward(0.005)
    times = await times_of(picture)
    assert predicted_s == pytest.approx(times.device_wait_s) == pytest.approx(0.029)
    film.cancel()


async def test_the_report_says_what_waits_to_be_decoded(bench: Bench) -> None:
    assert bench.report().num_decode_processes == 2
    calls = [bench.call("film", "video", 10_000, num_units=4)]
    calls += [bench.call(f"picture-{number}", "image", 1000) for number in range(3)]
    await bench.after(0.04)
    report = bench.report()
    assert report.decode_left_s == pytest.approx(0.06), "until the picture that is being decoded is done"
    assert report.decode_short_s == pytest.approx(0.2), "the pictures that wait"
    assert report.decode_queue_s == pytest.approx(0.06 + 0.2 + 0.96)
    for call in calls:
        call.cancel()


async def test_a_mel_frame_is_no_patch(bench: Bench) -> None:
    """Each modality has its own costs in the report, of each stage."""
    for _ in range(3):
        bench.pipeline.costs.observe("audio", 3000, 0.003)
    (audio,) = [cost for cost in bench.report().costs if cost.modality == "audio"]
    (image,) = [cost for cost in bench.report().costs if cost.modality == "image"]
    assert audio.seconds_per_cost < 0.5 * image.seconds_per_cost
    assert audio.device_prepare_s_per_cost == pytest.approx(2e-5)
    assert image.device_prepare_s_per_cost == 0.0
    assert image.decode_s_per_cost == pytest.approx(1e-4)
