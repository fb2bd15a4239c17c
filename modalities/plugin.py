"""Defines the interface of a modality: how a medium is read from a part of a request into bytes, and what its first
bytes say.

A plugin knows file formats and limits. It knows nothing of models: the family decides what a medium becomes
(`modalities.family`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fabric.errors import InvalidMedia, InvalidRequest
from modalities.family import MediaHeader

_SCHEME, _BASE64 = "data:", ";base64"
PIECE_CHARS = 2**18
"""Counts the base64 characters that are decoded in one call, which takes about half a millisecond. It is a multiple of
4."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Holds the limits on what a client may send. They are checked before anything is decoded."""

    max_bytes_per_item: int = 256 * 2**20
    """Limits the encoded file. A request's body has a smaller limit of its own."""
    max_image_pixels: int = 178_956_970
    """Limits width x height. Above this number, Pillow by default calls an image a decompression bomb."""
    max_video_pixels: int = 8192 * 4320
    """Limits the width x height of one frame."""
    max_video_seconds: float = 3600.0
    max_video_frames: int = 500_000
    max_audio_seconds: float = 600.0
    """Limits the length of a sound, and of a video's sound track if the model uses it."""


class ModalityPlugin(Protocol):
    """A `ModalityPlugin` handles one modality. It is stateless and thread-safe."""

    @property
    def modality(self) -> str:
        """Returns the name of the modality: `image`, ..."""
        ...

    @property
    def part_types(self) -> tuple[str, ...]:
        """Returns the types of the content parts that it parses, e.g. `image_url`."""
        ...

    @property
    def needs_process(self) -> bool:
        """Returns whether `probe` gives the file to a parser whose work is not bounded. In this case it must run in a
        process that may be killed."""
        ...

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        """Returns the encoded file that one content part of a request contains. `param` names the part in errors.
        Raises InvalidRequest if the part has the wrong form, and InvalidMedia if the medium is broken or too large."""
        ...

    def probe(self, data: bytes, param: str) -> MediaHeader:
        """Returns the header of the file; decodes no pixels or samples. Raises InvalidMedia if the file is broken."""
        ...

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        """Raises InvalidMedia if the header exceeds the limits."""
        ...


@runtime_checkable
class ReadsFirstBytes(Protocol):
    """A plugin may offer this in addition to `probe`, for files that need no helper process."""

    def first_header(self, data: bytes) -> MediaHeader | None:
        """Returns what `probe` would return, in a bounded number of steps for every file; None if this is not
        possible."""
        ...


def part_url(part: Mapping[str, object], field: str, param: str) -> str:
    """Returns the URL of a part: `{field: {"url": ...}}`, or a plain string instead of the object. Raises
    InvalidRequest if there is no URL."""
    value = part.get(field)
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{param}: `{field}` must be an object with a `url`, or a URL", param=param)
    return url


def decode_data_url(url: str, param: str, max_bytes: int) -> bytes:
    """Returns the bytes of a base64 `data:` URL (RFC 2397, RFC 4648 without line breaks or missing padding).

    The declared type is ignored because the type follows from the bytes. Raises InvalidRequest for other URLs, and
    InvalidMedia if the payload is not base64, is empty or is larger than `max_bytes`."""
    if url[: len(_SCHEME)].lower() != _SCHEME:
        raise InvalidRequest(f"{param}: only data: URLs are enabled", param=param)
    comma = url.find(",")
    if comma < 0 or url[max(len(_SCHEME), comma - len(_BASE64)) : comma].lower() != _BASE64:
        raise InvalidRequest(f"{param}: a data: URL must read data:<type>;base64,<payload>", param=param)
    return decode_base64(url[comma + 1 :], param, max_bytes)


def decode_base64(payload: str, param: str, max_bytes: int) -> bytes:
    """Returns the bytes of base64 text (RFC 4648, without line breaks or missing padding). The size follows from the
    length of the text, so too large a payload is refused before it is decoded. Raises InvalidMedia in the same cases as
    `decode_data_url`."""
    num_bytes = len(payload) * 3 // 4 - payload[-2:].count("=")
    if num_bytes > max_bytes:
        raise InvalidMedia(f"{param}: {num_bytes} bytes are more than the limit of {max_bytes}", param=param)
    try:
        data = b"".join(_decoded_pieces(payload))
    except (binascii.Error, ValueError) as error:
        message = f"{param}: the payload is not valid base64 (RFC 4648, without line breaks)"
        raise InvalidMedia(message, param=param) from error
    if not data:
        raise InvalidMedia(f"{param}: the payload is empty", param=param)
    return data


def _decoded_pieces(payload: str) -> Iterator[bytes]:
    """Yields the decoded payload piece by piece. The interpreter's lock is held for one piece at a time, so the event
    loop continues in the meantime. Raises ValueError if the payload is not valid base64."""
    if payload.endswith("==="):  # This is the only flaw that `validate` does not find.
        raise ValueError("excess padding")
    for at in range(0, len(payload), PIECE_CHARS):
        text = payload[at : at + PIECE_CHARS]
        piece = base64.b64decode(text, validate=True)
        if len(piece) * 4 != len(text) * 3 and at + PIECE_CHARS < len(payload):
            raise ValueError("padding before the end")
        yield piece
