"""Tests features that clients send in the encoder service, on the real demo checkpoint: they are announced as they are,
without a forward pass, beside pictures that need one."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
import torch
from encoder_bench import KnownCosts, picture, running_bench
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.demo.build import demo_checkpoint
from encoder_pool.encoder_config import EncoderConfig
from encoder_pool.planning import ForwardCosts
from fabric.contracts import EncodeResult, MediaItem
from modalities.family import EncoderModel, Family, FeaturesHeader
from modalities.media import Tensor, features_of, plan_media
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch
CONFIG = EncoderConfig(modalities=("image",), num_decode_processes=0, report_interval_s=0.02)
GRID = (1, 4, 6)
NUM_TOKENS = 6
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@pytest.fixture(scope="module")
def family() -> Family:
    return REGISTRY.load_family(demo_checkpoint())


@pytest.fixture(scope="module")
def encoder(family: Family) -> EncoderModel:
    return family.load_encoder(demo_checkpoint(), "cpu", "float32", ("image",))


def feature(family: Family, seed: int) -> bytes:
    shape = (family.shape.num_levels, NUM_TOKENS, family.shape.hidden_size)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).tobytes()


def given_item(family: Family, data: bytes, index: int = 0) -> MediaItem:
    return plan_media(family, data, FeaturesHeader(NUM_TOKENS, GRID), index, f"part.{index}").item


def codes(result: EncodeResult) -> list[str | None]:
    return [item.error.code if item.error else None for item in result.items]


async def test_given_features_are_announced_as_they_are(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        files = [feature(family, 1), picture(1), feature(family, 2)]
        items = [given_item(family, files[0]), bench.item(files[1], 1), given_item(family, files[2], 2)]
        result = await bench.service.encode(bench.request(files, items), files)
        assert codes(result) == [None, None, None]
        await bench.until(lambda: len(bench.ready) == 3)
        found = {message.unit.mm_hash: await bench.pull(message) for message in bench.ready}
        assert (found[items[0].mm_hash], found[items[2].mm_hash]) == (files[0], files[2])
        assert bench.model.batches == [("image", [items[1].cost])], "only the picture needs a forward pass"
        shapes = {message.unit.mm_hash: message.ticket.shape for message in bench.ready}
        assert shapes[items[0].mm_hash] == (family.shape.num_levels, NUM_TOKENS, family.shape.hidden_size)
        again = await bench.service.encode(bench.request(files[:1], items[:1]), files[:1])
        assert again.items[0].times.is_cache_hit
        await bench.until(lambda: len(bench.ready) == 4)
        await bench.is_idle()


class CountedCosts(ForwardCosts):
    """Counts the passes of which it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[str] = []

    def observe(self, modality: str, cost: int, seconds: float, now_s: float | None = None) -> None:
        self.observed.append(modality)
        super().observe(modality, cost, seconds, now_s)


async def test_storing_features_says_nothing_about_forward_passes(family: Family, encoder: EncoderModel) -> None:
    costs = CountedCosts()
    async with running_bench(family, encoder, CONFIG, costs=costs) as bench:
        files = [feature(family, 1), picture(1)]
        for data, item in ((files[0], given_item(family, files[0])), (files[1], bench.item(files[1], 1))):
            await bench.service.encode(bench.request([data], [item]), [data])
        assert costs.observed == ["image"]
        assert {cost.modality for cost in bench.service.report().costs} == {"image"}
        await bench.is_idle()


async def test_given_features_do_not_wait_for_a_picture_of_their_own_batch(
    family: Family, encoder: EncoderModel
) -> None:
    async with running_bench(family, encoder, CONFIG, costs=KnownCosts(1.0, 1e-6)) as bench:
        bench.model.gate.clear()
        first = asyncio.create_task(bench.service.encode(bench.request([picture(1)]), [picture(1)]))
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        data, other = feature(family, 3), picture(2)
        items = [bench.item(other), given_item(family, data, 1)]
        second = asyncio.create_task(bench.service.encode(bench.request([other, data], items), [other, data]))
        await bench.queued(2)
        bench.model.gate.set()
        await asyncio.gather(first, second)
        assert [modality for modality, _ in bench.model.batches] == ["image", "image"]
        assert [sizes for _, sizes in bench.model.batches] == [[items[0].cost], [items[0].cost]]
        await bench.is_idle()


async def test_features_that_are_not_as_planned_fail_alone(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        good, broken = feature(family, 4), bytearray(feature(family, 5))
        broken[0:4] = np.array([np.nan], np.float32).tobytes()
        files = [good, bytes(broken), feature(family, 6)[:-4]]
        items = [given_item(family, data, index) for index, data in enumerate(files)]
        result = await bench.service.encode(bench.request(files, items), files)
        assert codes(result) == [None, "feature_mismatch", "feature_mismatch"]
        await bench.until(lambda: len(bench.ready) == 1)
        assert await bench.pull(bench.ready[0]) == good
        await bench.is_idle()


async def test_a_small_arena_takes_features_one_after_the_other(family: Family, encoder: EncoderModel) -> None:
    nbytes = len(feature(family, 0))
    async with running_bench(family, encoder, CONFIG, arena_bytes=2 * nbytes + 1024) as bench:
        files = [feature(family, seed) for seed in range(8)]
        items = [given_item(family, data, index) for index, data in enumerate(files)]
        call = asyncio.create_task(bench.service.encode(bench.request(files, items), files))
        for num in range(len(files)):
            await bench.until(lambda num=num: len(bench.ready) > num)
            assert await bench.pull(bench.ready[num]) in files
            bench.release(bench.ready[num])
        assert codes(await call) == [None] * len(files)
        await bench.until(lambda: bench.service.report().arena.num_leases == 0)


async def test_no_process_decodes_features(family: Family, encoder: EncoderModel) -> None:
    """The decode process is stopped meanwhile."""
    model_dir = str(demo_checkpoint())
    config = EncoderConfig(modalities=("image",), num_decode_processes=1, report_interval_s=0.02, model_dir=model_dir)
    async with running_bench(family, encoder, config) as bench:
        (pid,) = bench.service._decoder.pids()
        os.kill(pid, signal.SIGSTOP)
        try:
            data = feature(family, 7)
            result = await bench.service.encode(bench.request([data], [given_item(family, data)]), [data])
        finally:
            os.kill(pid, signal.SIGCONT)
        assert codes(result) == [None]
        await bench.is_idle()


@settings(deadline=None, max_examples=200)
@given(st.lists(NUMBERS, min_size=4, max_size=4), st.sampled_from(["float16", "bfloat16"]))
def test_numbers_are_rounded_as_torch_rounds_them(values: list[float], dtype: str) -> None:
    wanted = torch.tensor(values).to(getattr(torch, dtype))
    tensor = Tensor("F32", (1, 4), np.array(values, np.float32).tobytes())
    if not wanted.isfinite().all():
        wanted = torch.zeros(4, dtype=wanted.dtype)
        tensor = Tensor("F32", (1, 4), bytes(16))
    assert features_of(tensor, 1, 4, dtype, "p") == wanted.view(torch.uint8).numpy().tobytes()
