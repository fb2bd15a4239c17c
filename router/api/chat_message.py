"""Defines one message of a chat, and reads its content: its text, or its parts (`parts_of`).

The module checks shapes only. It does not know what a medium holds (the medium's plugin checks that), or whether the
model takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast

from fabric.contracts import InvalidRequest
from router.api.field_errors import shown
from router.api.file_part import file_as_part
from router.api.tool_fields import ToolCall

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(BaseModel):
    """A `ChatMessage` is one message of the request. `parts_of` reads `content` and names the offending part."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    role: Role
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, FailFast()] = None
    """Holds the calls that an assistant's message made."""
    reasoning_content: str | None = None
    """Holds what an assistant thought before its message; templates decide whether the model sees it again."""


IMAGE_EMBEDS = "image_embeds"
"""Is the type of a part that holds the features of a picture instead of the picture (vLLM's extension)."""
FILE = "file"
"""Is the type of a part that holds any file. One with a name alone stands for a medium of any modality."""
PART_TYPE_TO_MODALITY = {
    "image_url": "image",
    IMAGE_EMBEDS: "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    FILE: "file",
}
"""Maps the part types that OpenAI and its users know to modalities. A type without a plugin is an unsupported modality,
not an unknown part."""
TEXT_PART_TYPES = ("text", "refusal")
MAX_UUID_LENGTH = 256
_DESCRIPTIONS = ("uuid", "detail", "format", "filename")
"""Are the fields that stand beside the content of a medium, and are none."""
Detail = Literal["auto", "low", "high"]


class TextPart(NamedTuple):
    text: str


class MediaPart(NamedTuple):
    part_type: str
    fields: Mapping[str, object]
    param: str
    detail: Detail = "auto"
    """Says how closely the model should look at a picture."""
    uuid: str = ""
    """Is the client's own name for the medium; it is empty if there is none."""
    has_content: bool = True
    """Is False if the part has only a name, of a medium that an earlier request has sent."""


Part = TextPart | MediaPart


def _never_media(part_type: str) -> bool:
    return False


def parts_of(message: ChatMessage, index: int, is_media: Callable[[str], bool] = _never_media) -> str | list[Part]:
    """Returns the content of the message with index `index`: its text, or its parts, each medium with its path in the
    request (`messages.0.content.1`). `is_media` tells whether a part type beyond the common ones has a parser. Raises
    InvalidRequest."""
    path = f"messages.{index}"
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant":
        return ""
    if not isinstance(content, Sequence) or not content:
        flaw = f"`{path}.content` must be a string or a non-empty array of parts, not {shown(content)}"
        raise InvalidRequest(flaw, param=f"{path}.content")
    return [_part(part, f"{path}.content.{at}", is_media) for at, part in enumerate(content)]


def _part(part: object, param: str, is_media: Callable[[str], bool]) -> Part:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"a content part must be an object, not {shown(part)}", param=param)
    kind = part.get("type")
    if kind in TEXT_PART_TYPES:
        text = part.get(kind)
        if not isinstance(text, str):
            raise InvalidRequest(f"a `{kind}` part needs a string under `{kind}`, not {shown(text)}", param=param)
        return TextPart(text)
    if not isinstance(kind, str):
        raise InvalidRequest(f"a content part needs a string under `type`, not {shown(kind)}", param=param)
    if kind not in PART_TYPE_TO_MODALITY and not is_media(kind):
        known = ", ".join(("text", *PART_TYPE_TO_MODALITY))
        raise InvalidRequest(f"the content part type {shown(kind)} is unknown; known types are {known}", param=param)
    uuid, has_content = _name(part, kind, param)
    if kind == FILE and not is_media(kind):
        named = MediaPart(kind, part, param, uuid=uuid, has_content=False)
        return _part(file_as_part(part, param), param, is_media) if has_content else named
    return MediaPart(kind, part, param, _detail(part, kind, param), uuid, has_content)


def _detail(part: Mapping[str, object], kind: str, param: str) -> Detail:
    """Returns the `detail` of a part; `original` is `high`, because no picture is made larger than the model takes it.
    Raises InvalidRequest for a value that OpenAI does not define, and for `low` on anything but a picture."""
    value = part.get(kind)
    found = value.get("detail") if isinstance(value, Mapping) else None
    path = f"{param}.{kind}.detail"
    if found is None or found == "auto":
        return "auto"
    if found not in ("low", "high", "original"):
        raise InvalidRequest(f"`detail` must be `auto`, `low`, `high` or `original`, not {shown(found)}", param=path)
    if found == "low" and (PART_TYPE_TO_MODALITY.get(kind) != "image" or kind == IMAGE_EMBEDS):
        raise InvalidRequest(
            f"only pictures have a `low` detail; a part of the type `{kind}` takes `auto` or `high`", param=path
        )
    return "low" if found == "low" else "high"


def _name(part: Mapping[str, object], kind: str, param: str) -> tuple[str, bool]:
    """Returns a client's name for a medium (vLLM's extension), which stands next to the medium or within it, and
    whether the part has the medium too. Raises InvalidRequest for a name that is not a string of 1 to `MAX_UUID_LENGTH`
    characters."""
    value = part.get(kind)
    inner = value if isinstance(value, Mapping) else {}
    uuid = part.get("uuid", inner.get("uuid"))
    if uuid is None:
        return "", True
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        message = f"a `uuid` must be a string of 1 to {MAX_UUID_LENGTH} characters, not {shown(uuid)}"
        raise InvalidRequest(message, param=f"{param}.uuid")
    contents = [each for key, each in inner.items() if key not in _DESCRIPTIONS]
    return uuid, any(contents) if isinstance(value, Mapping) else bool(value)
