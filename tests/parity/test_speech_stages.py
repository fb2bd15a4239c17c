"""Compares speech with transformers when real stage services make it, asynchronous and sequential, with few KV blocks.

The thinker is a transfer adapter that sends what the reference's thinker made; two services run the talker and
code2wav, with their engines, schedulers and connectors."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_rig import Text
from family_row import Medium
from speech_reference import SpeechReference, Spoken

from fabric.contracts import MemberId, RequestId, StageFrame, StageFrames, StageRequest, StageTarget, SystemClock
from fabric.transport import LocalHub, LocalPlane, LocalStageConnector, LocalStageHub
from llm_workers.speech import load_code2wav, load_talker, talker_to_code2wav, thinker_to_talker
from llm_workers.stages import ChunkSettings, ChunkTransferAdapter, StageService, StageSettings

pytestmark = pytest.mark.torch

NAME = "in_process"
NUM_BLOCKS, BLOCK_SIZE = 40, 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> SpeechReference:
    return SpeechReference(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def spoken(reference: SpeechReference) -> list[Spoken]:
    picture, sound = Medium("image", 1, (96, 96)), Medium("audio", 2, (1000, 0))
    return [
        reference.ask(Text(1, 5), voice="Chelsie"),
        reference.ask(Text(1, 3), picture, Text(2, 2), sound),
        reference.ask(Text(13, 7)),
        reference.ask(Text(6, 4)),
    ]


class Line:
    """A `Line` is a thinker's adapter and two services behind it, which send their samples to one router."""

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

    def requests(self, name: str, spoken: Spoken) -> list[StageRequest]:
        """Returns the request at the thinker, the talker and code2wav."""
        targets = [
            StageTarget(number, MemberId(f"stage-{number}"), self.connectors[number].inbox, NAME) for number in (1, 2)
        ]
        prompt, options = spoken.answer.prompt, dict(spoken.answer.options)
        return [
            StageRequest(RequestId(name), 0, MemberId("router"), "router", number, (0.0, name), target, prompt, options)
            for number, target in enumerate([*targets, None])
        ]

    async def speak(self, name: str, spoken: Spoken, *, slowly: bool) -> np.ndarray:
        """Runs one request through the stages, and returns its samples as int16."""
        thinking, *later = self.requests(name, spoken)
        calls = [asyncio.ensure_future(service.run(each)) for service, each in zip(self.services, later, strict=True)]
        self.thinker.open(thinking)
        for output in spoken.answer.outputs:
            self.thinker.save_async(output, thinking)
            if slowly:
                await asyncio.sleep(0)
        results = await asyncio.gather(*calls)
        assert [result.error for result in results] == [None, None]
        assert results[0].num_outputs == len(spoken.codes)
        await self.heard[name].wait()
        frames = self.frames[name]
        assert [frame.is_last for frame in frames] == [False] * (len(frames) - 1) + [True]
        return np.concatenate([np.frombuffer(frame.samples, dtype=np.int16) for frame in frames])


@asynccontextmanager
async def running(directory: Path, *, is_async: bool) -> AsyncIterator[Line]:
    line = Line(directory, is_async=is_async)
    async with AsyncExitStack() as stack:
        for resource in (*line.connectors, *line.planes, line.router):
            stack.callback(resource.close)
        line.router.start(line.receive)
        line.thinker.start()
        stack.push_async_callback(asyncio.to_thread, line.thinker.stop)
        for service in line.services:
            await service.start()
            stack.push_async_callback(service.stop)
        yield line


@pytest.mark.parametrize("is_async", [True, False])
async def test_services_speak_like_transformers(
    reference: SpeechReference, spoken: Sequence[Spoken], is_async: bool
) -> None:
    torch.set_num_threads(1)
    async with asyncio.timeout(60), running(reference.directory, is_async=is_async) as line:
        found = await asyncio.gather(
            *(line.speak(f"r{index}", each, slowly=index % 2 == 0) for index, each in enumerate(spoken))
        )
    for samples, each in zip(found, spoken, strict=True):
        assert len(samples) == len(each.samples)
        assert np.abs(samples / 32767 - each.samples).max() < 1e-4
    assert [model.num_states for model in line.models] == [0, 0]
