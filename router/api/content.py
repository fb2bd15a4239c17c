"""Reads the content of a message: text and media parts, each with its path in the request (`messages.0.content.1`).

It checks shapes only. The medium's plugin checks what a medium holds, and the intake checks whether the model takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from fabric.errors import InvalidRequest
from router.api.request import ChatMessage

PART_TYPE_TO_MODALITY = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "file",
}
"""Maps the part types that OpenAI and its users know to modalities. A type without a plugin is an unsupported modality,
not an unknown part."""


MAX_UUID_LENGTH = 256


class TextPart(NamedTuple):
    text: str


Detail = Literal["auto", "low", "high"]


class MediaPart(NamedTuple):
    part_type: str
    fields: Mapping[str, object]
    param: str
    detail: Detail = "auto"
    """Says how closely the model should look at a picture."""


Part = TextPart | MediaPart


def _is_none(part_type: str) -> bool:
    return False


def parts_of(message: ChatMessage, index: int, is_media: Callable[[str], bool] = _is_none) -> str | list[Part]:
    """Returns the content of the message with index `index`. `is_media` tells whether a part type beyond the common
    ones has a parser. Raises InvalidRequest."""
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
    _check_uuid(part, kind, param)
    return MediaPart(kind, part, param, _detail(part, kind, param))


def _detail(part: Mapping[str, object], kind: str, param: str) -> Detail:
    """Returns the `detail` of a part. Raises InvalidRequest for a value that OpenAI does not define, and for `low` on
    anything but a picture."""
    value = part.get(kind)
    found = value.get("detail") if isinstance(value, Mapping) else None
    path = f"{param}.{kind}.detail"
    if found is None or found == "auto":
        return "auto"
    if found not in ("low", "high"):
        raise InvalidRequest("detail must be `auto`, `low` or `high`", param=path)
    if found == "low" and PART_TYPE_TO_MODALITY.get(kind) != "image":
        raise InvalidRequest("only pictures have a `low` detail", param=path)
    return "low" if found == "low" else "high"


def _check_uuid(part: Mapping[str, object], kind: str, param: str) -> None:
    """Checks a client's name for a medium (vLLM's extension), which stands next to the medium or within it. The name is
    a label without effect: a medium is identified by its content, so that no client can refer to another client's
    medium. Raises InvalidRequest for a name that is not a string of 1 to `MAX_UUID_LENGTH` characters, and for a name
    without the medium."""
    value = part.get(kind)
    inner = value if isinstance(value, Mapping) else {}
    uuid = part.get("uuid", inner.get("uuid"))
    if uuid is None:
        return
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        message = f"a uuid must be a string of 1 to {MAX_UUID_LENGTH} characters"
        raise InvalidRequest(message, param=f"{param}.uuid")
    has_medium = bool(set(inner) - {"uuid", "detail"}) if isinstance(value, Mapping) else bool(value)
    if kind in PART_TYPE_TO_MODALITY and not has_medium:
        raise InvalidRequest("a uuid can't stand in for a medium: its content must be sent", param=param)
