"""Keeps a conversation for `weft chat`: its messages with their media, and what is asked of the cluster.

A `ChatHistory` takes what the user writes and attaches, makes the body of each request, and takes the answers. Media
are files, which travel inside the request, or URLs, which the cluster fetches. `AnswerStream` reads the events of a
streamed answer and measures it. The module knows nothing of terminals, and asks nothing itself.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fabric.contracts import ConfigError, Unavailable

MODALITY_TO_TYPE = {"image": "image_url", "video": "video_url", "audio": "audio_url"}
"""Maps what a user attaches to the type of the part that carries it. `audio_url` with a `data:` URL names the format of
a sound by its media type, where `input_audio` takes two formats only."""
OTHER_TYPES = {".flac": "audio/flac", ".opus": "audio/ogg", ".m4a": "audio/mp4", ".webp": "image/webp"}
"""Maps suffixes that Python's table lacks on some systems to their media types."""


class AttachedMedium(NamedTuple):
    """An `AttachedMedium` is a picture, video or sound of a message. `part` is as the API takes it, and `name` is what
    the user wrote."""

    name: str
    part: Mapping[str, Any]
    num_bytes: int | None
    """It is None for a URL."""


def attach(modality: str, name: str) -> AttachedMedium:
    """Returns a medium from a file or a URL. Raises ConfigError for a file that can't be read or holds nothing."""
    part_type = MODALITY_TO_TYPE[modality]
    if name.startswith(("http://", "https://", "data:")):
        return AttachedMedium(name, {"type": part_type, part_type: {"url": name}}, None)
    path = Path(name).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the file {name} can't be read: {error.strerror}") from error
    if not data:
        raise ConfigError(f"the file {name} is empty")
    guessed = OTHER_TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or ""
    # The cluster looks at the bytes; the type only says of what kind they should be.
    media_type = guessed if guessed.startswith(f"{modality}/") else f"{modality}/{DEFAULT_SUBTYPE[modality]}"
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return AttachedMedium(name, {"type": part_type, part_type: {"url": url}}, len(data))


DEFAULT_SUBTYPE = {"image": "png", "video": "mp4", "audio": "wav"}


class Said(NamedTuple):
    """A `Said` is one message of the user or of the model."""

    role: str
    text: str
    media: tuple[AttachedMedium, ...] = ()

    def to_message(self) -> dict[str, Any]:
        if not self.media:
            return {"role": self.role, "content": self.text}
        parts = [dict(medium.part) for medium in self.media]
        return {"role": self.role, "content": [*parts, *([{"type": "text", "text": self.text}] if self.text else [])]}


class ChatHistory:
    """A `ChatHistory` is one conversation. `options` are further fields of every request, such as `temperature`."""

    def __init__(self, model: str, system: str = "", options: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.system = system
        self.said: list[Said] = []
        self.attached: list[AttachedMedium] = []
        """Holds media that go with the next question."""
        self._unanswered: Said | None = None
        """Holds the last question if nothing came of it."""
        self._options = dict(options or {})

    def ask(self, text: str) -> dict[str, Any]:
        """Adds a question with what is attached, and returns the body of the request for its answer."""
        self.said.append(Said("user", text, tuple(self.attached)))
        self.attached, self._unanswered = [], None
        return self._body()

    def ask_again(self) -> dict[str, Any]:
        """Takes the last answer back, and returns the body of the request for another one. Raises ConfigError if
        nothing was asked."""
        if self._unanswered is not None:
            self.said.append(self._unanswered)
            self._unanswered = None
        while self.said and self.said[-1].role == "assistant":
            self.said.pop()
        if not self.said:
            raise ConfigError("nothing was asked yet, so there is nothing to ask again")
        return self._body()

    def answered(self, text: str) -> None:
        """Adds what the model has said. Where that is nothing, the question leaves the conversation, so that there are
        never two in a row; `ask_again` puts it back."""
        if text:
            self.said.append(Said("assistant", text))
        elif self.said and self.said[-1].role == "user":
            self._unanswered = self.said.pop()

    def reset(self) -> None:
        """Forgets everything that was said and attached. The system's text stays."""
        self.said, self.attached, self._unanswered = [], [], None

    def _messages(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *(each.to_message() for each in self.said)]

    def _body(self) -> dict[str, Any]:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": self._messages(), **streamed, **self._options}

    def save(self, path: Path) -> None:
        """Writes the conversation: the messages as the API takes them to a `.json` file, and a text for people with the
        names of the media to any other. Raises ConfigError if the file exists or can't be written."""
        if path.suffix == ".json":
            written = json.dumps({"model": self.model, "messages": self._messages()}, indent=2, ensure_ascii=False)
        else:
            blocks = [f"**system**: {self.system}\n"] if self.system else []
            for each in self.said:
                shown = "".join(f"[{medium.name}] " for medium in each.media)
                blocks.append(f"**{each.role}**: {shown}{each.text}\n")
            written = "\n".join(blocks)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(written.rstrip("\n") + "\n")
        except FileExistsError as error:
            raise ConfigError(f"the file {path} exists already; name another one") from error
        except OSError as error:
            raise ConfigError(f"the file {path} can't be written: {error.strerror}") from error


# ------------------------------------------------------------ one answer


class AnswerFigures(NamedTuple):
    """Holds what was measured of an answer. Times count from the sending of the question."""

    request_id: str
    first_token_s: float | None
    total_s: float
    usage: Mapping[str, Any]
    """Is OpenAI's `usage`; it is empty if the answer was stopped before it came."""
    finish_reason: str

    @property
    def tokens_per_s(self) -> float | None:
        """Returns the rate at which tokens came after the first one, or None if it can't be known."""
        num_tokens = self.usage.get("completion_tokens") or 0
        if self.first_token_s is None or num_tokens < 2 or self.total_s <= self.first_token_s:
            return None
        return float((num_tokens - 1) / (self.total_s - self.first_token_s))

    def lines(self) -> list[str]:
        """Returns the figures for people."""
        first = "no token came" if self.first_token_s is None else f"first token {self.first_token_s * 1000:.0f} ms"
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.1f} tokens/s"
        lines = [f"{first}{rate}, {self.total_s:.2f} s in all, ended with: {self.finish_reason or 'stopped'}"]
        if self.usage:
            details = self.usage.get("prompt_tokens_details") or {}
            kinds = {name.removesuffix("_tokens"): count for name, count in details.items() if count}
            listed = ", ".join(f"{count} {name}" for name, count in kinds.items())
            prompt = f"{self.usage['prompt_tokens']} prompt tokens" + (f" ({listed})" if listed else "")
            lines.append(f"{prompt}, {self.usage['completion_tokens']} generated tokens")
        return [*lines, f"request {self.request_id}; `weft trace {self.request_id}` shows where its time went"]


class Piece(NamedTuple):
    """A `Piece` is a part of an answer that has just come."""

    text: str
    is_reasoning: bool = False


class AnswerStream:
    """An `AnswerStream` reads one streamed answer. `clock` gives seconds; the answer begins with its construction."""

    def __init__(self, request_id: str, clock: Callable[[], float], asked_s: float) -> None:
        self.text = ""
        self._request_id = request_id
        self._clock = clock
        self._asked_s = asked_s
        self._first_token_s: float | None = None
        self._usage: Mapping[str, Any] = {}
        self._finish_reason = ""

    def pieces(self, lines: Iterable[str]) -> Iterator[Piece]:
        """Yields the pieces of the answer in the lines of an event stream. Raises Unavailable if the cluster ends the
        answer with an error."""
        for line in lines:
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise Unavailable(f"the cluster ended the answer with an error: {event['error']['message']}")
            self._usage = event.get("usage") or self._usage
            for choice in event["choices"]:
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                for name in ("reasoning_content", "content"):
                    piece = choice["delta"].get(name) or ""
                    if piece:
                        yield self._take(piece, name == "reasoning_content")

    def _take(self, piece: str, is_reasoning: bool) -> Piece:
        if self._first_token_s is None:
            self._first_token_s = self._clock() - self._asked_s
        if not is_reasoning:
            self.text += piece
        return Piece(piece, is_reasoning)

    def figures(self) -> AnswerFigures:
        total_s = self._clock() - self._asked_s
        return AnswerFigures(self._request_id, self._first_token_s, total_s, self._usage, self._finish_reason)
