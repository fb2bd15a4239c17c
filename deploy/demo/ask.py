"""Implements `weft demo`: asks a running cluster ten questions about media that it draws, and prints how many answers
were right.

The module knows the cluster by its HTTP API alone. It asks about a video and a sound if the cluster takes them; if not,
it says so and asks about pictures instead.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import numpy as np

from deploy.demo import clips
from deploy.demo.catalogue import LEARNED, TASKS
from deploy.demo.drawing import Rng
from deploy.demo.facts import conversation
from deploy.demo.media import Part, Sample, Sound
from deploy.demo.sounds import silence
from deploy.demo.wire import messages
from fabric.errors import Unavailable

LEAST_RIGHT = 9
QUESTIONS = (
    ("image", "colour"),
    ("image", "shape"),
    ("image", "colour of one of two"),
    ("image", "place"),
    ("text", "earlier turn"),
    ("image", "picture, text, picture"),
    ("image", "earlier picture"),
    ("image", "size"),
    ("video", "direction"),
    ("audio", "beeps"),
)
STAND_INS = ("colour", "number of pictures")
PLURAL = {"audio": "sounds", "video": "videos"}
CLIP_SECONDS = 3.0
CLIP_FPS = 8.0
MAX_TOKENS = 32
TIMEOUT_S = 120.0


class Answer(NamedTuple):
    text: str
    first_token_s: float
    """Measures the time from sending the request to the first text."""


@dataclass(frozen=True, slots=True)
class Question:
    task: str
    sample: Sample

    @property
    def text(self) -> str:
        """Returns the text of the last question."""
        return " ".join(part for part in self.sample.turns[-1].parts if isinstance(part, str))

    @property
    def shown(self) -> list[str]:
        return [medium.description for medium in self.sample.media()]


def run_demo(url: str, seed: int) -> int:
    """Asks the questions, prints the answers, and returns the exit status: 0 if at least nine of ten answers were
    right. Raises Unavailable if the cluster can't be reached or fails."""
    with httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_S) as client:
        try:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            unknown = [kind for kind in ("video", "audio") if kind not in LEARNED]
            refused = [kind for kind in ("video", "audio") if kind in LEARNED and not _takes(client, model, kind)]
            status = _ask_all(client, model, questions(seed, (*unknown, *refused)))
        except httpx.HTTPError as error:
            raise Unavailable(f"{url}: {error}") from error
    for kinds, reason in ((unknown, "the demo model has not learned"), (refused, "this cluster does not take")):
        if kinds:
            names = " and ".join(PLURAL[kind] for kind in kinds)
            print(f"Left out: {names}, which {reason}; pictures were asked about instead.")
    return status


def questions(seed: int, refused: Sequence[str] = ()) -> list[Question]:
    """Returns ten questions, the same for the same arguments. Questions about pictures replace those of `refused`
    modalities."""
    rng = np.random.default_rng(seed)
    stand_ins = iter(STAND_INS)
    return [_question(rng, next(stand_ins) if modality in refused else task) for modality, task in QUESTIONS]


def _question(rng: Rng, task: str) -> Question:
    if task == "direction":
        story = clips.moving(rng)
        clip = clips.film(rng, story, CLIP_SECONDS, CLIP_FPS)
        return Question(task, conversation(rng, task, [clip], [story.facts[0]]))
    draw = next(entry.draw for entry in TASKS if entry.name == task)
    return Question(task, draw(rng, int(rng.integers(3))))


def _takes(client: httpx.Client, model: str, modality: str) -> bool:
    """Returns False if the cluster refuses a message part of this modality as unsupported. Every other response counts
    as acceptance, even another error."""
    rng = np.random.default_rng(0)
    if modality == "video":
        medium: Part = clips.film(rng, clips.moving(rng), 2.0, CLIP_FPS)
    else:
        medium = Sound(silence(1.1), "silence")
    sample = conversation(rng, "probe", [medium], [clips.moving(rng).facts[0]])
    body = {"model": model, "messages": messages(sample), "max_tokens": 1}
    response = client.post("/v1/chat/completions", json=body)
    return not (response.status_code == 400 and response.json()["error"]["code"] == "unsupported_modality")


def _ask_all(client: httpx.Client, model: str, asked: Sequence[Question]) -> int:
    num_right = 0
    for number, question in enumerate(asked, 1):
        for shown in question.shown:
            print(f"     shows {shown}")
        answer = ask(client, model, question.sample)
        is_right = answer.text.strip() == question.sample.answer
        num_right += is_right
        verdict = "right" if is_right else f"wrong, it is: {question.sample.answer}"
        print(f"{number:3}. {question.text}\n     {answer.text}   [{verdict}, {answer.first_token_s * 1000:.0f} ms]\n")
    print(f"{num_right} of {len(asked)} right.")
    return 0 if num_right >= LEAST_RIGHT else 1


def ask(client: httpx.Client, model: str, sample: Sample) -> Answer:
    """Streams one answer with greedy decoding. Raises Unavailable if the cluster refuses the request or fails."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages(sample),
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
    }
    started, first_token_s, text = time.perf_counter(), 0.0, ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise Unavailable(f"the cluster answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise Unavailable(f"the cluster broke off: {event['error']['message']}")
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and not text:
                    first_token_s = time.perf_counter() - started
                text += piece
    return Answer(text, first_token_s)


if __name__ == "__main__":
    sys.exit(run_demo(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
