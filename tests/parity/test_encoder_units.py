"""Tests videos and sounds in the encoder service, on the real demo checkpoint: units, their order, and what happens to
them on failures. The tests check orders of events, not times: they let the forward passes run one by one."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_bench import ALWAYS_FUSED, NEVER_FUSED, Bench, KnownCosts, picture, running_bench
from media_corpus import Clip, encode_video, sound_file

from deploy.demo.build import demo_checkpoint
from encoder_pool import decode_process
from encoder_pool.encoder_config import EncoderConfig
from fabric.contracts import EncodeResult, InvalidMedia, MediaItem, UnitReady
from modalities.family import EncoderInput, EncoderModel, Family, MediaOptions
from modalities.media import frame_sampling as video_rows
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch
MODALITIES = ("image", "video", "audio")
CONFIG = EncoderConfig(modalities=MODALITIES, num_decode_processes=0, report_interval_s=0.02)
OPTIONS = MediaOptions(fps=8, max_frames=120)
"""With these options the family takes as many frames of a film as it can."""


@pytest.fixture(scope="module")
def family() -> Family:
    return REGISTRY.load_family(demo_checkpoint())


@pytest.fixture(scope="module")
def encoder(family: Family) -> EncoderModel:
    return family.load_encoder(demo_checkpoint(), "cpu", "float32", MODALITIES)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a film consist of four units instead of two. The patch works because films are planned and decoded in this
    process."""
    monkeypatch.setattr(video_rows, "UNIT_PATCHES", 400)


def film(num_frames: int = 120, seed: int = 0) -> bytes:
    """Returns a video with frames of 10 x 10 patches, of which the family samples 32."""
    rng = np.random.default_rng(seed)
    frames = [rng.integers(0, 256, (160, 160, 3), dtype=np.uint8) for _ in range(4)]
    clip = Clip(codec="mpeg4", num_frames=num_frames, fps=8)
    return encode_video([frames[at % 4] for at in range(num_frames)], clip)


def film_item(bench: Bench, data: bytes, index: int = 0) -> MediaItem:
    return bench.item(data, index, modality="video", options=OPTIONS)


def encode(bench: Bench, files: Sequence[bytes], items: Sequence[MediaItem]) -> asyncio.Task[EncodeResult]:
    return asyncio.create_task(bench.service.encode(bench.request(files, items), files))


def codes(result: EncodeResult) -> list[str | None]:
    return [item.error.code if item.error else None for item in result.items]


async def test_every_modality_arrives_as_its_encoder_made_it(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        files = [picture(1), film(40), sound_file("wav-16")]
        items = [
            bench.item(files[0]),
            film_item(bench, files[1], 1),
            bench.item(files[2], 2, modality="audio"),
        ]
        assert [len(item.unit_tokens) > 1 for item in items] == [False, True, False]
        assert codes(await encode(bench, files, items)) == [None, None, None]
        keys = [key for item in items for key in item.unit_keys()]
        await bench.until(lambda: len(bench.ready) == len(keys))
        unit_to_bytes = {message.unit: await bench.pull(message) for message in bench.ready}
        for key, reference in zip(keys, bench.expected(files, items), strict=True):
            found, wanted = (np.frombuffer(payload, np.float32) for payload in (unit_to_bytes[key], reference))
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        report = bench.service.report()
        assert {cost.modality for cost in report.costs} == set(MODALITIES)
        items = report.items
        assert items.num_received == items.num_encoded == items.num_decoded == 3
        assert min(items.decode_s, items.preprocess_s, report.device.forward_s) > 0
        await bench.is_idle()


async def test_a_unit_of_a_film_is_announced_before_the_next_is_encoded(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG, costs=NEVER_FUSED) as bench:
        bench.model.is_stepped = True
        bench.model.gate.clear()
        data = film()
        item = film_item(bench, data)
        call = encode(bench, [data], [item])
        for done in range(len(item.unit_tokens)):
            assert [message.unit.unit for message in bench.ready] == list(range(done))
            await bench.step()
            await bench.until(lambda done=done: len(bench.ready) == done + 1)
        result = await call
        names = [event.name for event in result.trace if event.name.startswith("unit_")]
        assert names == ["unit_encoded", "unit_announced"] * len(item.unit_tokens)
        await bench.is_idle()


async def test_a_forward_pass_takes_its_time_once_for_an_item_with_several_units_in_it(
    family: Family, encoder: EncoderModel, small_units: None
) -> None:
    async with running_bench(family, encoder, CONFIG, costs=ALWAYS_FUSED) as bench:
        data = film()
        item = film_item(bench, data)
        bench.model.gate.clear()
        # The forward pass of a picture lets all units of the film wait, whether they are decoded together or not.
        first = encode(bench, [picture(9)], [])
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        call = encode(bench, [data], [item])
        await bench.queued(4)
        bench.model.gate.set()
        (still,), (done,) = (await first).items, (await call).items
        assert bench.model.batch_sizes == [1, 4]
        device = bench.service.report().device
        assert done.times.batch_cost == item.cost
        assert still.times.batch_cost + done.times.batch_cost == device.encoded_cost
        assert still.times.encode_s + done.times.encode_s == pytest.approx(device.forward_s)
        await bench.is_idle()


class Streaming:
    """Wraps a family so that it yields a video's units one by one. The second unit is not ready before `go_on` is set;
    if `fails` is true, it then fails."""

    def __init__(self, family: Family, *, fails: bool) -> None:
        self._family = family
        self._fails = fails
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def preprocess_units(self, data: bytes, item: MediaItem) -> Iterator[EncoderInput]:
        for number, unit in enumerate(self._family.preprocess(data, item)):
            if number == 1 and item.modality == "video" and item.part != "calibration":
                assert self.go_on.wait(30)
                if self._fails:
                    raise InvalidMedia("broken further on", param=item.part)
            yield unit


@pytest.mark.parametrize("fails", [False, True])
async def test_a_films_first_unit_is_encoded_while_the_rest_is_decoded(
    family: Family, encoder: EncoderModel, small_units: None, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(decode_process, "PART_S", 0.0)
    streaming = Streaming(family, fails=fails)
    async with running_bench(streaming, encoder, CONFIG, costs=NEVER_FUSED) as bench:
        data, still = film(), picture(1)
        item = film_item(bench, data)
        assert len(item.unit_tokens) == 4
        call = encode(bench, [data], [item])
        await bench.until(lambda: len(bench.ready) == 1)
        assert (bench.service.report().num_decoding, bench.service.report().items.num_decoded) == (1, 0)
        assert codes(await encode(bench, [still], [])) == [None], "nor does a picture wait for the film's decoding"
        streaming.go_on.set()
        assert codes(await call) == ["invalid_media" if fails else None]
        await bench.until(lambda: len(bench.ready) == (2 if fails else 5))
        pulled = [await bench.pull(one) for one in bench.ready if one.unit.mm_hash == item.mm_hash]
        for found, wanted in zip(pulled, bench.expected([data], [item]), strict=not fails):
            np.testing.assert_allclose(np.frombuffer(found, np.float32), np.frombuffer(wanted, np.float32), atol=1e-5)
        await bench.is_idle()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
async def test_a_film_is_decoded_at_a_lower_priority_than_pictures(family: Family, encoder: EncoderModel) -> None:
    config = EncoderConfig(modalities=MODALITIES, num_decode_processes=1, model_dir=str(demo_checkpoint()))
    async with running_bench(family, encoder, config) as bench:
        (pid,) = bench.service._decoder.pids()

        def niceness() -> list[int]:
            return sorted(
                os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()
            )

        ours = os.getpriority(os.PRIO_PROCESS, 0)
        assert codes(await encode(bench, [picture(1)], [])) == [None]
        assert set(niceness()) == {ours}
        data = film()
        item = film_item(bench, data, 1)
        assert codes(await encode(bench, [data], [item])) == [None]
        assert set(niceness()) == {ours, min(ours + decode_process.LOW_PRIORITY, 19)}
        assert os.getpriority(os.PRIO_PROCESS, pid) == ours, "the thread that decodes pictures"
        ready = [message for message in bench.ready if message.unit.mm_hash == item.mm_hash]
        for message, wanted in zip(ready, bench.expected([data], [item]), strict=True):
            found = np.frombuffer(await bench.pull(message), np.float32)
            np.testing.assert_allclose(found, np.frombuffer(wanted, np.float32), atol=1e-5)
        await bench.is_idle()


@pytest.mark.parametrize("num_done", [0, 1, 2])
async def test_a_film_delays_a_picture_by_the_unit_in_the_forward(
    family: Family, encoder: EncoderModel, small_units: None, num_done: int
) -> None:
    """The delay does not depend on the progress of the film of 120 frames, all of which is decoded and waiting."""
    async with running_bench(family, encoder, CONFIG, costs=NEVER_FUSED) as bench:
        bench.model.is_stepped = True
        bench.model.gate.clear()
        data, still = film(), picture(1)
        item = film_item(bench, data)
        num_units = len(item.unit_tokens)
        calls = [encode(bench, [data], [item])]
        await bench.queued(num_units - 1)
        for _ in range(num_done):
            await bench.step()
        calls.append(encode(bench, [still], []))
        await bench.queued(num_units - num_done)
        await bench.step()
        await bench.step()
        assert codes(await calls[1]) == [None]
        assert [modality for modality, _ in bench.model.batches] == ["video"] * (num_done + 1) + ["image"]
        bench.model.is_stepped = False
        bench.model.gate.set()
        assert codes(await calls[0]) == [None]
        await bench.is_idle()


async def test_a_film_is_not_starved_by_pictures_that_keep_coming(family: Family, encoder: EncoderModel) -> None:
    """A picture is always waiting. The clock advances by the known costs of the forward passes."""
    async with running_bench(family, encoder, CONFIG, costs=NEVER_FUSED) as bench:
        bench.model.is_stepped = True
        bench.model.gate.clear()
        data = film(40)
        item = film_item(bench, data)
        unit_cost = item.cost // len(item.unit_tokens)
        call = encode(bench, [data], [item])
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        pictures: list[asyncio.Task[EncodeResult]] = []
        picture_cost = bench.item(picture(0)).cost
        most = (2 * CONFIG.patience + 2) * item.cost / picture_cost
        while not call.done():
            still = picture(len(pictures))
            pictures.append(encode(bench, [still], []))
            num_items = len(pictures) + 1
            await bench.until(lambda num_items=num_items: bench.service.report().items.num_decoded == num_items)
            assert len(pictures) <= most, "the film waits for the last picture"
            bench.clock.advance(max(unit_cost, picture_cost) * 1e-6)
            await bench.step()
        assert codes(call.result()) == [None]
        assert sum(modality == "image" for modality, _ in bench.model.batches) > 1
        bench.model.is_stepped = False
        bench.model.gate.set()
        assert all(codes(one) == [None] for one in await asyncio.gather(*pictures))
        await bench.is_idle()


async def test_small_units_of_a_film_share_a_forward_and_a_poisoned_one_fails_alone(
    family: Family, encoder: EncoderModel
) -> None:
    async with running_bench(family, encoder, CONFIG, costs=ALWAYS_FUSED) as bench:
        good, bad = film(40, seed=1), film(30, seed=2)
        items = [film_item(bench, good), film_item(bench, bad)]
        units = [
            [unit.num_patches for unit in family.preprocess(*pair)] for pair in zip((good, bad), items, strict=True)
        ]
        assert len(set(units[0]) | set(units[1])) == 3, "two films, cut alike but for their last unit"
        bench.model.poison_patches = {units[1][-1]}
        bench.model.gate.clear()
        first = encode(bench, [picture(9)], [])
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        calls = [encode(bench, [data], [item]) for data, item in zip((good, bad), items, strict=True)]
        await bench.queued(4)
        bench.model.gate.set()
        assert [codes(one) for one in await asyncio.gather(first, *calls)] == [[None], [None], ["encode_failed"]]
        assert bench.model.batch_sizes == [1, 4, 1, 1, 1, 1, 1], "a harmless forward is the last"
        await bench.is_idle()


async def test_a_call_that_is_cancelled_leaves_at_once_but_for_the_unit_in_the_forward(
    family: Family, encoder: EncoderModel
) -> None:
    async with running_bench(family, encoder, CONFIG, costs=NEVER_FUSED) as bench:
        bench.model.gate.clear()
        data = film()
        item = film_item(bench, data)
        call = encode(bench, [data], [item])
        await bench.queued(len(item.unit_tokens) - 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        report = bench.service.report()
        assert (report.num_queued, report.num_encoding, report.num_items_pending) == (0, 1, 0)
        assert report.arena.used_bytes == report.arena.encoding_bytes > 0
        bench.model.gate.set()
        await bench.until(lambda: bench.service.report().num_encoding == 0)
        assert bench.ready == []
        assert bench.model.batch_sizes == [1]
        await bench.is_idle()


async def test_32_waiting_pictures_go_into_one_forward_within_its_cost(family: Family, encoder: EncoderModel) -> None:
    for max_batch_cost, sizes in ((CONFIG.max_batch_cost, [1, 32]), (16 * 96, [1, 16, 16])):
        config = EncoderConfig(modalities=("image",), num_decode_processes=0, max_batch_cost=max_batch_cost)
        async with running_bench(family, encoder, config) as bench:
            files = [picture(seed, 96, 64) for seed in range(33)]
            assert bench.item(files[0]).cost == 96
            bench.model.gate.clear()
            calls = [encode(bench, [files[0]], [])]
            await bench.until(lambda: bench.service.report().num_encoding == 1)
            calls += [encode(bench, [data], []) for data in files[1:]]
            await bench.queued(32)
            bench.model.gate.set()
            assert all(codes(one) == [None] for one in await asyncio.gather(*calls))
            assert bench.model.batch_sizes == sizes
            assert all(sum(costs) <= max_batch_cost for _, costs in bench.model.batches)
            await bench.is_idle()


async def test_three_times_more_than_the_arena_holds_passes_through_it(family: Family, encoder: EncoderModel) -> None:
    """Sends films, pictures and sounds at once, with readers that come late. The arena never exceeds its budget, no
    unit is lost, and all memory is free at the end."""
    tiny = KnownCosts(overhead_s=1e-5, seconds_per_cost=1e-6)
    data = film(40)
    item_bytes = family.shape.num_levels * family.shape.hidden_size * 4
    async with running_bench(family, encoder, CONFIG, arena_bytes=600 * item_bytes, costs=tiny) as bench:
        calls: list[tuple[Sequence[MediaItem], asyncio.Task[EncodeResult]]] = []
        for number in range(8):
            files = [film(40, seed=number), picture(number), sound_file("wav-16"), data]
            items = [
                film_item(bench, files[0]),
                bench.item(files[1], 1),
                bench.item(files[2], 2, modality="audio"),
                film_item(bench, files[3], 3),
            ]
            calls.append((items, encode(bench, files, items)))
        num_rows = sum(item.num_tokens for items, _ in calls for item in items[:2])
        assert num_rows > 3 * 600
        read: list[UnitReady] = []
        high = 0
        while not all(task.done() for _, task in calls):
            usage = bench.service._source.usage()
            assert usage.used_bytes <= usage.total_bytes
            high = max(high, usage.used_bytes)
            while len(read) < len(bench.ready):
                read.append(bench.ready[len(read)])
                await bench.pull(read[-1])
                bench.release(read[-1])
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)  # Spinning would block the threads that encode.
        assert [codes(task.result()) for _, task in calls] == [[None] * 4] * 8
        assert high > usage.total_bytes / 2
        announced = {(message.request_id, message.unit) for message in bench.ready}
        for number, (items, _) in enumerate(calls):
            assert {(f"req-{number + 1}", key) for item in items for key in item.unit_keys()} <= announced
        assert bench.service.report().arena.num_evictions > 0
        await bench.is_idle()
