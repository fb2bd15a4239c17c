"""Decoding in spawned processes: the same features, and what happens when such a process dies, or its parent."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from encoder_bench import picture, running_bench
from PIL import Image

from deploy.demo.build import demo_checkpoint
from encoder_pool import decode
from encoder_pool.config import EncoderConfig
from fabric.errors import ErrorInfo
from fabric.messages import EncodeResult
from modalities.family import EncoderModel, Family
from modalities.registry import REGISTRY

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
    config = EncoderConfig(num_decode_processes=1, model_dir=str(demo_checkpoint()))
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
    config = EncoderConfig(num_decode_processes=1, model_dir=str(demo_checkpoint()))
    async with running_bench(family, encoder, config) as bench:
        files = [picture(1)]
        call = asyncio.create_task(bench.service.encode(bench.request(files), files))
        while not call.done():  # each process that works on it dies, as if the file were to blame
            for process in multiprocessing.active_children():
                process.kill()
            await asyncio.sleep(0.001)
        error = call.result().items[0].error
        assert error is not None
        assert (error.code, error.param) == ("encode_failed", "messages.0.content.1")
        files = [picture(2)]
        assert errors(await bench.service.encode(bench.request(files), files)) == [None]
        await bench.is_idle()


async def test_an_item_that_takes_too_long_is_refused_alone(family: Family, encoder: EncoderModel) -> None:
    config = EncoderConfig(num_decode_processes=1, model_dir=str(demo_checkpoint()), decode_timeout_s=1e-5)
    async with running_bench(family, encoder, config) as bench:
        files = [picture(1, 1024, 1024)]
        error = errors(await bench.service.encode(bench.request(files), files))[0]
        assert error is not None
        assert (error.code, error.param) == ("invalid_media", "messages.0.content.1")
        assert "within 1e-05 s" in error.message
        await bench.is_idle()


async def test_what_nobody_waits_for_is_not_decoded_to_its_end(
    family: Family, encoder: EncoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "GRACE_S", 0.0)
    config = EncoderConfig(num_decode_processes=1, model_dir=str(demo_checkpoint()))
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
        assert bench.service.report().items_decoded == 1
        await bench.is_idle()


async def test_an_item_that_takes_too_much_memory_is_refused_alone(family: Family, encoder: EncoderModel) -> None:
    config = EncoderConfig(num_decode_processes=1, model_dir=str(demo_checkpoint()), decode_memory_bytes=384 * 2**20)
    async with running_bench(family, encoder, config) as bench:
        files = [flat_picture(9_400), picture(2)]
        large, small = errors(await bench.service.encode(bench.request(files), files))
        assert small is None
        assert large is not None
        assert (large.code, large.param) == ("invalid_media", "messages.0.content.1")


def flat_picture(side: int) -> bytes:
    """A small file, a bit per pixel; as colours it is some 350 MB."""
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


ORPHAN_MAKER = """
import asyncio, sys, time
from pathlib import Path
from encoder_pool.decode import DecodePool
from modalities.registry import REGISTRY

async def main(model_dir):
    pool = DecodePool(REGISTRY.load_family(Path(model_dir)), model_dir, 1)
    await pool.start()
    print(*pool.pids(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_decode_processes_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "orphan_maker.py"
    script.write_text(ORPHAN_MAKER)
    command = [sys.executable, str(script), str(demo_checkpoint())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline_s = time.monotonic() + 30
    while is_running(child):
        assert time.monotonic() < deadline_s, "the decode process has outlived its parent"
        os.sched_yield()


def is_running(pid: int) -> bool:
    """Alive and not a zombie that nobody has reaped yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
