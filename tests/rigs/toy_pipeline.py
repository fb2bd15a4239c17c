"""Runs the toy text-to-speech (`toy_speech`) through real stage services, as its config says: both stages in this
process, or one of them in a process of its own, which a test may kill."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from connector_peers import connector_maker

from deploy.speech_parts import imported
from deploy.stages_config import StageSection, StagesSection
from fabric.contracts import (
    MemberId,
    PlaneMessage,
    RequestId,
    StageFrame,
    StageFrames,
    StagePrompt,
    StageRequest,
    StageResult,
    StageTarget,
    SystemClock,
)
from fabric.transport import LocalHub, LocalPlane, StageConnector
from llm_workers.stages import ChunkPatience, ChunkSettings, SaveRetries, StageModel, StageService, StageSettings

CONFIG = """
async_chunk: true
stage_args:
  - stage_id: 0
    model_stage: toy_speech:ToyTalker
    worker_type: ar
    max_num_seqs: 6
    max_step_tokens: 16
    num_blocks: 24
    block_size: 4
    custom_process_next_stage_input_func: toy_speech.toy_codes
    extra: {codec_chunk_frames: 5}
  - stage_id: 1
    model_stage: toy_speech:ToyVocoder
    worker_type: generation
    max_num_seqs: 64
connectors:
  - {from_stage: 0, to_stage: 1, name: SharedMemoryConnector}
"""
RETRIES = SaveRetries(give_up_s=1.0)


def toy_config(is_async: bool = True) -> StagesSection:
    return StagesSection.model_validate(yaml.safe_load(CONFIG) | {"async_chunk": is_async})


def settings_of(
    config: StagesSection, section: StageSection, patience: ChunkPatience, frame_s: float | None
) -> StageSettings:
    path = section.custom_process_next_stage_input_func
    make_payload: Any = None if path is None else imported(path)
    return StageSettings(
        section.stage_id,
        section.model_stage,
        section.worker_type,
        section.max_num_seqs,
        section.step_tokens,
        section.num_blocks,
        section.block_size,
        unit_s=frame_s,
        is_just_in_time=frame_s is not None,
        fills_steps=False,
        chunks=ChunkSettings(make_payload, config.async_chunk, section.extra, patience, RETRIES),
    )


class ToyStage:
    """A `ToyStage` is one replica: its model, its connector and its service."""

    def __init__(
        self,
        config: StagesSection,
        stage_id: int,
        kind: str,
        connector: StageConnector,
        hub: LocalHub,
        frame_s: float | None = None,
        **patience: float,
    ) -> None:
        """Creates the replica. With `frame_s`, a generation stage is just in time for listeners who play a frame for so
        many seconds."""
        section = config.stage_args[stage_id]
        make_model: Any = imported(section.model_stage)
        self.model: StageModel = make_model()
        self.connector = connector
        self.plane = LocalPlane(hub, f"local://stage-{stage_id}")
        self.service = StageService(
            MemberId(f"stage-{stage_id}"),
            settings_of(config, section, ChunkPatience(**patience), frame_s),
            self.model,
            {kind: connector},
            self.plane,
            SystemClock(),
        )

    async def stop(self) -> None:
        await self.service.stop()
        self.plane.close()
        self.connector.close()

    async def at_rest(self) -> None:
        """Waits until nothing is held any more."""
        give_up_s = time.monotonic() + 20.0
        for _ in iter(lambda: self.num_held, 0):
            assert time.monotonic() < give_up_s, f"stage {self.connector.inbox} still holds {self.num_held}"
            await asyncio.sleep(0.01)

    @property
    def num_held(self) -> int:
        return self.service.num_held + len(self.model) + self.service.report().pool_used


class ToyPipeline:
    """A `ToyPipeline` runs both stages in this process, and plays the router."""

    def __init__(
        self, kind: str, root: Path, is_async: bool = True, frame_s: float | None = None, **patience: float
    ) -> None:
        config, hub, make = toy_config(is_async), LocalHub(), connector_maker(kind, root)
        self.kind = kind
        self.stages = [ToyStage(config, stage_id, kind, make(), hub, frame_s, **patience) for stage_id in (0, 1)]
        self.router = LocalPlane(hub, "local://router")
        self.frames: defaultdict[RequestId, list[StageFrame]] = defaultdict(list)

    async def __aenter__(self) -> ToyPipeline:
        self.router.start(self._on_message)
        for stage in self.stages:
            await stage.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for stage in self.stages:
            await stage.stop()
        self.router.close()

    def _on_message(self, message: PlaneMessage) -> None:
        if isinstance(message, StageFrames):
            for frame in message.frames:
                self.frames[frame.request_id].append(frame)

    def requests(self, name: str, prompt: tuple[int, ...], num_frames: int, step_ms: int = 0) -> list[StageRequest]:
        return toy_requests(name, prompt, num_frames, self.kind, self.stages[1].connector.inbox, step_ms)

    async def speak(self, name: str, prompt: tuple[int, ...], num_frames: int) -> list[StageResult]:
        requests = self.requests(name, prompt, num_frames)
        pairs = zip(self.stages, requests, strict=True)
        return await asyncio.gather(*(stage.service.run(request) for stage, request in pairs))

    def heard(self, name: str) -> np.ndarray:
        """Returns the samples of a request, int16, which must have come in order and without gaps."""
        frames = self.frames[RequestId(name)]
        assert [frame.is_last for frame in frames] == [*[False] * (len(frames) - 1), True]
        samples = [np.frombuffer(frame.samples, dtype="<i2") for frame in frames]
        starts = np.cumsum([0, *map(len, samples)])[:-1]
        assert [frame.first_sample for frame in frames] == starts.tolist()
        return np.concatenate(samples)


def toy_requests(
    name: str, prompt: tuple[int, ...], num_frames: int, kind: str, inbox: str, step_ms: int = 0
) -> list[StageRequest]:
    """Returns the calls of both stages for one request."""
    first = StageRequest(
        request_id=RequestId(name),
        attempt=0,
        router_id=MemberId("router-1"),
        router_address="local://router",
        stage_id=0,
        age=(float(len(prompt)), name),
        next_stage=StageTarget(1, MemberId("stage-1"), inbox, kind),
        prompt=StagePrompt(prompt),
        options={"num_frames": num_frames, "step_ms": step_ms},
    )
    second = msgspec.structs.replace(first, stage_id=1, next_stage=None, prompt=None, options={})
    return [first, second]


# ------------------------------------------------------------ a stage in a process of its own


def _host(connection: Any, stage_id: int, kind: str, root: Path) -> None:
    asyncio.run(_serve(connection, stage_id, kind, root))


async def _serve(connection: Any, stage_id: int, kind: str, root: Path) -> None:
    stage = ToyStage(toy_config(), stage_id, kind, connector_maker(kind, root)(), LocalHub())
    await stage.service.start()
    connection.send(stage.connector.inbox)
    calls: set[asyncio.Task[None]] = set()

    async def answer(request: StageRequest) -> None:
        connection.send(await stage.service.run(request))

    try:
        while True:
            calls.add(asyncio.create_task(answer(await asyncio.to_thread(connection.recv))))
    except EOFError:
        await stage.stop()


class StageProcess:
    """A `StageProcess` hosts one stage of the toy in a spawned process."""

    def __init__(self, stage_id: int, kind: str, root: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_host, args=(theirs, stage_id, kind, root), daemon=True)
        self._process.start()
        theirs.close()
        self.inbox: str = self._receive()

    def begin(self, request: StageRequest) -> None:
        self._connection.send(request)

    def result(self) -> StageResult:
        return self._receive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self._connection.close()
        self._process.join(20.0)
        if self._process.is_alive():
            self.kill()
        self._process.close()

    def _receive(self) -> Any:
        assert self._connection.poll(60.0), "the process of the stage does not answer"
        return self._connection.recv()


def as_int16(samples: np.ndarray) -> np.ndarray:
    return np.rint(samples * 32767).astype("<i2")
