"""Runs the real services of a talker and of code2wav behind the transfer adapter of a thinker, in this process."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sized
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from speech_line import Answer

from fabric.contracts import MemberId, RequestId, StageFrame, StageFrames, StageRequest, StageTarget, SystemClock
from fabric.transport import LocalHub, LocalPlane, LocalStageConnector, LocalStageHub
from llm_workers.speech import load_code2wav, load_talker, talker_to_code2wav, thinker_to_talker
from llm_workers.stages import ChunkSettings, ChunkTransferAdapter, StageService, StageSettings

NAME = "in_process"
NUM_BLOCKS, BLOCK_SIZE = 40, 4


class HeardChat(Protocol):
    """A `HeardChat` is the reference's answer to one chat."""

    @property
    def answer(self) -> Answer: ...
    @property
    def codes(self) -> Sized: ...


class StageLine:
    """A `StageLine` is a thinker's adapter and two services behind it, which send their samples to one router."""

    def __init__(self, directory: Path, *, is_async: bool) -> None:
        hub, stage_hub, clock = LocalHub(), LocalStageHub(), SystemClock()
        self.connectors = [LocalStageConnector(stage_hub) for _ in range(3)]
        self.router = LocalPlane(hub, "router")
        self.planes = [LocalPlane(hub, f"stage-{number}") for number in (1, 2)]
        chunks = [ChunkSettings(next_input, is_async) for next_input in (thinker_to_talker, talker_to_code2wav, None)]
        self.thinker = ChunkTransferAdapter({NAME: self.connectors[0]}, clock, chunks[0])
        talker = load_talker(directory, "cpu", "float32", (NUM_BLOCKS, BLOCK_SIZE))
        code2wav = load_code2wav(directory, "cpu", "float32")
        settings = [
            StageSettings(1, "talker", "ar", 4, 16, NUM_BLOCKS, BLOCK_SIZE, chunks=chunks[1]),
            StageSettings(2, "code2wav", "generation", 4, 64, chunks=chunks[2]),
        ]
        models: list[Any] = [talker, code2wav]
        self.services = [
            StageService(MemberId(f"stage-{number}"), setting, model, {NAME: connector}, plane, clock)
            for number, setting, model, connector, plane in zip(
                (1, 2), settings, models, self.connectors[1:], self.planes, strict=True
            )
        ]
        self.models = models
        self.frames: dict[str, list[StageFrame]] = defaultdict(list)
        self.heard: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def receive(self, message: Any) -> None:
        if isinstance(message, StageFrames):
            for frame in message.frames:
                self.frames[frame.request_id].append(frame)
                if frame.is_last:
                    self.heard[frame.request_id].set()

    def requests(self, name: str, spoken: HeardChat, attempt: int = 0) -> list[StageRequest]:
        """Returns the request at the thinker, the talker and code2wav."""
        targets = [
            StageTarget(number, MemberId(f"stage-{number}"), self.connectors[number].inbox, NAME) for number in (1, 2)
        ]
        prompt, options = spoken.answer.prompt, dict(spoken.answer.options)
        return [
            StageRequest(
                RequestId(name), attempt, MemberId("router"), "router", number, (0.0, name), target, prompt, options
            )
            for number, target in enumerate([*targets, None])
        ]

    async def speak(self, name: str, spoken: HeardChat, *, slowly: bool) -> np.ndarray:
        """Runs one request through the stages, and returns its samples as int16."""
        thinking, *_ = self.requests(name, spoken)
        heard = asyncio.ensure_future(self.hear(name, spoken))
        self.thinker.open(thinking)
        for output in spoken.answer.outputs:
            self.thinker.save_async(output, thinking)
            if slowly:
                await asyncio.sleep(0)
        return await heard

    async def hear(self, name: str, spoken: HeardChat, attempt: int = 0) -> np.ndarray:
        """Calls the stages behind the thinker for one attempt, and returns its samples as int16."""
        _, *later = self.requests(name, spoken, attempt)
        calls = [service.run(each) for service, each in zip(self.services, later, strict=True)]
        results = await asyncio.gather(*calls)
        errors = [result.error for result in results]
        assert errors == [None, None]
        assert results[0].num_outputs == len(spoken.codes)
        await self.heard[name].wait()
        frames = self.frames[name]
        assert [frame.is_last for frame in frames] == [False] * (len(frames) - 1) + [True]
        return np.concatenate([np.frombuffer(frame.samples, dtype=np.int16) for frame in frames])


@asynccontextmanager
async def stage_line(directory: Path, *, is_async: bool, has_worker: bool = False) -> AsyncIterator[StageLine]:
    """Yields a line that runs. With `has_worker`, the thinker's adapter belongs to a worker, which starts it."""
    line = StageLine(directory, is_async=is_async)
    async with AsyncExitStack() as stack:
        for resource in (*line.connectors, *line.planes, line.router):
            stack.callback(resource.close)
        line.router.start(line.receive)
        if not has_worker:
            line.thinker.start()
            stack.push_async_callback(asyncio.to_thread, line.thinker.stop)
        for service in line.services:
            await service.start()
            stack.push_async_callback(service.stop)
        yield line
