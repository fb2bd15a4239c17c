"""Tests which event loop a process serves in."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Mapping
from typing import Any

import pytest

from deploy.process_setup import new_event_loop


def test_the_loop_is_that_of_rays_actors() -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert isinstance(runner.get_loop(), uvloop.Loop)


def test_a_system_without_uvloop_has_the_loop_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_uvloop(name: str, *rest: Any, **named: Mapping[str, Any]) -> Any:
        if name == "uvloop":
            raise ImportError(name)
        return found(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_uvloop)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert isinstance(runner.get_loop(), asyncio.BaseEventLoop)
