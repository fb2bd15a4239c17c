"""Checks `weft demo` against a real server of the whole cluster in one process."""

from __future__ import annotations

import asyncio

import pytest

from deploy.config import ClusterConfig
from deploy.demo.ask import LEAST_RIGHT, run_demo
from deploy.local import serving

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("seed", [0, 1])
async def test_at_least_nine_of_ten_are_right(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    config = ClusterConfig.model_validate({"server": {"port": 0}, "encoders": {"decode_processes": 0}})
    async with serving(config) as (_, port):
        status = await asyncio.to_thread(run_demo, f"http://127.0.0.1:{port}", seed)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.count("[right, ") >= LEAST_RIGHT
    assert printed.count(" ms]") == 10
