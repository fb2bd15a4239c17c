"""Implements `weft demo`: asks a running cluster ten questions about media that it draws, and prints how many answers
were right.

`run_demo` draws the questions, sends each as an OpenAI client does, and compares the answers word for word. It asks
about a video and a sound if the cluster takes them; if not, it says so and asks about pictures instead. The last part
of the module encodes a conversation for the HTTP API: PNG pictures and MP4 clips as data URLs, and WAV sounds in
base64. Tests use this encoding too.

The module knows the cluster by its HTTP API alone.
"""

from __future__ import annotations

import base64
import io
import json
import ssl
import sys
import time
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import av
import cv2
import httpx
import numpy as np

from deploy.demo.drawing import clips
from deploy.demo.drawing.facts import SAMPLE_RATE, Clip, Part, Picture, Sample, Sound, conversation
from deploy.demo.drawing.figures import Rng
from deploy.demo.drawing.sounds import silence
from deploy.demo.tasks.catalogue import LEARNED, TASKS
from fabric.contracts import Unavailable

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
VIDEO_BIT_RATE = 4_000_000
"""This rate is high enough that a few small frames lose nothing that a question asks for."""


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


def run_demo(url: str, seed: int, api_key: str | None = None, tls: ssl.SSLContext | bool = True) -> int:
    """Asks the questions, prints the answers, and returns the exit status: 0 if at least nine of ten answers were
    right. `tls` says which certificates to trust. Raises Unavailable if the cluster can't be reached or fails."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_S, headers=headers, verify=tls) as client:
        try:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            unknown = [kind for kind in ("video", "audio") if kind not in LEARNED]
            refused = [kind for kind in ("video", "audio") if kind in LEARNED and not _takes(client, model, kind)]
            status = _ask_all(client, model, questions(seed, (*unknown, *refused)))
        except httpx.HTTPError as error:
            raise Unavailable(f"the cluster at {url} does not answer: {error}") from error
    for kinds, reason in ((unknown, "the demo model has not learned"), (refused, "this cluster does not take")):
        if kinds:
            names = " and ".join(PLURAL[kind] for kind in kinds)
            print(f"The demo asks no questions about {names}, which {reason}; it asks about pictures instead.")
    return status


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
        verdict = "right" if is_right else f"wrong, the right answer is: {question.sample.answer}"
        print(f"{number:3}. {question.text}\n     {answer.text}   [{verdict}, {answer.first_token_s * 1000:.0f} ms]\n")
    print(f"{num_right} of {len(asked)} answers are right.")
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
    for delta in streamed_deltas(client, body):
        piece = delta.get("content") or ""
        if piece and not text:
            first_token_s = time.perf_counter() - started
        text += piece
    return Answer(text, first_token_s)


def streamed_deltas(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the `delta` of each chunk of a streamed chat completion. Raises Unavailable if the cluster refuses the
    request or fails."""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise Unavailable(f"the cluster answered with status {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise Unavailable(f"the cluster ended the answer with an error: {event['error']['message']}")
            for choice in event["choices"]:
                yield choice["delta"]


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


# ------------------------------------------------------------ a conversation on the wire


def messages(sample: Sample) -> list[dict[str, Any]]:
    """Returns the `messages` of a chat completion. The content of a turn that has only text is a string."""
    return [
        {"role": turn.role, "content": str(turn.parts[0]) if _is_text(turn.parts) else [_part(p) for p in turn.parts]}
        for turn in sample.turns
    ]


def _is_text(parts: tuple[Part, ...]) -> bool:
    return len(parts) == 1 and isinstance(parts[0], str)


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Picture):
        return {"type": "image_url", "image_url": {"url": _data_url("image/png", png(part))}}
    if isinstance(part, Sound):
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(part)).decode(), "format": "wav"}}
    return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", mp4(part))}}


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def png(picture: Picture) -> bytes:
    is_written, data = cv2.imencode(".png", picture.pixels[:, :, ::-1])
    assert is_written
    return data.tobytes()


def wav(sound: Sound) -> bytes:
    """Encodes a sound as WAV: mono, 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.round(sound.samples * (2**15 - 1)).astype("<i2").tobytes())
    return buffer.getvalue()


def mp4(clip: Clip) -> bytes:
    """Encodes a clip as MP4: MPEG-4 pictures, and AAC if there is a sound track."""
    _, height, width, _ = clip.frames.shape
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=Fraction(clip.fps))
        # Video encoders need even sides.
        pictures.width, pictures.height, pictures.pix_fmt = width - width % 2, height - height % 2, "yuv420p"
        pictures.bit_rate = VIDEO_BIT_RATE
        track = None if clip.sound is None else container.add_stream("aac", rate=SAMPLE_RATE, layout="mono")
        for pixels in clip.frames:
            even = np.ascontiguousarray(pixels[: pictures.height, : pictures.width])
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        container.mux(pictures.encode())
        if track is not None and clip.sound is not None:
            heard = av.AudioFrame.from_ndarray(clip.sound.samples[None], format="fltp", layout="mono")
            heard.sample_rate = SAMPLE_RATE
            container.mux(track.encode(heard))
            container.mux(track.encode())
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(run_demo(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
