"""Runs the alternatives to Weft that a user might choose, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import httpx

from fabric.contracts import ConfigError
from loadtest.benches.chat_load import (
    BenchLoad,
    Body,
    picture_messages,
    prompts_of,
    run_chats,
    transformers_body,
    weft_body,
    word_messages,
)
from loadtest.benches.synthetic import VOCAB

START_TIMEOUT_S = 300.0


class Peer(Protocol):
    name: str

    def run(self, load: BenchLoad, seed: int) -> float:
        """Runs one round with fresh prompts made from `seed`, and returns the output tokens per second. Raises
        ConfigError if the peer made fewer tokens than the load asks for."""
        ...

    def close(self) -> None: ...


class RoundsPeer:
    """Runs a script that follows `peers/protocol.py`: token ids in, seconds out."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """Starts the script. Raises ConfigError if it ends before it is ready."""
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise ConfigError(f"the peer {name} did not start; its exit status is {self._process.wait()}")

    def run(self, load: BenchLoad, seed: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        prompts = prompts_of(load, VOCAB, seed).tolist()
        self._process.stdin.write(json.dumps({"prompts": prompts, "output_tokens": load.output_tokens}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["tokens"] != load.concurrency * load.output_tokens:
            wanted = load.concurrency * load.output_tokens
            made = f"{answer['tokens']} tokens instead of {wanted}"
            raise ConfigError(f"the peer {self.name} made {made}, so its time can't be compared")
        return float(answer["tokens"] / answer["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        _end(self._process)


class ServePeer:
    """Runs a server over HTTP that implements the OpenAI chat API."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        make_bodies: Callable[[BenchLoad, int], list[Body]],
    ) -> None:
        """Runs `command` with `--host` and `--port` appended; `make_bodies` makes the requests of a load from a seed.
        Raises ConfigError, with the last line of the server's output, if the server does not answer in time."""
        self.name, self._make_bodies = name, make_bodies
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        )
        try:
            self._wait()
        except ConfigError:
            self.close()
            raise

    def run(self, load: BenchLoad, seed: int) -> float:
        done = asyncio.run(run_chats(self.url, self._make_bodies(load, seed)))
        return done.tokens / done.seconds

    def close(self) -> None:
        self._process.terminate()
        _end(self._process)
        self._log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        last = f"the last line of its output is: {said[-1]}" if said else "it wrote no output"
        raise ConfigError(f"the peer {self.name} did not start; {last}")


def transformers_serve(python: str, model_dir: Path, dtype: str, num_threads: int, *, has_pictures: bool) -> ServePeer:
    """Starts `transformers serve`. It requires `fastapi`, `uvicorn`, `openai` and `accelerate` in addition to
    transformers, in the environment of the given Python."""
    command = [
        str(Path(python).with_name("transformers")),
        "serve",
        str(model_dir),
        "--device",
        "cpu",
        "--dtype",
        dtype,
    ]

    def make_bodies(load: BenchLoad, seed: int) -> list[Body]:
        conversations = picture_messages(load, seed) if has_pictures else word_messages(load, seed, model_dir)
        return [transformers_body(str(model_dir), messages, load.output_tokens) for messages in conversations]

    return ServePeer("transformers-serve", command, {"OMP_NUM_THREADS": str(num_threads)}, make_bodies)


def vllm_serve(name: str, python: str, model_dir: Path, dtype: str, num_threads: int) -> ServePeer:
    """Starts vLLM's own server, for requests with pictures; its caches of prompts and of pictures are on, as Weft's
    are. The server gets the first `num_threads` cores; by default it leaves one core to its other processes."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir), "--dtype", dtype]
    command += ["--served-model-name", "bench", "--max-model-len", "1024", "--limit-mm-per-prompt", '{"video": 0}']
    command += ["--distributed-executor-backend", "uni"]  # one process with the engine is faster here than two
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "OMP_NUM_THREADS": str(num_threads),
    }

    def make_bodies(load: BenchLoad, seed: int) -> list[Body]:
        return [weft_body("bench", messages, load.output_tokens) for messages in picture_messages(load, seed)]

    return ServePeer(name, command, environment, make_bodies)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
