"""Makes the bodies of chats for the requests of a workload.

`SizedContent` gives a request the number of words and the media that its workload asks for, for any model.
`DrawnContent` asks the demo model a question that it has learned about media of the right kinds, so that each answer
can be compared with the right one; it does not follow the number of tokens. Both give equal content to equal requests,
so a medium that a workload shares among requests is the same file in all of them, and every other one is in no cache.

The module knows nothing of when a chat is sent, or of what becomes of it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol

import av
import numpy as np
from PIL import Image

from deploy.demo.ask import messages
from deploy.demo.tasks.catalogue import TASKS, Task
from fabric.contracts import ConfigError
from loadtest.simulator import QUESTION, SimRequest, media_of

Body = dict[str, Any]
DEMO_MODEL = "weft-demo"
"""A cluster gives the demo model this name, unless its config names it otherwise."""
KEPT_CONVERSATIONS = 256
"""A sender remembers this many conversations; those that began first are forgotten first."""
KEPT_MEDIA = 64
"""A sender keeps this many media in their written form, which is more than a workload shares by default."""
ASKED = " What is shown?"
_COMMON_WORDS = (
    "a the of to and in is it you that he was for on are with as his they at be this from have or by one had not "
    "but what all were when we there can an your which their said if do will each about how up out them then she "
    "many some so these would other into has more her two like him see time could no make than first been its who "
    "now people my made over did down only way find use may water long little very after words called just where "
    "most know"
)
WORDS = _COMMON_WORDS.split()
"""These words are one token each in most vocabularies."""


@dataclass(slots=True)
class LoadChat:
    """A `LoadChat` is a chat to be sent."""

    kind: str
    body: Body
    right_answer: str | None = None
    """Holds the one right answer; None means that it is not known."""


class ChatContent(Protocol):
    """Makes a chat of a request of a workload."""

    def chat(self, request: SimRequest) -> LoadChat:
        """Returns the chat, which contains the earlier turns of the request's conversation."""
        ...

    def answered(self, request: SimRequest, text: str) -> None:
        """Takes the answer, which the next turn of the conversation contains."""
        ...


def content_for(name: str, model: str, *, has_fixed_length: bool = True) -> ChatContent:
    """Returns the content with the name `sized`, `drawn`, or `auto`, which is drawn for the demo model and sized for
    every other one. Raises ConfigError for another name."""
    if name == "auto":
        name = "drawn" if model == DEMO_MODEL else "sized"
    if name == "drawn":
        return DrawnContent(model)
    if name == "sized":
        return SizedContent(model, has_fixed_length=has_fixed_length)
    raise ConfigError(f"there is no content {name!r}; write auto, drawn or sized")


@dataclass(slots=True)
class _Conversations:
    """Remembers what was said in conversations, because a workload does not say which of them are over."""

    session_to_turns: dict[int, list[Body]] = field(default_factory=dict)
    session_to_parts: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def begin_turn(self, request: SimRequest) -> tuple[list[Body], Sequence[Any]]:
        """Returns the turns so far, and the parts of the request that no earlier turn has had. A request that does not
        repeat the earlier turns begins a conversation."""
        known = self.session_to_parts.get(request.session)
        if known is None or len(request.parts) <= len(known) or request.parts[: len(known)] != known:
            return [], request.parts
        # The answer to the earlier turn is one part too.
        return self.session_to_turns[request.session], request.parts[len(known) + 1 :]

    def end_turn(self, request: SimRequest, turns: list[Body]) -> None:
        if request.session >= 0:
            self.session_to_turns[request.session] = list(turns)  # The body of the chat keeps its own.
            self.session_to_parts[request.session] = request.parts
        while len(self.session_to_turns) > KEPT_CONVERSATIONS:
            oldest = next(iter(self.session_to_turns))
            del self.session_to_turns[oldest], self.session_to_parts[oldest]

    def answered(self, request: SimRequest, text: str) -> None:
        """Adds the answer, unless the conversation was forgotten meanwhile."""
        if self.session_to_parts.get(request.session) == request.parts:
            self.session_to_turns[request.session].append({"role": "assistant", "content": text})


def _chat_body(model: str, turns: list[Body], max_tokens: int) -> Body:
    return {
        "model": model,
        "messages": turns,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# ------------------------------------------------------------ words and media of a given size


class SizedContent:
    """Gives requests words, pictures, videos and sounds of the size that their workload asks for."""

    def __init__(self, model: str, words: Sequence[str] = WORDS, *, has_fixed_length: bool = True) -> None:
        """Takes the words of texts, each of which should be one token of the model. With `has_fixed_length`, answers
        have exactly the length of the workload, which Weft, vLLM and SGLang know as `ignore_eos`."""
        self._model = model
        self._words = words
        self._has_fixed_length = has_fixed_length
        self._conversations = _Conversations()

    def chat(self, request: SimRequest) -> LoadChat:
        turns, new = self._conversations.begin_turn(request)
        turns = [*turns, {"role": "user", "content": [self._part(*part) for part in new]}]
        self._conversations.end_turn(request, turns)
        body = _chat_body(self._model, turns, request.num_output)
        if self._has_fixed_length:
            body["ignore_eos"] = True
        return LoadChat(request.kind, body)

    def answered(self, request: SimRequest, text: str) -> None:
        self._conversations.answered(request, text)

    def _part(self, first: int | str, second: int | str) -> Body:
        if (first, second) == QUESTION:
            return {"type": "text", "text": ASKED}
        if isinstance(second, int):
            drawn = np.random.default_rng(int(first)).integers(0, len(self._words), second)
            return {"type": "text", "text": "".join(f" {self._words[place]}" for place in drawn)}
        return _medium(str(first), second)


@lru_cache(maxsize=KEPT_MEDIA)
def _medium(name: str, content: str) -> Body:
    """Returns the medium of this name and content as a part of a message: `image` or `image-SIDE` (pixels),
    `video-FRAMESf` or `video-FRAMESf-SIDEp` (at two frames per second), or `audio-SECONDSs`. Raises ConfigError for
    another name."""
    kind, _, size = name.partition("-")
    seed = int.from_bytes(hashlib.blake2b(content.encode(), digest_size=4).digest())
    try:
        if kind == "image":
            data = base64.b64encode(_picture(int(size or 448), seed)).decode()
            return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        if kind == "video":
            num_frames, _, side = size.partition("f")
            film = _film(int(num_frames), int(side.removeprefix("-").removesuffix("p") or 256))
            data = base64.b64encode(_as_another_file(film, seed)).decode()
            return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
        if kind == "audio":
            data = base64.b64encode(_sound(float(size.removesuffix("s")), seed)).decode()
            return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    except ValueError:
        pass
    raise ConfigError(f"there is no medium {name!r}; write for example image, image-1024, video-30f or audio-5s")


def _picture(side: int, seed: int) -> bytes:
    """Returns a PNG of large coloured squares, which is a small file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


@cache
def _film(num_frames: int, side: int) -> bytes:
    """Returns an MP4 of so many frames, two per second, the rate at which most families take frames."""
    squares = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    frames = squares.repeat(side // 8, axis=1).repeat(side // 8, axis=2)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for number in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frames[number % 4], format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def _as_another_file(film: bytes, number: int) -> bytes:
    """Returns the same video as a file that no cache has: a box of free space follows (ISO 14496-12, 8.1.2)."""
    return film + struct.pack(">I4sQ", 16, b"free", number)


def _sound(seconds: float, seed: int, rate: int = 16_000) -> bytes:
    """Returns a WAV of soft noise."""
    samples = np.random.default_rng(seed).normal(0.0, 500.0, round(seconds * rate)).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


# ------------------------------------------------------------ questions with a known answer

MAX_ANSWER_TOKENS = 32
SEVERAL = ("which picture", "number of pictures")
"""The demo model has learned these tasks about several pictures."""
CANNED = ("clip with sound", "picture and sound", "earlier picture", "picture, text, picture", *SEVERAL)
"""These tasks are about more media than one, so no kind with one medium draws them."""


def _tasks_for(kind: str) -> list[Task]:
    """Returns the tasks about media of this kind. Raises ConfigError if the demo model has learned none."""
    media = media_of(kind)
    modalities = {name.partition("-")[0] for name in media} or {"text"}
    if modalities == {"image"} and len(media) > 1:
        return [task for task in TASKS if task.name in SEVERAL]
    tasks = [task for task in TASKS if {task.modality} == modalities and not task.needs_speech]
    tasks = [task for task in tasks if task.name not in CANNED]
    if not tasks or len(media) > 1:
        raise ConfigError(f"the demo model has learned no questions about {kind}; use the content `sized`")
    return tasks


class DrawnContent:
    """Asks the demo model questions about drawn media, whose answers are known. Only the first turn of a conversation
    has a known answer."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._conversations = _Conversations()

    def chat(self, request: SimRequest) -> LoadChat:
        turns, new = self._conversations.begin_turn(request)
        drawn, answer = _drawn(request.kind if not turns else "text", _content_of(new))
        said = [*turns, *drawn]
        self._conversations.end_turn(request, said)
        return LoadChat(request.kind, _chat_body(self._model, said, MAX_ANSWER_TOKENS), None if turns else answer)

    def answered(self, request: SimRequest, text: str) -> None:
        self._conversations.answered(request, text)


def _content_of(parts: Sequence[Any]) -> str:
    """Names the content of the parts: that of the media, so that equal media come with equal questions, or else that of
    the text."""
    media = [f"{first}/{second}" for first, second in parts if isinstance(first, str)]
    return "+".join(media) or "/".join(str(first) for first, _ in parts)


@lru_cache(maxsize=KEPT_MEDIA)
def _drawn(kind: str, content: str) -> tuple[tuple[Body, ...], str]:
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest()))
    tasks = _tasks_for(kind)
    draw: Callable[[np.random.Generator, int], Any] = tasks[int(rng.integers(len(tasks)))].draw
    sample = draw(rng, int(rng.integers(3)))
    return tuple(messages(sample)), sample.answer
