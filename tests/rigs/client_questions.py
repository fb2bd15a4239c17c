"""Holds the questions about media that clients ask the demo model, with the right answers: with the media in the
request, as parts that are files, and by URL."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from media_web import MediaWeb

from deploy.demo.ask import messages, questions

MODALITY_TO_TASK = {"image": "colour", "video": "direction", "audio": "beeps"}
MODALITY_TO_FILE = {"image": "picture.png", "video": "clip.mp4", "audio": "sound.wav"}
WORDS = ("blue", "green")
NUMBER = "seven"
NUMBER_QUESTION = "Which number is spoken?"
_FOLDER = Path(__file__).parents[1] / "media"


def media_question(modality: str) -> tuple[list[Any], str]:
    """Returns messages with a medium, and the right answer."""
    found = next(each for each in questions(0) if each.task == MODALITY_TO_TASK[modality])
    return messages(found.sample), found.sample.answer


def spoken(word: str) -> bytes:
    """Returns an MP3 file in which espeak-ng says one of `WORDS`, or `NUMBER`."""
    return (_FOLDER / f"{word}.mp3").read_bytes()


def content_of(part: dict[str, Any]) -> bytes:
    """Returns the file that a part of a message holds."""
    held = part[part["type"]]
    text = held["data"] if "data" in held else held["url"].partition(",")[2]
    return base64.b64decode(text)


def pages() -> dict[str, bytes]:
    """Returns the media of the questions by the path under which a server may offer them."""
    found = {}
    for modality, name in MODALITY_TO_FILE.items():
        (part,) = _media_parts(media_question(modality)[0])
        found[f"/{name}"] = content_of(part)
    return found


def as_url(asked: list[Any], modality: str, web: MediaWeb) -> list[Any]:
    """Returns the same messages with the URL of the medium in place of its content."""
    kind = f"{modality}_url"
    return _replaced(asked, {"type": kind, kind: {"url": web.url(f"/{MODALITY_TO_FILE[modality]}")}})


def as_file(asked: list[Any], modality: str) -> list[Any]:
    """Returns the same messages with a part of the type `file` in place of the medium."""
    (part,) = _media_parts(asked)
    data = f"data:;base64,{base64.b64encode(content_of(part)).decode()}"
    return _replaced(asked, {"type": "file", "file": {"filename": MODALITY_TO_FILE[modality], "file_data": data}})


def _media_parts(asked: list[Any]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in asked if not isinstance(message["content"], str)]
    return [part for content in contents for part in content if part["type"] != "text"]


def _replaced(asked: list[Any], medium: dict[str, Any]) -> list[Any]:
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": [part if part["type"] == "text" else medium for part in message["content"]]}
        for message in asked
    ]
