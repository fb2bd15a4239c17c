"""Tests sounds whose units the encoder's device makes, through the encoder service on the demo checkpoint. The features
equal those from spectrograms that are made where sounds are decoded, and failures are handled with the same care."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from encoder_bench import NEVER_FUSED, Bench, picture, running_bench
from sound_files import encoded, noise

from deploy.demo.build import demo_checkpoint
from encoder_pool.encoder_config import EncoderConfig
from fabric.contracts import EncodeResult, MediaItem
from modalities.family import EncoderInput, EncoderModel, Family, MelOnDevice, Spectrograms, Waveform
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch
CONFIG = EncoderConfig(modalities=("image", "audio"), num_decode_processes=0, report_interval_s=0.02, mel_device="cpu")
SOUNDS = [(16000, 1.0, "wav"), (44100, 11.3, "flac"), (8000, 0.7, "wav"), (48000, 9.0, "ogg-opus"), (44101, 2.0, "wav")]
"""Holds rate, seconds and format of each sound. Some have several units, and no device resamples the rate of the
last."""


class BlockableFamily:
    """Wraps a family so that a test can block its device or make it fail. It records the size of each batch."""

    def __init__(self, family: Family) -> None:
        assert isinstance(family, MelOnDevice)
        self._family: Any = family
        self.is_held = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.poisoned_samples: set[int] = set()
        self.batches: list[list[int]] = []
        """Holds the planned number of samples of each sound, per batch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def decode_waveform(self, data: bytes, item: MediaItem) -> Waveform:
        return self._family.decode_waveform(data, item)

    def load_spectrograms(self, device: str) -> Spectrograms:
        real = self._family.load_spectrograms(device)
        blockable = self

        class Held:
            def units(self, waveforms: Sequence[Waveform]) -> list[list[EncoderInput]]:
                blockable.batches.append([waveform.num_samples for waveform in waveforms])
                blockable.is_held.set()
                assert blockable.go_on.wait(30)
                if blockable.poisoned_samples & set(blockable.batches[-1]):
                    raise RuntimeError("poisoned")
                return real.units(waveforms)

        return Held()


@pytest.fixture(scope="module")
def family() -> Family:
    return REGISTRY.load_family(demo_checkpoint())


@pytest.fixture(scope="module")
def encoder(family: Family) -> EncoderModel:
    return family.load_encoder(demo_checkpoint(), "cpu", "float32", CONFIG.modalities)


@pytest.fixture
def blockable(family: Family) -> BlockableFamily:
    return BlockableFamily(family)


def sound(rate: int, seconds: float, name: str = "wav", seed: int = 0) -> bytes:
    return encoded(noise(round(seconds * rate), seed, 0.05)[None], rate, name)


def sound_items(bench: Bench, files: Sequence[bytes]) -> list[MediaItem]:
    return [bench.item(data, index, modality="audio") for index, data in enumerate(files)]


def encode(bench: Bench, files: Sequence[bytes], items: Sequence[MediaItem] = ()) -> asyncio.Task[EncodeResult]:
    return asyncio.create_task(bench.service.encode(bench.request(files, items), files))


def codes(result: EncodeResult) -> list[str | None]:
    return [item.error.code if item.error else None for item in result.items]


async def waiting(bench: Bench, num_sounds: int) -> None:
    """Waits until `num_sounds` sounds are decoded and their decoding has ended. A decoding task ends a moment after its
    result is there."""
    pipeline = bench.service._pipeline
    await bench.until(lambda: (len(list(pipeline.jobs.queued_sounds())), pipeline.num_decoding) == (num_sounds, 0))


async def check_features(bench: Bench, files: Sequence[bytes], items: Sequence[MediaItem]) -> None:
    """Checks that each unit is what the family's encoder computes from the spectrogram that the host makes."""
    keys = [key for item in items for key in item.unit_keys()]
    unit_to_message = {message.unit: message for message in bench.ready}
    for key, reference in zip(keys, bench.expected(files, items), strict=True):
        found = np.frombuffer(await bench.pull(unit_to_message[key]), np.float32)
        np.testing.assert_allclose(found, np.frombuffer(reference, np.float32), atol=1e-4)


async def test_each_stage_of_each_modality_is_measured_before_the_first_request(
    blockable: BlockableFamily, encoder: EncoderModel
) -> None:
    async with running_bench(blockable, encoder, CONFIG) as bench:
        pipeline = bench.service._pipeline
        for modality in CONFIG.modalities:
            decode_s = pipeline.decode_costs.seconds(modality, 3000)
            assert 0.0 < decode_s < 10.0, f"the decoding of {modality} takes some time"
            prepare_s = pipeline.device_queue.prepare_costs.seconds(modality, 3000)
            assert (prepare_s > 0.0) == (modality == "audio"), "the device prepares sounds only"


async def test_features_of_one_batch_are_the_hosts(blockable: BlockableFamily, encoder: EncoderModel) -> None:
    """Uses several rates, lengths and formats. Sounds that wait together are processed together."""
    async with running_bench(blockable, encoder, CONFIG) as bench:
        blockable.batches.clear()
        files = [sound(*kind, seed=index) for index, kind in enumerate(SOUNDS)]
        items = sound_items(bench, files)
        assert sum(len(item.unit_tokens) > 1 for item in items) == 2
        bench.model.gate.clear()
        first = encode(bench, [picture(1)])
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        call = encode(bench, files, items)
        await waiting(bench, len(files))
        report = bench.service.report()
        assert report.num_items_queued == len(files)
        assert report.queued_cost == sum(item.cost for item in items) + bench.item(picture(1)).cost
        decoded_s = report.items.preprocess_s
        bench.model.gate.set()
        result = await call
        assert codes(await first) == [None]
        assert codes(result) == [None] * len(files)
        assert [sorted(batch) for batch in blockable.batches] == [sorted(num_samples(items))]
        assert bench.service.report().items.preprocess_s > decoded_s
        assert all(min(one.times.decode_s, one.times.preprocess_s, one.times.encode_s) > 0 for one in result.items)
        await check_features(bench, files, items)
        await bench.is_idle()


def num_samples(items: Sequence[MediaItem]) -> list[int]:
    """Returns the numbers of samples at the family's rate. The sounds of these tests consist of whole mel frames of 10
    ms."""
    return [160 * item.grid[0] for item in items]


async def test_a_poisoned_sound_fails_alone(blockable: BlockableFamily, encoder: EncoderModel) -> None:
    async with running_bench(blockable, encoder, CONFIG) as bench:
        blockable.batches.clear()
        files = [sound(rate, seconds, seed=3) for rate, seconds in ((44100, 1.0), (16000, 2.0), (8000, 3.0))]
        items = sound_items(bench, files)
        blockable.poisoned_samples = {num_samples(items)[1]}
        bench.model.gate.clear()
        first = encode(bench, [picture(1)])
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        calls = [encode(bench, files, items), encode(bench, files[1:2], items[1:2])]
        await waiting(bench, 3)
        bench.model.gate.set()
        assert [codes(await one) for one in (first, *calls)] == [
            [None],
            [None, "encode_failed", None],
            ["encode_failed"],
        ]
        assert [len(batch) for batch in blockable.batches] == [3, 1, 1, 1]
        await check_features(bench, files[::2], items[::2])
        blockable.poisoned_samples.clear()
        assert codes(await encode(bench, files[1:2], items[1:2])) == [None], "a failure is not kept"
        await bench.is_idle()


async def test_a_cancelled_sound_leaves_before_the_device_and_on_it(
    blockable: BlockableFamily, encoder: EncoderModel
) -> None:
    async with running_bench(blockable, encoder, CONFIG) as bench:
        blockable.batches.clear()
        blockable.is_held.clear()
        blockable.go_on.clear()
        files = [sound(16000, seconds, seed=4) for seconds in (1.0, 2.0, 3.0)]
        items = sound_items(bench, files)
        calls = [encode(bench, files[:1], items[:1])]
        await bench.until(blockable.is_held.is_set)
        calls += [encode(bench, [data], [item]) for data, item in zip(files[1:], items[1:], strict=True)]
        await waiting(bench, 2)
        for call in calls[:2]:  # One of them is on the device, one is queued ahead of it.
            call.cancel()
        await asyncio.gather(*calls[:2], return_exceptions=True)
        await waiting(bench, 1)
        assert bench.service.report().queued_cost == items[2].cost
        blockable.go_on.set()
        assert codes(await calls[2]) == [None]
        assert blockable.batches == [num_samples(items)[:1], num_samples(items)[2:]]
        assert {message.unit.mm_hash for message in bench.ready} == {items[2].mm_hash}
        await check_features(bench, files[2:], items[2:])
        await bench.is_idle()


async def test_who_asks_again_while_it_is_on_the_device_gets_it(
    blockable: BlockableFamily, encoder: EncoderModel
) -> None:
    """A waiter that joins while the sound is on the device is served by the same job. One that arrives after all
    others have left starts another job."""
    async with running_bench(blockable, encoder, CONFIG) as bench:
        blockable.batches.clear()
        blockable.is_held.clear()
        blockable.go_on.clear()
        files = [sound(16000, 1.0, seed=5)]
        items = sound_items(bench, files)
        left = encode(bench, files, items)
        await bench.until(blockable.is_held.is_set)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        calls = [encode(bench, files, items), encode(bench, files, items)]
        await waiting(bench, 1)
        blockable.go_on.set()
        assert [codes(await one) for one in calls] == [[None], [None]]
        assert blockable.batches == [num_samples(items)] * 2
        assert bench.service.report().items.num_encoded == 1
        await bench.is_idle()


async def test_sounds_stand_in_line_with_the_rest(blockable: BlockableFamily, encoder: EncoderModel) -> None:
    """A picture that needs less time runs before a sound that waits for the device, and no picture waits for long
    sounds."""
    async with running_bench(blockable, encoder, CONFIG, costs=NEVER_FUSED) as bench:
        blockable.batches.clear()
        bench.model.is_stepped = True
        bench.model.gate.clear()
        data = sound(16000, 5.0)
        calls = [encode(bench, [picture(1)])]
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        calls += [encode(bench, [data], sound_items(bench, [data])), encode(bench, [picture(2)])]
        await waiting(bench, 1)
        await bench.queued(1)
        await bench.step()
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        assert (calls[0].done(), blockable.batches) == (True, [])
        await bench.step()
        await bench.until(lambda: len(blockable.batches) == 1)
        bench.model.is_stepped = False
        bench.model.gate.set()
        assert [codes(await call) for call in calls] == [[None]] * 3
        await bench.is_idle()


async def test_a_sound_longer_than_a_batch_stays_with_the_decoder(
    blockable: BlockableFamily, encoder: EncoderModel
) -> None:
    config = EncoderConfig(modalities=CONFIG.modalities, num_decode_processes=0, mel_device="cpu", max_batch_cost=300)
    async with running_bench(blockable, encoder, config) as bench:
        blockable.batches.clear()
        files = [sound(16000, 2.0), sound(16000, 4.0)]
        items = sound_items(bench, files)
        assert codes(await encode(bench, files, items)) == [None, None]
        assert blockable.batches == [num_samples(items)[:1]]
        await check_features(bench, files, items)
        await bench.is_idle()


async def test_broken_sounds_are_refused_as_before(blockable: BlockableFamily, encoder: EncoderModel) -> None:
    async with running_bench(blockable, encoder, CONFIG) as bench:
        blockable.batches.clear()
        data, longer = sound(44100, 1.0), sound(44100, 3.0)
        loud = encoded(np.full((1, 44100), np.inf, dtype=np.float32), 44100, "wav-float")
        items = [bench.item(data, 0, longer, "audio"), bench.item(loud, 1, modality="audio")]
        assert codes(await encode(bench, [data, loud], items)) == ["invalid_media"] * 2
        assert blockable.batches == []
        await bench.is_idle()


async def test_waveforms_come_from_decode_processes(family: Family, encoder: EncoderModel) -> None:
    config = EncoderConfig(
        modalities=CONFIG.modalities, num_decode_processes=1, model_dir=str(demo_checkpoint()), mel_device="cpu"
    )
    async with running_bench(family, encoder, config) as bench:
        files = [sound(44100, 9.0, "flac"), sound(16000, 1.0)]
        items = sound_items(bench, files)
        assert codes(await encode(bench, files, items)) == [None, None]
        await check_features(bench, files, items)
        await bench.is_idle()


async def test_it_is_a_choice(blockable: BlockableFamily, encoder: EncoderModel) -> None:
    config = EncoderConfig(modalities=CONFIG.modalities, num_decode_processes=0)
    async with running_bench(blockable, encoder, config) as bench:
        data = sound(16000, 1.0)
        assert codes(await encode(bench, [data], sound_items(bench, [data]))) == [None]
        assert blockable.batches == []
        await bench.is_idle()
