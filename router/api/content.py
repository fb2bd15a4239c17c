"""What stands in a message: text and media parts, each with its path in the request (`messages.0.content.1`).

Checks shapes only; what a medium holds is its plugin's, whether the model takes it the intake's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fabric.errors import InvalidRequest
from router.api.request import ChatMessage

PART_TYPE_TO_MODALITY = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "file",
}
"""Types that OpenAI and its users know. One without a plugin is an unsupported modality, not an unknown part."""


class TextPart(NamedTuple):
    text: str


class MediaPart(NamedTuple):
    part_type: str
    fields: Mapping[str, object]
    param: str


Part = TextPart | MediaPart


def _is_none(part_type: str) -> bool:
    return False


def parts_of(message: ChatMessage, index: int, is_media: Callable[[str], bool] = _is_none) -> str | list[Part]:
    """The content of message `index`. `is_media`: part types beyond the common ones that somebody parses. Raises
    InvalidRequest."""
    path = f"messages.{index}"
    if (message.model_extra or {}).get("tool_calls"):
        raise InvalidRequest("tool calls are not supported by this server", param=f"{path}.tool_calls")
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant":
        return ""
    if not isinstance(content, Sequence) or not content:
        raise InvalidRequest("content must be a string or a non-empty array of parts", param=f"{path}.content")
    return [_part(part, f"{path}.content.{at}", is_media) for at, part in enumerate(content)]


def _part(part: object, param: str, is_media: Callable[[str], bool]) -> Part:
    if not isinstance(part, Mapping):
        raise InvalidRequest("a content part must be an object", param=param)
    kind = part.get("type")
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise InvalidRequest(f"a {kind} part needs a string under `{kind}`", param=param)
        return TextPart(text)
    if not isinstance(kind, str):
        raise InvalidRequest("a content part needs a string under `type`", param=param)
    if kind not in PART_TYPE_TO_MODALITY and not is_media(kind):
        raise InvalidRequest(f"unknown content part type `{kind[:64]}`", param=param)
    return MediaPart(kind, part, param)
