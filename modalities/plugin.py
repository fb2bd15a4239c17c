"""What a modality is: how one medium gets from a request's part to bytes, and what its first bytes say.

A plugin knows file formats and limits. It knows no model: what a medium becomes is the family's business
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
"""Of base64 that are decoded in one call, about half a millisecond; a multiple of 4."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What a client may send. Checked before anything is decoded."""

    max_bytes_per_item: int = 256 * 2**20
    """Of the encoded file. A request's body has a smaller limit of its own."""
    max_image_pixels: int = 178_956_970
    """Width x height; where Pillow by default calls an image a decompression bomb."""
    max_video_pixels: int = 8192 * 4320
    """Of one frame."""
    max_video_seconds: float = 3600.0
    max_video_frames: int = 500_000
    max_audio_seconds: float = 600.0
    """Also of a video's sound track, if the model hears it."""


class ModalityPlugin(Protocol):
    """One modality. Stateless and thread-safe."""

    @property
    def modality(self) -> str:
        """`image`, ..."""
        ...

    @property
    def part_types(self) -> tuple[str, ...]:
        """Types of the content parts that it parses, e.g. `image_url`."""
        ...

    @property
    def needs_process(self) -> bool:
        """Whether `probe` gives the file to a parser whose work is not bounded: then it belongs into a process that may
        be killed."""
        ...

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        """One content part of a request -> the encoded file. `param` names the part in errors. Raises InvalidRequest
        for a part of the wrong form, InvalidMedia for a medium that is broken or too large."""
        ...

    def probe(self, data: bytes, param: str) -> MediaHeader:
        """From the first bytes; decodes no pixels or samples. Raises InvalidMedia."""
        ...

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        """Raises InvalidMedia if the header is beyond the limits."""
        ...


@runtime_checkable
class ReadsFirstBytes(Protocol):
    """What a plugin may offer beside `probe`, for files that need no helper process."""

    def first_header(self, data: bytes) -> MediaHeader | None:
        """What `probe` would find, in a number of steps that no file can raise; None if that can't be told so."""
        ...


def part_url(part: Mapping[str, object], field: str, param: str) -> str:
    """The URL of a part: `{field: {"url": ...}}`, or a plain string instead of the object. Raises InvalidRequest."""
    value = part.get(field)
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{param}: `{field}` must be an object with a `url`, or a URL", param=param)
    return url


def decode_data_url(url: str, param: str, max_bytes: int) -> bytes:
    """Bytes of a base64 `data:` URL (RFC 2397, RFC 4648 without line breaks or missing padding).

    The declared type is not looked at: the bytes say what they are. Raises InvalidRequest for other URLs, InvalidMedia
    for a payload that is not base64, empty or larger than `max_bytes`."""
    if url[: len(_SCHEME)].lower() != _SCHEME:
        raise InvalidRequest(f"{param}: only data: URLs are enabled", param=param)
    comma = url.find(",")
    if comma < 0 or url[max(len(_SCHEME), comma - len(_BASE64)) : comma].lower() != _BASE64:
        raise InvalidRequest(f"{param}: a data: URL must read data:<type>;base64,<payload>", param=param)
    return decode_base64(url[comma + 1 :], param, max_bytes)


def decode_base64(payload: str, param: str, max_bytes: int) -> bytes:
    """RFC 4648, without line breaks or missing padding. The size is known from the length of the text, so what is too
    large is refused before it is decoded. Raises InvalidMedia as `decode_data_url` does."""
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
    """Piece by piece: the interpreter's lock is held for one piece at a time, so that the event loop goes on beside it.
    Raises ValueError."""
    if payload.endswith("==="):  # the one flaw that `validate` lets pass
        raise ValueError("excess padding")
    for at in range(0, len(payload), PIECE_CHARS):
        text = payload[at : at + PIECE_CHARS]
        piece = base64.b64decode(text, validate=True)
        if len(piece) * 4 != len(text) * 3 and at + PIECE_CHARS < len(payload):
            raise ValueError("padding before the end")
        yield piece
