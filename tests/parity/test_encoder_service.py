"""Tests the encoder service on the real demo checkpoint: what a worker pulls is what the family's encoder computes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from encoder_bench import ROUTER, WORKER, Bench, picture, running_bench

from deploy.demo.build import demo_checkpoint
from encoder_pool.encoder_config import EncoderConfig
from fabric.contracts import (
    AbortAttempt,
    ConfigError,
    EncodeResult,
    EncoderLost,
    EncoderReport,
    ErrorInfo,
    FeatureEvents,
    Overloaded,
    ProtocolError,
    RouterHeartbeat,
    SnapshotRequest,
)
from modalities.family import EncoderInput, EncoderModel, Family
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch
CONFIG = EncoderConfig(("image",), num_decode_processes=0, report_interval_s=0.02)


@pytest.fixture(scope="module")
def family() -> Family:
    return REGISTRY.load_family(demo_checkpoint())


@pytest.fixture(scope="module")
def encoder(family: Family) -> EncoderModel:
    return family.load_encoder(demo_checkpoint(), "cpu", "float32", ["image"])


def errors(result: EncodeResult) -> list[ErrorInfo | None]:
    return [item.error for item in result.items]


async def queue_behind(bench: Bench, calls: Sequence[Sequence[bytes]]) -> list[asyncio.Task[EncodeResult]]:
    """Starts the calls while a picture of another call holds the forward pass, and returns when all are decoded and
    queued."""
    bench.model.gate.clear()
    first = [picture(1000 + bench.num_requests)]
    tasks = [asyncio.create_task(bench.service.encode(bench.request(first), first))]
    await bench.until(lambda: bench.service.report().num_encoding == 1)
    tasks += [asyncio.create_task(bench.service.encode(bench.request(files), files)) for files in calls]
    num_queued = len({data for files in calls for data in files})
    pipeline = bench.service._pipeline
    await bench.until(lambda: sum(len(job.unit_to_input) for job in pipeline.jobs) == num_queued)
    return tasks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_worker_pulls_what_the_encoder_computes(family: Family, dtype: str) -> None:
    encoder = family.load_encoder(demo_checkpoint(), "cpu", dtype, ["image"])
    async with running_bench(family, encoder, CONFIG) as bench:
        files = [picture(1, 96, 64), picture(2, 64, 160)]
        result = await bench.service.encode(bench.request(files), files)
        assert errors(result) == [None, None]
        await bench.until(lambda: len(bench.ready) == 2)
        items = bench.request(files).items
        # The service encodes the shorter one first.
        ready = [next(one for one in bench.ready if one.unit.mm_hash == item.mm_hash) for item in items]
        pulled = [await bench.pull(message) for message in ready]
        expected = bench.expected(files)
        if dtype == "bfloat16":
            assert pulled == expected
        for payload, reference in zip(pulled, expected, strict=True):
            assert len(payload) == len(reference)
            if dtype == "float32":
                found, wanted = np.frombuffer(payload, np.float32), np.frombuffer(reference, np.float32)
                np.testing.assert_allclose(found, wanted, atol=1e-5)
        tokens = [item.num_tokens for item in items]
        shapes = [message.ticket.shape for message in ready]
        assert shapes == [(family.shape.num_levels, count, family.shape.hidden_size) for count in tokens]
        assert {message.ticket.dtype for message in ready} == {dtype}
        names = [event.name for event in result.trace]
        assert names.count("unit_encoded") == names.count("unit_announced") == 2
        (received,) = (event.at_s for event in result.trace if event.name == "received")
        for index in range(2):
            decoded, encoded = (
                next(e for e in result.trace if e.name == name and e.detail["item"] == index)
                for name in ("decoded", "unit_encoded")
            )
            assert received <= decoded.detail["from_s"] <= encoded.detail["from_s"] <= encoded.at_s
            assert decoded.detail["from_s"] <= decoded.at_s
        await bench.is_idle()
        assert bench.service.report().arena.cached_bytes == sum(map(len, expected))


async def test_images_of_several_requests_share_one_forward(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        calls = [[picture(1), picture(2)], [picture(3)], [picture(4, 64, 64)]]
        tasks = await queue_behind(bench, calls)
        bench.model.gate.set()
        results = await asyncio.gather(*tasks)
        assert bench.model.batch_sizes == [1, 4]
        assert [item.times.batch_items for result in results[1:] for item in result.items] == [4, 4, 4, 4]
        assert all(error is None for result in results for error in errors(result))
        await bench.until(lambda: len(bench.ready) == 5)
        by_unit = {message.unit.mm_hash: await bench.pull(message) for message in bench.ready}
        for files in calls:
            for data, reference in zip(files, bench.expected(files), strict=True):
                found = np.frombuffer(by_unit[bench.item(data).mm_hash], np.float32)
                np.testing.assert_allclose(found, np.frombuffer(reference, np.float32), atol=1e-5)
        await bench.is_idle()


async def test_a_batch_stays_within_its_cost(family: Family, encoder: EncoderModel) -> None:
    files = [picture(seed) for seed in range(4)]
    cost = REGISTRY.modality("image").probe(files[0], "p")
    config = EncoderConfig(("image",), num_decode_processes=0, max_batch_cost=2 * family.plan(cost).cost)
    async with running_bench(family, encoder, config) as bench:
        tasks = await queue_behind(bench, [files])
        bench.model.gate.set()
        await asyncio.gather(*tasks)
        assert bench.model.batch_sizes == [1, 2, 2]


async def test_the_same_image_is_encoded_once(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        files = [picture(1)]
        tasks = await queue_behind(bench, [files, files, [*files, *files]])
        bench.model.gate.set()
        results = await asyncio.gather(*tasks)
        assert bench.model.batch_sizes == [1, 1]
        assert [len(result.items) for result in results[1:]] == [1, 1, 2]
        late = await bench.service.encode(bench.request(files), files)
        assert late.items[0].times.is_cache_hit
        assert bench.model.batch_sizes == [1, 1]
        assert bench.service.report().items.num_cache_hits == 1
        mm_hash = bench.item(files[0]).mm_hash
        await bench.until(lambda: sum(message.unit.mm_hash == mm_hash for message in bench.ready) == 4)
        assert len({message.request_id for message in bench.ready}) == 5
        await bench.is_idle()


async def test_a_truncated_image_fails_alone_and_names_its_part(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        whole, broken = picture(1), picture(2)[:-200]
        files = [whole, broken, picture(3)]
        result = await bench.service.encode(bench.request(files), files)
        assert [error is None for error in errors(result)] == [True, False, True]
        error = result.items[1].error
        assert error is not None
        assert (error.code, error.param) == ("invalid_media", "messages.0.content.2")
        assert "messages.0.content.2" in error.message
        await bench.until(lambda: len(bench.ready) == 2)
        await bench.is_idle()


async def test_a_shared_failure_names_each_waiters_own_part(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        broken, other = picture(2)[:-200], picture(3)
        first, second = bench.request([broken]), bench.request([other, broken])
        results = await asyncio.gather(
            bench.service.encode(first, [broken]), bench.service.encode(second, [other, broken])
        )
        params = [error.param for result in results for error in errors(result) if error]
        assert params == ["messages.0.content.1", "messages.0.content.2"]


async def test_a_file_that_is_not_what_was_planned_is_refused(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        small, large = picture(1, 64, 64), picture(2, 256, 128)
        item = msgspec.structs.replace(bench.item(small), mm_hash=bench.item(large).mm_hash)
        result = await bench.service.encode(bench.request([large], [item]), [large])
        error = result.items[0].error
        assert error is not None
        assert error.code == "invalid_media"
        await bench.is_idle()


async def test_a_poisoned_unit_fails_alone(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        poison = picture(9, 256, 128)
        bench.model.poison_patches = {bench.item(poison).cost}
        tasks = await queue_behind(bench, [[picture(1), poison], [picture(2)]])
        bench.model.gate.set()
        results = await asyncio.gather(*tasks)
        codes = [[error.code if error else None for error in errors(result)] for result in results]
        assert codes == [[None], [None, "encode_failed"], [None]]
        assert bench.model.batch_sizes == [1, 3, 1, 1, 1, 1], "a harmless forward behind the one that failed"
        bench.service.check_health()
        await bench.is_idle()


async def test_a_batch_that_runs_out_of_memory_is_split(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        bench.model.max_units = 1
        tasks = await queue_behind(bench, [[picture(1), picture(2)], [picture(3)]])
        bench.model.gate.set()
        results = await asyncio.gather(*tasks)
        assert all(error is None for result in results for error in errors(result))
        assert bench.model.batch_sizes == [1, 3, 1, 2, 1, 1]
        bench.service.check_health()


async def test_a_device_that_fails_everything_loses_the_encoder_and_blames_no_picture(
    family: Family, encoder: EncoderModel
) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        told: list[str] = []
        bench.service.on_lost(lambda: told.append("lost"))
        bench.model.max_units = 0
        tasks = await queue_behind(bench, [[picture(1), picture(2)], [picture(3)]])
        bench.model.gate.set()
        results = await asyncio.gather(*tasks)
        codes = [[error.code if error else None for error in errors(result)] for result in results]
        assert codes == [["encoder_lost"], ["encoder_lost"] * 2, ["encoder_lost"]]
        assert bench.model.batch_sizes == [1, 1], "the first picture and a harmless forward"
        with pytest.raises(EncoderLost):
            bench.service.check_health()
        bench.service.tick()
        bench.service.tick()
        assert told == ["lost"]
        await bench.is_idle()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_a_spoilt_feature_fails_alone_and_is_never_stored(
    family: Family, encoder: EncoderModel, value: float
) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        spoilt = picture(9, 256, 128)
        bench.model.spoilt_patches, bench.model.spoils_with = {bench.item(spoilt).cost}, value
        tasks = await queue_behind(bench, [[picture(1), spoilt], [picture(2)]])
        bench.model.gate.set()
        results = await asyncio.gather(*tasks)
        codes = [[error.code if error else None for error in errors(result)] for result in results]
        assert codes == [[None], [None, "encode_failed"], [None]]
        assert bench.model.batch_sizes == [1, 3, 3, 1, 1, 1, 1, 1], (
            "twice each, and a harmless forward behind the failure"
        )
        assert bench.item(spoilt).mm_hash not in {message.unit.mm_hash for message in bench.ready}
        bench.model.spoilt_patches = set()
        result = await bench.service.encode(bench.request([spoilt]), [spoilt])
        assert errors(result) == [None], "nothing of it was kept"
        (payload,) = bench.expected([spoilt])
        np.testing.assert_allclose(
            np.frombuffer(await bench.pull(bench.ready[-1]), np.float32), np.frombuffer(payload, np.float32), atol=1e-5
        )
        bench.service.check_health()
        await bench.is_idle()


async def test_a_forward_that_was_spoilt_once_is_computed_again(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        files = [picture(1), picture(2)]
        bench.model.num_spoilt_forwards = 1
        result = await bench.service.encode(bench.request(files), files)
        assert errors(result) == [None, None]
        pulled = {message.unit.mm_hash: await bench.pull(message) for message in bench.ready}
        for data, reference in zip(files, bench.expected(files), strict=True):
            found = np.frombuffer(pulled[bench.item(data).mm_hash], np.float32)
            np.testing.assert_allclose(found, np.frombuffer(reference, np.float32), atol=1e-5)
        bench.service.check_health()
        await bench.is_idle()


async def test_a_device_whose_numbers_are_never_finite_loses_the_encoder(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        bench.model.num_spoilt_forwards = 1_000
        files = [picture(1), picture(2)]
        result = await bench.service.encode(bench.request(files), files)
        assert [error.code if error else None for error in errors(result)] == ["encoder_lost"] * 2, "retried elsewhere"
        with pytest.raises(EncoderLost):
            bench.service.check_health()
        assert bench.ready == []
        await bench.is_idle()


async def test_weights_that_compute_nothing_finite_are_refused_at_the_start(
    family: Family, encoder: EncoderModel
) -> None:
    class Spoilt:
        def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
            return [feature * float("nan") for feature in encoder.encode(inputs)]

    with pytest.raises(ConfigError, match="not finite"):
        async with running_bench(family, Spoilt(), CONFIG):
            pass


async def test_a_cancelled_call_takes_its_units_out_of_the_queue(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        files = [picture(1), picture(2)]
        first, doomed, other = await queue_behind(bench, [files, files[1:]])
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)
        assert doomed.cancelled()
        assert bench.service.report().num_queued == 1
        bench.model.gate.set()
        await asyncio.gather(first, other)
        assert bench.model.batch_sizes == [1, 1]
        await bench.is_idle()


async def test_an_abort_ends_the_attempt_and_its_leases(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        held = [picture(1)]
        request = bench.request(held)
        await bench.service.encode(request, held)
        assert bench.service.report().arena.num_leases == 1
        tasks = await queue_behind(bench, [[picture(2)]])
        waiting = bench.num_requests
        bench.router.send("local://encoder-1", AbortAttempt(request.request_id, 0))
        bench.router.send("local://encoder-1", AbortAttempt(f"req-{waiting}", 0))
        result = await tasks[1]
        assert [error.code for error in errors(result) if error] == ["aborted"]
        report = bench.service.report()
        assert (report.arena.num_leases, report.num_queued) == (0, 0)
        bench.model.gate.set()
        await tasks[0]
        await bench.is_idle()


@pytest.mark.parametrize("how", ["worker", "router", "router_lease"])
async def test_who_leaves_takes_requests_and_leases_along(family: Family, encoder: EncoderModel, how: str) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        bench.router.send("local://encoder-1", RouterHeartbeat(ROUTER.member_id, ROUTER.address, 3.0))
        await bench.until(lambda: bool(bench.told))
        held = [picture(1)]
        await bench.service.encode(bench.request(held), held)
        tasks = await queue_behind(bench, [[picture(2)]])
        if how == "router_lease":
            bench.clock.advance(3.0)
        else:
            bench.service.update_members([ROUTER if how == "worker" else WORKER])
        result = await tasks[1]
        code = "worker_lost" if how == "worker" else "aborted"
        assert [error.code for error in errors(result) if error] == [code]
        report = bench.service.report()
        assert (report.arena.num_leases, report.num_queued) == (0, 0)
        bench.model.gate.set()
        await tasks[0]
        await bench.until(lambda: bench.service.report().arena.used_bytes == 0)
        bench.service.check_invariants()


@pytest.mark.parametrize("how", ["release", "expiry"])
async def test_a_full_arena_waits_for_readers_and_evicts_nothing_unread(
    family: Family, encoder: EncoderModel, how: str
) -> None:
    files = [picture(seed) for seed in range(4)]
    header = REGISTRY.modality("image").probe(files[0], "p")
    tokens = sum(family.plan(header).unit_tokens)
    feature_bytes = family.shape.num_levels * tokens * family.shape.hidden_size * 4
    async with running_bench(family, encoder, CONFIG, arena_bytes=2 * (feature_bytes + 128)) as bench:
        task = asyncio.create_task(bench.service.encode(bench.request(files), files))
        await bench.until(lambda: len(bench.ready) == 2)
        bench.service.tick()
        assert bench.service.report().num_queued == 2
        for message in list(bench.ready):
            assert await bench.pull(message) in bench.expected(files)
        if how == "release":
            bench.release(bench.ready[0])
            await bench.until(lambda: len(bench.ready) == 3)
            bench.release(bench.ready[1])
        else:
            bench.clock.advance(CONFIG.lease_s)
        result = await task
        assert errors(result) == [None] * 4
        assert bench.service.report().arena.used_bytes == 2 * feature_bytes
        await bench.is_idle()


async def test_what_never_fits_or_is_not_loaded_is_refused_alone(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG, arena_bytes=2**15) as bench:
        files = [picture(1, 160, 128), picture(2, 512, 512), picture(3)]
        items = [bench.item(data, index) for index, data in enumerate(files)]
        items[2] = msgspec.structs.replace(items[2], modality="video")
        result = await bench.service.encode(bench.request(files, items), files)
        assert [error.code if error else None for error in errors(result)] == [
            None,
            "unit_too_large",
            "unsupported_modality",
        ]
        with pytest.raises(ProtocolError):
            await bench.service.encode(bench.request(files), files[:1])
        await bench.is_idle()


async def test_a_full_queue_refuses_before_any_work(family: Family, encoder: EncoderModel) -> None:
    config = EncoderConfig(("image",), num_decode_processes=0, max_queue_cost=1)
    async with running_bench(family, encoder, config) as bench:
        tasks = await queue_behind(bench, [])
        refused, joined = [picture(7)], [picture(1000)]
        with pytest.raises(Overloaded) as caught:
            await bench.service.encode(bench.request(refused), refused)
        assert caught.value.retry_after_s is not None
        tasks.append(asyncio.create_task(bench.service.encode(bench.request(joined), joined)))
        bench.model.gate.set()
        results = await asyncio.gather(*tasks)
        assert [errors(result) for result in results] == [[None], [None]]
        assert bench.model.batch_sizes == [1]


async def test_routers_learn_of_load_and_cache(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        files = [picture(1)]
        mm_hash = bench.item(files[0]).mm_hash
        bench.router.send("local://encoder-1", RouterHeartbeat(ROUTER.member_id, ROUTER.address, 3.0))
        await bench.until(lambda: bool(bench.told))
        assert bench.told[0] == FeatureEvents("encoder-1", 1, 0, is_snapshot=True)
        request = bench.request(files)
        await bench.service.encode(request, files)
        attempt = (request.request_id, request.attempt)
        await bench.until(
            lambda: any(isinstance(one, EncoderReport) and attempt in one.acknowledged for one in bench.told)
        )
        stored = FeatureEvents("encoder-1", 1, 1, stored=(mm_hash,))
        await bench.until(lambda: stored in bench.told)
        bench.told.clear()
        bench.router.send("local://encoder-1", SnapshotRequest(ROUTER.member_id, ROUTER.address))
        snapshot = FeatureEvents("encoder-1", 1, 1, stored=(mm_hash,), is_snapshot=True)
        await bench.until(lambda: snapshot in bench.told)
        reports = [one for one in bench.told if isinstance(one, EncoderReport)]
        assert all(later.seq > earlier.seq for earlier, later in itertools.pairwise(reports))
        report = bench.service.report()
        assert report.items.num_encoded == report.device.num_batches == 1
        assert report.encode_s_per_cost + report.batch_overhead_s > 0
        await bench.is_idle()


async def test_a_dead_plane_or_channel_is_ill_health(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        bench.service.check_health()
        for name, part in (("feature channel", bench.service._source), ("message plane", bench.service._plane)):
            part.close()
            with pytest.raises(EncoderLost, match=name):
                bench.service.check_health()


async def test_stopping_ends_open_calls(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        tasks = await queue_behind(bench, [[picture(1)]])
        stopping = asyncio.create_task(bench.service.stop())
        results = await asyncio.gather(*tasks)
        bench.model.gate.set()
        await stopping
        assert [error.code for result in results for error in errors(result) if error] == ["encoder_lost"] * 2
        with pytest.raises(EncoderLost):
            await bench.service.encode(bench.request([]), [])
        bench.service.check_health()


async def test_a_device_that_hangs_is_found_out_though_the_encoder_answers(
    family: Family, encoder: EncoderModel
) -> None:
    """The encoder answers each call within its time limit, as one that is only busy would."""
    async with running_bench(family, encoder, EncoderConfig(("image",), num_decode_processes=0)) as bench:
        bench.model.gate.clear()
        files = [picture(1)]
        request = msgspec.structs.replace(bench.request(files), time_left_s=10.0)
        call = asyncio.create_task(bench.service.encode(request, files))
        await bench.until(lambda: bench.service.report().num_encoding == 1)
        bench.clock.advance(10.0)
        (result,) = (await call).items
        assert result.error is not None
        assert result.error.code == "machine_busy"
        bench.service.check_health()
        bench.clock.advance(EncoderConfig(("image",), num_decode_processes=0).max_forward_s)
        with pytest.raises(EncoderLost, match="300 s"):
            bench.service.check_health()
        bench.model.gate.set()
        await bench.until(lambda: bench.service.report().num_encoding == 0)
        bench.service.check_health()
        await bench.is_idle()


async def test_a_draining_encoder_stays_until_its_features_are_read(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        files = [picture(1), picture(2)]
        await bench.service.encode(bench.request(files), files)
        await bench.until(lambda: len(bench.ready) == 2)
        draining = asyncio.create_task(bench.service.drain(60.0))
        first, second = bench.ready
        bench.release(first)
        await bench.until(lambda: bench.service.report().arena.num_leases == 1)
        assert not draining.done()
        assert await bench.pull(second)  # What was announced can still be read.
        bench.release(second)
        assert await draining == 0


async def test_a_draining_encoder_does_not_wait_for_a_worker_that_left(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        await bench.service.encode(bench.request([picture(1)]), [picture(1)])
        await bench.until(lambda: len(bench.ready) == 1)
        draining = asyncio.create_task(bench.service.drain(60.0))
        await asyncio.sleep(0)
        bench.service.update_members([ROUTER])
        assert await draining == 0


async def test_a_draining_encoder_gives_up_at_its_limit(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, CONFIG) as bench:
        await bench.service.encode(bench.request([picture(1)]), [picture(1)])
        await bench.until(lambda: len(bench.ready) == 1)
        assert await bench.service.drain(0.0) == 1
        await bench.service.stop()
        assert await bench.service.drain(60.0) == 0
