"""Implements `weft demo --speak`: asks a running cluster some questions, prints the answers while they are spoken, and
plays the sound or writes it to a file.

The sound is played by a program of the system, if there is one that reads samples from its input. The module knows the
cluster by its HTTP API alone.
"""

from __future__ import annotations

import base64
import shutil
import ssl
import subprocess
import time
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from deploy.demo.ask import TIMEOUT_S, messages, streamed_deltas
from deploy.demo.drawing.facts import Sample
from deploy.demo.tasks.catalogue import TASKS
from fabric.contracts import Unavailable

SAMPLE_RATE = 24_000
SPOKEN_TASKS = ("greeting", "sentence", "colour of one of two", "repeat")
PLAYERS = (
    ("aplay", "-q", "-t", "raw", "-f", "S16_LE", "-r", str(SAMPLE_RATE), "-c", "1", "-"),
    ("pacat", "--raw", "--format=s16le", f"--rate={SAMPLE_RATE}", "--channels=1"),
    ("ffplay", "-loglevel", "error", "-nodisp", "-autoexit", "-f", "s16le", "-ar", str(SAMPLE_RATE), "-"),
)
"""Lists commands that play int16 samples from their input, in the order in which they are tried."""


class SpokenPiece(NamedTuple):
    """A `SpokenPiece` is what one event of a spoken answer brings."""

    text: str
    samples: bytes


def run_spoken_demo(
    url: str, seed: int, out: Path | None, api_key: str | None = None, tls: ssl.SSLContext | bool = True
) -> int:
    """Asks the questions, prints the answers, plays them, and returns the exit status. With `out`, or if the system has
    no player, the sound of all answers is written to a WAV file. `tls` says which certificates to trust. Raises
    Unavailable if the cluster can't be reached, gives no speech, or fails."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    player = None if out is not None else next((list(each) for each in PLAYERS if shutil.which(each[0])), None)
    path = out or Path("weft-demo.wav")
    spoken: list[bytes] = []
    with httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_S, headers=headers, verify=tls) as client:
        try:
            (model,) = client.get("/v1/models").raise_for_status().json()["data"]
            if not model.get("voices"):
                raise Unavailable("this cluster gives no speech; start it with `weft serve --speech`")
            for number, sample in enumerate(questions(seed), 1):
                voice = model["voices"][number % len(model["voices"])]
                spoken.append(_hear(client, model["id"], voice, sample, player))
        except httpx.HTTPError as error:
            raise Unavailable(f"the cluster at {url} does not answer: {error}") from error
    if player is None:
        pause = bytes(SAMPLE_RATE)  # Half a second of silence stands between two answers.
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLE_RATE)
            file.writeframes(pause.join(spoken))
        print(f"The answers are in {path}.")
    return 0


def questions(seed: int) -> list[Sample]:
    """Returns the questions, the same for the same seed."""
    rng = np.random.default_rng(seed)
    name_to_draw = {task.name: task.draw for task in TASKS}
    return [name_to_draw[name](rng, int(rng.integers(3))) for name in SPOKEN_TASKS]


def _hear(client: httpx.Client, model: str, voice: str, sample: Sample, player: Sequence[str] | None) -> bytes:
    """Asks one question, prints what is said as it comes, plays it, and returns the samples."""
    for medium in sample.media():
        print(f"     shows {medium.description}")
    print("     " + " ".join(part for part in sample.turns[-1].parts if isinstance(part, str)))
    print(f"{voice}: ", end="", flush=True)
    started_s, first_s, samples = time.perf_counter(), 0.0, b""
    playing = None if player is None else subprocess.Popen(player, stdin=subprocess.PIPE)
    try:
        for piece in spoken_pieces(client, model, voice, sample):
            print(piece.text, end="", flush=True)
            if piece.samples and not samples:
                first_s = time.perf_counter() - started_s
            samples += piece.samples
            if playing is not None and playing.stdin is not None:
                playing.stdin.write(piece.samples)
                playing.stdin.flush()
    finally:
        if playing is not None and playing.stdin is not None:
            playing.stdin.close()
            playing.wait()
    print(f"   [first sound after {first_s * 1000:.0f} ms, {len(samples) / 2 / SAMPLE_RATE:.1f} s]\n")
    return samples


def spoken_pieces(client: httpx.Client, model: str, voice: str, sample: Sample) -> Iterator[SpokenPiece]:
    """Yields the pieces of a spoken answer as they come. Raises Unavailable if the cluster refuses or fails."""
    body: dict[str, Any] = {"model": model, "messages": messages(sample), "temperature": 0, "stream": True}
    body |= {"modalities": ["text", "audio"], "audio": {"voice": voice, "format": "pcm16"}}
    for delta in streamed_deltas(client, body):
        audio = delta.get("audio") or {}
        yield SpokenPiece(audio.get("transcript", ""), base64.b64decode(audio.get("data", "")))
