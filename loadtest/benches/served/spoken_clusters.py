"""Serves clusters that speak, each on a Ray of its own in a process of its own, with placement by processor core.

Several run side by side, so that a bench can ask them in turn; those that are not asked are idle. The thinker, the
router and the load have the first core, and the stages behind the thinker the second. `speaking_model` makes a
checkpoint whose answers have a given length. The module knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from deploy.config import ClusterConfig
from deploy.config_file import load_config
from deploy.stages_config import CODE2WAV, StageSection
from fabric.contracts import Unavailable
from loadtest.benches.served.timed_chats import ChatTarget

START_S = 300.0
STOP_S = 60.0
TEXT_CORE, SPEECH_CORE = 0, 1
GIVEN_CODE2WAV = "loadtest.benches.served.given_code2wav:load_given_code2wav"


class SpokenMode(NamedTuple):
    """A `SpokenMode` is a cluster of the table."""

    is_async: bool
    code2wav_batch: int
    """Limits the requests in one batch of code2wav."""
    is_timed: bool = False
    """Says that a batch of code2wav takes a given time instead of being computed (`given_code2wav`)."""

    @property
    def name(self) -> str:
        given = ", given time" if self.is_timed else ""
        return f"async_chunk {'on' if self.is_async else 'off'}, code2wav {self.code2wav_batch}{given}"


class ServedUrl(NamedTuple):
    url: str
    model: str


def speaking_model(into: Path, source: Path, num_frames: int) -> Path:
    """Links a checkpoint that speaks into a new folder, with a talker that ends each answer after `num_frames` frames
    and not before: the id of the end of speech is one that was never learned, and the learned one is never drawn."""
    into.mkdir()
    for file in source.iterdir():
        (into / file.name).symlink_to(file.resolve())
    model = json.loads((source / "config.json").read_text())
    talker = model["talker_config"]
    talker["codec_eos_token_id"] = talker["text_config"]["vocab_size"] - 1
    generation = json.loads((source / "generation_config.json").read_text())
    # transformers makes no frame of the last code, and neither does Weft.
    generation["talker_max_new_tokens"] = num_frames + 1
    for name, data in (("config.json", model), ("generation_config.json", generation)):
        (into / name).unlink()
        (into / name).write_text(json.dumps(data))
    return into


def spoken_config(mode: SpokenMode, model_path: Path | None = None) -> ClusterConfig:
    """Returns the config of one thinker, talker and code2wav, with the model of a directory, by
    default the demo's."""
    data = load_config(None).model_dump()
    data["server"]["port"] = 0
    data["media"]["probe_processes"] = 0
    if model_path is not None:
        data["model"]["path"] = str(model_path)
    data["encoders"] |= {"replicas": 1, "decode_processes": 0}
    data["workers"]["replicas"] = 1
    code2wav = GIVEN_CODE2WAV if mode.is_timed else CODE2WAV
    stages = [
        StageSection(stage_id=0, model_stage="thinker"),
        StageSection(stage_id=1, model_stage="talker"),
        StageSection(
            stage_id=2,
            model_stage=code2wav,
            worker_type="generation",
            max_num_seqs=mode.code2wav_batch,
            just_in_time=not mode.is_timed,  # It shares its core with the talker, if it computes.
        ),
    ]
    data["stages"] = {"async_chunk": mode.is_async, "stage_args": [each.model_dump() for each in stages]}
    return ClusterConfig.model_validate(data)


@contextlib.contextmanager
def serving(configs: Mapping[SpokenMode, ClusterConfig]) -> Iterator[dict[SpokenMode, ServedUrl]]:
    """Runs the clusters for the duration of the `with` block, and yields their URLs. Raises Unavailable if one does not
    start."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pipes: dict[SpokenMode, Connection] = {}
        for mode, config in configs.items():
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, config.model_dump(mode="json")), name=mode.name)
            process.start()
            there.close()
            stack.callback(_stop, process, here)
            pipes[mode] = here
        urls: dict[SpokenMode, ServedUrl] = {}
        for mode, pipe in pipes.items():
            if not pipe.poll(START_S):
                raise Unavailable(f"the cluster with {mode.name} did not start within {START_S:g} s")
            try:
                urls[mode] = ServedUrl(*pipe.recv())
            except EOFError as error:
                raise Unavailable(f"the cluster with {mode.name} did not start; its error is above") from error
        yield urls


def _serve(pipe: Connection, config: dict[str, Any]) -> None:
    """Serves until the other end of the pipe is closed."""
    from deploy.ray.runtime import run_cluster

    with run_cluster(ClusterConfig.model_validate(config)) as cluster, contextlib.suppress(EOFError):
        pipe.send((cluster.url, cluster.model_name))
        pipe.recv()


def _stop(process: multiprocessing.process.BaseProcess, pipe: Connection) -> None:
    pipe.close()
    process.join(STOP_S)
    if process.is_alive():
        process.terminate()
        process.join(STOP_S)


async def pin_members(target: ChatTarget) -> None:
    """Pins the stages behind the thinker to one core, and this process and all other members to another one. Does
    nothing on a machine with one core."""
    if (os.cpu_count() or 1) < 2:
        return
    known = (await target.client.get("/weft/members")).raise_for_status().json()
    pin(os.getpid(), TEXT_CORE)
    for member in (*known["members"], *known["routers"]):
        pin(int(member["pid"]), SPEECH_CORE if member["kind"] == "stage" else TEXT_CORE)


def pin(pid: int, core: int | None) -> None:
    """Lets all threads of a process run on this core alone."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        return
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


@contextlib.contextmanager
def kept_affinity() -> Iterator[None]:
    """Puts this process back on the cores that it had before the block."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def new_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits)
