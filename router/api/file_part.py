"""Reads content parts of the type `file`, as OpenAI's clients send files: `file_as_part` returns a part of the type
that fits the file, or its text.

The type that the client states, or the ending of the file's name, decides; what a medium really is, its plugin finds
out. The module keeps no files, so it knows no `file_id`.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes, urlsplit

from fabric.contracts import InvalidRequest
from router.api.field_errors import shown

MAX_TEXT_BYTES = 2**18
"""Limits the size of a text file."""
MEDIA_KINDS = ("image", "audio", "video")
TEXT_TYPES = ("application/json", "application/xml", "application/yaml")
OCTETS = "application/octet-stream"


def file_as_part(part: Mapping[str, object], param: str) -> dict[str, object]:
    """Returns the part as a medium (`image_url`, `audio_url`, `video_url`) or as a text. Raises InvalidRequest if the
    file has neither content nor a URL, or is of a kind that no model takes."""
    file = part.get("file")
    if not isinstance(file, Mapping):
        raise InvalidRequest(f"`file` must be an object, not {shown(file)}", param=param)
    if file.get("file_id"):
        message = "this server keeps no files, so `file_id` names none; send the file in `file_data`"
        raise InvalidRequest(message, param=f"{param}.file.file_id")
    source = file.get("file_data") or file.get("file_url")
    if not isinstance(source, str):
        message = f"a file needs its content in `file_data`, as a `data:` URL, not {shown(source)}"
        raise InvalidRequest(message, param=f"{param}.file.file_data")
    media_type = _media_type(source, file.get("filename"))
    if "file_data" in file and not source.startswith("data:"):
        source = f"data:{media_type};base64,{source}"
    kind = media_type.partition("/")[0]
    if kind in MEDIA_KINDS:
        named = {key: each[key] for each in (file, part) for key in ("uuid",) if key in each}
        return named | {"type": f"{kind}_url", f"{kind}_url": {"url": source}}
    if (kind == "text" or media_type in TEXT_TYPES) and source.startswith("data:"):
        return {"type": "text", "text": _text(source, param)}
    message = f"a file of the type {shown(media_type)} can't be read; send a picture, a sound, a video or a text"
    raise InvalidRequest(message, param=param)


def _media_type(source: str, filename: object) -> str:
    """Returns the type that a `data:` URL states, or else the type that the name of the file stands for."""
    if source.startswith("data:"):
        stated = source[len("data:") : 256].partition(",")[0].partition(";")[0].lower()
        if stated not in ("", OCTETS):
            return stated
    name = filename if isinstance(filename, str) and filename else ""
    if not name and not source.startswith("data:"):
        try:
            name = urlsplit(source).path
        except ValueError:
            name = ""
    return mimetypes.guess_type(f"/{name[-256:]}", strict=False)[0] or OCTETS


def _text(source: str, param: str) -> str:
    head, _, payload = source.partition(",")
    if len(payload) > MAX_TEXT_BYTES * 4 // 3:
        message = f"a text file may have at most {MAX_TEXT_BYTES} bytes"
        raise InvalidRequest(message, param=param)
    try:
        data = base64.b64decode(payload, validate=True) if head.endswith(";base64") else unquote_to_bytes(payload)
        return data.decode()
    except (binascii.Error, UnicodeError) as error:
        message = "a text file must be UTF-8, in a `data:` URL with base64"
        raise InvalidRequest(message, param=param) from error
