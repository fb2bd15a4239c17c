"""Tests decoding in spawned processes: they return the same features, and the service handles the death of such a
process and of its parent."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import io
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest
from encoder_bench import picture, running_bench
from PIL import Image

from deploy.demo.build import demo_checkpoint
from encoder_pool import decoder as decode
from encoder_pool.decode_process import Decoded, DecodeJob, decode_item, enter_decoding
from encoder_pool.decoder import DecodePool
from encoder_pool.encoder_config import DEFAULT_LIMITS, EncoderConfig
from fabric.contracts import EncodeFailed, EncodeRequest, EncodeResult, ErrorInfo, MediaItem
from fabric.sandbox import SandboxProcess, array_pipe
from fabric.sandbox import process as sandbox_process
from modalities.family import EncoderInput, EncoderModel, Family
from modalities.media import plan_media
from modalities.registry import REGISTRY
from router.api import http_error

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def family() -> Family:
    return REGISTRY.load_family(demo_checkpoint())


@pytest.fixture(scope="module")
def encoder(family: Family) -> EncoderModel:
    return family.load_encoder(demo_checkpoint(), "cpu", "float32", ["image"])


def errors(result: EncodeResult) -> list[ErrorInfo | None]:
    return [item.error for item in result.items]


async def test_decode_processes_give_the_same_and_survive_one_that_dies(family: Family, encoder: EncoderModel) -> None:
    config = EncoderConfig(("image",), num_decode_processes=1, model_dir=str(demo_checkpoint()))
    async with running_bench(family, encoder, config) as bench:
        files, broken = [picture(1)], picture(2)[:-200]
        both = [*files, broken]
        result = await bench.service.encode(bench.request(both), both)
        assert [error.code if error else None for error in errors(result)] == [None, "invalid_media"]
        await bench.until(lambda: len(bench.ready) == 1)
        found = np.frombuffer(await bench.pull(bench.ready[0]), np.float32)
        np.testing.assert_allclose(found, np.frombuffer(bench.expected(files)[0], np.float32), atol=1e-5)
        (pid,) = bench.service._decoder.pids()
        os.kill(pid, signal.SIGKILL)
        files = [picture(3)]
        result = await bench.service.encode(bench.request(files), files)
        assert errors(result) == [None]
        await bench.is_idle()


async def test_a_file_that_kills_its_process_is_tried_twice_and_fails(family: Family, encoder: EncoderModel) -> None:
    config = EncoderConfig(("image",), num_decode_processes=1, model_dir=str(demo_checkpoint()))
    async with running_bench(family, encoder, config) as bench:
        files = [flat_picture(4_700)]
        call = asyncio.create_task(bench.service.encode(bench.request(files), files))
        while not call.done():  # Each process that works on the file dies, as if the file were the cause.
            for process in bench.service._decoder._processes:
                if process.is_busy:
                    process.kill()
            await asyncio.sleep(0.001)
        error = call.result().items[0].error
        assert error is not None
        assert (error.code, error.param) == ("encode_failed", "messages.0.content.1")
        files = [picture(2)]
        assert errors(await bench.service.encode(bench.request(files), files)) == [None]
        await bench.is_idle()


def limited_to(**limits: object) -> EncoderConfig:
    """Returns a config with one process, and with the default limits except for the given ones."""
    limits_of_item = dataclasses.replace(DEFAULT_LIMITS, **limits)
    model_dir = str(demo_checkpoint())
    return EncoderConfig(("image",), num_decode_processes=1, model_dir=model_dir, decode_limits=limits_of_item)


async def test_an_item_that_takes_too_long_is_refused_alone(family: Family, encoder: EncoderModel) -> None:
    """The limit counts processor time, regardless of the elapsed time."""
    async with running_bench(family, encoder, limited_to(modality_to_cpu_s={"image": 0.05})) as bench:
        files = [flat_picture(9_400), picture(2)]
        large, small = errors(await bench.service.encode(bench.request(files), files))
        assert small is None
        assert large is not None
        assert (large.code, large.param) == ("invalid_media", "messages.0.content.1")
        assert "more than 0.05 s of processor time" in large.message
        await bench.is_idle()


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_item_that_is_late_through_no_fault_of_its_own_may_come_again(
    family: Family, encoder: EncoderModel, is_late: bool
) -> None:
    """The test stops the decode process: before the item arrives, or while the process decodes it."""
    async with running_bench(family, encoder, limited_to(modality_to_timeout_s={"image": 0.5})) as bench:
        pool = bench.service._decoder
        (pid,) = pool.pids()
        files = [flat_picture(9_400)]
        if not is_late:
            os.kill(pid, signal.SIGSTOP)
        call = asyncio.create_task(bench.service.encode(bench.request(files), files))
        if is_late:
            await bench.until(lambda: any(process.is_busy for process in pool._processes))
            os.kill(pid, signal.SIGSTOP)
        (error,) = errors(await call)
        assert error is not None
        assert (error.code, error.param) == ("machine_busy", "messages.0.content.1")
        assert "too busy" in error.message
        assert error.to_error().retryable
        answer = http_error(error.to_error())
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        await bench.until(lambda: pool.pids() not in ([], [pid]))
        files = [picture(2)]
        assert errors(await bench.service.encode(bench.request(files), files)) == [None]
        assert not is_running(pid)
        assert pool._memory.num_taken == 0
        await bench.is_idle()


async def test_items_behind_others_are_answered_in_the_time_that_they_have(
    family: Family, encoder: EncoderModel
) -> None:
    """One item waits for the only decode process, which hangs in another request's file; one is decoded and waits for
    the forward pass. The file causes neither delay, and both items succeed as soon as the encoder works again."""
    async with running_bench(family, encoder, limited_to()) as bench:
        pool, service = bench.service._decoder, bench.service
        bench.model.gate.clear()
        forwarded, decoded, large, waiting = [picture(1)], [picture(2)], [flat_picture(9_400)], [picture(3)]
        calls = []
        for files in (forwarded, decoded):
            calls.append(asyncio.create_task(service.encode(in_time(bench.request(files), 4.0), files)))
            await bench.until(lambda: service.report().items.num_decoded == len(calls))
        calls.append(asyncio.create_task(service.encode(bench.request(large), large)))
        await bench.until(lambda: any(process.is_busy for process in pool._processes))
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGSTOP)
        calls.append(asyncio.create_task(service.encode(in_time(bench.request(waiting), 4.0), waiting)))
        await bench.until(lambda: service.report().num_items_pending == 4)
        bench.clock.advance(3.9)
        service.tick()
        assert service.report().num_items_pending == 4
        bench.clock.advance(0.1)
        for call in (calls[0], calls[1], calls[3]):
            (error,) = errors(await call)
            assert error is not None
            assert (error.code, error.param) == ("machine_busy", "messages.0.content.1")
        assert not calls[2].done(), "it has no limit"
        os.kill(pid, signal.SIGCONT)
        bench.model.gate.set()
        assert errors(await calls[2]) == [None]
        assert pool.pids() == [pid]
        for files in (forwarded, decoded, waiting):
            assert errors(await service.encode(in_time(bench.request(files), 4.0), files)) == [None]
        await bench.is_idle()


def in_time(request: EncodeRequest, time_left_s: float) -> EncodeRequest:
    return msgspec.structs.replace(request, time_left_s=time_left_s)


async def test_an_item_that_takes_more_than_its_header_says_is_refused_alone(
    family: Family, encoder: EncoderModel
) -> None:
    async with running_bench(family, encoder, limited_to()) as bench:
        files = [flat_picture(9_400), picture(2)]
        request = bench.request(files)
        lying = msgspec.structs.replace(request.items[0], decode_bytes=100 * 2**20)
        request = msgspec.structs.replace(request, items=(lying, request.items[1]))
        large, small = errors(await bench.service.encode(request, files))
        assert small is None
        assert large is not None
        assert (large.code, large.param) == ("invalid_media", "messages.0.content.1")
        assert "memory" in large.message


async def test_an_item_that_takes_more_than_all_may_is_refused_undecoded(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, limited_to(total_bytes=2**29)) as bench:
        files = [flat_picture(9_400), picture(2)]
        large, small = errors(await bench.service.encode(bench.request(files), files))
        assert small is None
        assert large is not None
        assert (large.code, large.param) == ("invalid_media", "messages.0.content.1")
        assert "all media together have only 536870912" in large.message
        assert bench.service.report().items.num_decoded == 1


async def test_what_nobody_waits_for_is_not_decoded_to_its_end(
    family: Family, encoder: EncoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "GRACE_S", 0.0)
    config = EncoderConfig(("image",), num_decode_processes=1, model_dir=str(demo_checkpoint()))
    async with running_bench(family, encoder, config) as bench:
        (pid,) = bench.service._decoder.pids()
        large, small = [flat_picture(9_400)], [picture(1)]
        call = asyncio.create_task(bench.service.encode(bench.request(large), large))
        await bench.until(lambda: bench.service.report().num_decoding == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        report = bench.service.report()
        assert (report.num_queued, report.num_in_flight, report.num_items_pending) == (0, 0, 0)
        assert errors(await bench.service.encode(bench.request(small), small)) == [None]
        assert bench.service._decoder.pids() != [pid], "another process has taken its place"
        assert not is_running(pid)
        assert bench.service.report().items.num_decoded == 1
        await bench.is_idle()


async def test_an_item_that_takes_too_much_memory_is_refused_alone(family: Family, encoder: EncoderModel) -> None:
    async with running_bench(family, encoder, limited_to(memory_bytes=384 * 2**20)) as bench:
        files = [flat_picture(9_400), picture(2)]
        large, small = errors(await bench.service.encode(bench.request(files), files))
        assert small is None
        assert large is not None
        assert (large.code, large.param) == ("invalid_media", "messages.0.content.1")


async def test_large_pictures_are_not_decoded_at_once(family: Family, encoder: EncoderModel) -> None:
    """Sends three pictures, of which two do not fit into the budget together, to two processes. The memory that both
    processes use together stays within the budget."""
    files = [transparent_picture(3_000 + number) for number in range(3)]
    one = planned(family, files[2]).decode_bytes
    config = dataclasses.replace(limited_to(total_bytes=one * 3 // 2), num_decode_processes=2)
    async with running_bench(family, encoder, config) as bench:
        pool = bench.service._decoder
        assert [item.decode_bytes > config.decode_limits.total_bytes / 2 for item in bench.request(files).items] == [
            True,
            True,
            True,
        ]
        pids = pool.pids()
        before = {pid: memory_bytes(pid, "VmRSS") for pid in pids}
        most_taken = most_used = 0
        call = asyncio.create_task(bench.service.encode(bench.request(files), files))
        while not call.done():
            most_taken = max(most_taken, pool._memory.num_taken)
            most_used = max(most_used, sum(memory_bytes(pid, "VmRSS") - before[pid] for pid in pids))
            await asyncio.sleep(0.001)
        assert errors(await call) == [None, None, None]
        assert pool.pids() == pids
        peaks = [memory_bytes(pid, "VmHWM") - before[pid] for pid in pids]
        assert one / 3 < max(peaks) <= one, "the estimate is one of the memory that is really taken"
        assert most_used <= most_taken <= config.decode_limits.total_bytes
        await bench.is_idle()


def memory_bytes(pid: int, name: str) -> int:
    """Returns the memory of a process: `VmRSS` is its current size, `VmHWM` its peak."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def transparent_picture(side: int) -> bytes:
    """Returns a small file. The decoder keeps four values a pixel of it, and creates three more."""
    buffer = io.BytesIO()
    Image.new("RGBA", (side, side), (10, 20, 30, side % 256)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def flat_picture(side: int) -> bytes:
    """Returns a small file with one bit per pixel; decoded to colours, it takes some 350 MB."""
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


@asynccontextmanager
async def running_pool(family: Family) -> AsyncIterator[DecodePool]:
    """Runs a pool with one process."""
    pool = DecodePool(family, str(demo_checkpoint()), 1)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def planned(family: Family, data: bytes) -> MediaItem:
    header = REGISTRY.modality("image").probe(data, "part")
    return plan_media(family, data, header, 0, "part").item


async def decoded(pool: DecodePool, data: bytes) -> Decoded:
    return await pool.decode(data, planned(pool._family, data), lambda units: None)


def expected(family: Family, data: bytes) -> EncoderInput:
    (unit,) = decode_item(family, data, planned(family, data), lambda units: None).inputs
    return unit


def kill(pool: DecodePool) -> int:
    """Kills the only process of a pool, as the system does, and returns its id when it has ended."""
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    while is_running(pid):
        os.sched_yield()
    return pid


async def test_an_answer_that_could_not_be_read_is_not_taken_for_that_of_the_next_item(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(family) as pool:
        (pid,) = pool.pids()
        (process,) = pool._processes
        receive = array_pipe.receive

        def fail(pipe: Connection, most_bytes: int) -> object:
            if process.is_busy:
                raise MemoryError
            return receive(pipe, most_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(sandbox_process, "receive", fail)
            with pytest.raises(MemoryError):
                await decoded(pool, picture(1))
        assert pool._idle.empty(), "it is ended, not used again"
        (unit,) = (await decoded(pool, picture(2))).inputs
        np.testing.assert_array_equal(unit.pixels, expected(family, picture(2)).pixels)
        assert pool.pids() != [pid], "another process has taken its place"


async def test_answers_to_another_message_are_refused(family: Family) -> None:
    async with running_pool(family) as pool:
        (process,) = pool._processes
        pid = process.pid
        assert process._pipe is not None
        process._pipe.send((7, "job", 1.0, 0))  # Nothing reads the answer to this message.
        (unit,) = (await decoded(pool, picture(2))).inputs
        np.testing.assert_array_equal(unit.pixels, expected(family, picture(2)).pixels)
        assert pool.pids() != [pid]


async def test_a_process_that_died_idle_is_replaced_and_no_item_is_blamed(family: Family) -> None:
    async with running_pool(family) as pool:
        for number in range(2):
            pid = kill(pool)
            (unit,) = (await decoded(pool, picture(number))).inputs
            np.testing.assert_array_equal(unit.pixels, expected(family, picture(number)).pixels)
            assert pool.pids() != [pid]


async def test_a_process_that_never_answers_is_given_up(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_process, "START_TIMEOUT_S", 0.0)
    pool = DecodePool(family, str(demo_checkpoint()), 1)
    with pytest.raises(EncodeFailed):
        await pool.start()
    assert pool.pids() == []
    await pool.close()


async def test_starts_that_fail_are_tried_again_and_seen_in_health(
    family: Family, encoder: EncoderModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(decode, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(decode, "MAX_FAILURES", 2)
    config = EncoderConfig(("image",), num_decode_processes=1, model_dir=str(demo_checkpoint()))
    async with running_bench(family, encoder, config) as bench:
        pool, files = bench.service._decoder, [picture(1)]
        kill(pool)
        (process,) = pool._processes
        # This directory holds no model, so a process that starts there ends.
        process._enter = functools.partial(enter_decoding, str(tmp_path))
        call = asyncio.create_task(bench.service.encode(bench.request(files), files))
        await bench.until(lambda: not pool.is_alive)
        with pytest.raises(EncodeFailed, match="decode processes"):
            bench.service.check_health()
        process._enter = functools.partial(enter_decoding, str(demo_checkpoint()))
        assert errors(await call) == [None]
        bench.service.check_health()


async def test_processes_that_start_well_and_always_die_idle_are_seen_in_health(
    family: Family, encoder: EncoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MAX_FAILURES", 2)
    config = EncoderConfig(("image",), num_decode_processes=1, model_dir=str(demo_checkpoint()))
    async with running_bench(family, encoder, config) as bench:
        pool, files = bench.service._decoder, [picture(1)]
        ask = SandboxProcess.run

        async def die_and_ask(process: SandboxProcess[DecodeJob], *given: object) -> None:
            kill(pool)
            await ask(process, *given)

        with monkeypatch.context() as patch:
            patch.setattr(SandboxProcess, "run", die_and_ask)
            call = asyncio.create_task(bench.service.encode(bench.request(files), files))
            await bench.until(lambda: not pool.is_alive)
            with pytest.raises(EncodeFailed, match="decode processes"):
                bench.service.check_health()
        assert errors(await call) == [None], "no item is blamed"
        bench.service.check_health()


def is_running(pid: int) -> bool:
    """Returns whether the process is alive and is not a zombie that its parent has not reaped yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
