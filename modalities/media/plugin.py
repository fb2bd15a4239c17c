"""Defines the interface of a modality, and the rules that the plugins of all modalities share.

A `ModalityPlugin` reads a medium from a part of a request into bytes, and says what the file's first bytes mean. It
knows file formats and limits, and nothing of models: the family decides what a medium becomes (`modalities.family`).
`plan_media` joins the two. It turns a probed medium into the item that is sent to encoders and workers: the family
plans the medium, and its content identifies it.

The other parts stand here because the plugins and the decoders of all formats must agree on them: how a payload is
decoded, how much memory decoding takes at most, how far a decoded medium may be from its plan, how the time of decoding
is measured, and what a refused file seems to be.

This module decodes no medium. Of file formats it knows only the sizes that decoders need and the signatures that error
messages name, and it knows nothing of particular models and of processes.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import pybase64

from fabric.contracts import InvalidMedia, InvalidRequest, MediaItem, content_digest, mm_hash
from modalities.family import (
    DEFAULT_OPTIONS,
    AudioHeader,
    Family,
    FeaturesHeader,
    ImageHeader,
    ItemPlan,
    MediaHeader,
    MediaOptions,
    VideoHeader,
    plan_medium,
)


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
    max_audio_bytes: int = 25 * 2**20
    """Limits the file of one sound, as OpenAI does. Speech of few bits per second is still long within it."""
    max_decoded_bytes: int = 4 * 178_956_970
    """Limits what all media of a request take together once they are decoded (`decoded_bytes`): one picture of the
    largest size."""


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


class FirstVerdict(NamedTuple):
    """A `FirstVerdict` says what the first bytes of a file tell about whether it can be accepted."""

    flaw: str
    """Says why the file is refused; it is empty if nothing is wrong so far."""
    is_final: bool
    """Tells whether more bytes would tell no more."""


@runtime_checkable
class JudgesFirstBytes(Protocol):
    """A plugin may offer this in addition to `parse`, for files that arrive piece by piece, so that one that will be
    refused is not received to its end."""

    def max_file_bytes(self, limits: MediaLimits) -> int:
        """Returns how many bytes a file may have."""
        ...

    def judge(self, head: bytes, limits: MediaLimits) -> FirstVerdict:
        """Judges a file by its first bytes, which are at least `JUDGED_BYTES` unless they are the whole file. Takes a
        bounded number of steps, and raises nothing. Without a flaw the file may still be refused later."""
        ...


JUDGED_BYTES = 512
"""No file is judged by fewer of its first bytes."""
_DECLARED_SLACK, _DECLARED_SLACK_S = 1.05, 1.0
"""A length is declared with rounding, with what decoders leave out, and sometimes for the longest of several tracks. It
counts as too long only if it exceeds the limit by this factor and this many seconds."""


def declares_more(seconds: float | None, limit_s: float) -> bool:
    """Returns whether a length that a file declares is plainly more than the limit; None is an unknown length."""
    return seconds is not None and seconds > _DECLARED_SLACK * limit_s + _DECLARED_SLACK_S


def max_file_bytes(plugin: ModalityPlugin, limits: MediaLimits) -> int:
    """Returns how many bytes a file of the plugin's modality may have, in a request or behind a URL."""
    own = plugin.max_file_bytes(limits) if isinstance(plugin, JudgesFirstBytes) else limits.max_bytes_per_item
    return min(own, limits.max_bytes_per_item)


# ------------------------------------------------------------ the payload of a part

_SCHEME, _BASE64 = "data:", ";base64"


def part_url(part: Mapping[str, object], field: str, param: str) -> str:
    """Returns the URL of a part: `{field: {"url": ...}}`, or a plain string instead of the object. Raises
    InvalidRequest if there is no URL."""
    value = part.get(field)
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{param}: `{field}` must be a URL, or an object with a URL in `url`", param=param)
    return url


def decode_data_url(url: str, param: str, max_bytes: int) -> bytes:
    """Returns the bytes of a base64 `data:` URL (RFC 2397, RFC 4648 without line breaks or missing padding).

    The declared type is ignored because the type follows from the bytes. Raises InvalidRequest for other URLs, and
    InvalidMedia if the payload is not base64, is empty or is larger than `max_bytes`."""
    if url[: len(_SCHEME)].lower() != _SCHEME:
        raise InvalidRequest(
            f"{param}: only data: URLs are accepted; send the content of the file as data:<type>;base64,<payload>",
            param=param,
        )
    comma = url.find(",")
    if comma < 0 or url[max(len(_SCHEME), comma - len(_BASE64)) : comma].lower() != _BASE64:
        raise InvalidRequest(f"{param}: a data: URL must have the form data:<type>;base64,<payload>", param=param)
    return decode_base64(url[comma + 1 :], param, max_bytes)


def decode_base64(payload: str, param: str, max_bytes: int) -> bytes:
    """Returns the bytes of base64 text (RFC 4648, without line breaks or missing padding). The size follows from the
    length of the text, so too large a payload is refused before it is decoded. Raises InvalidMedia in the same cases as
    `decode_data_url`."""
    num_bytes = len(payload) * 3 // 4 - payload[-2:].count("=")
    if num_bytes > max_bytes:
        raise InvalidMedia(
            f"{param}: the file has {num_bytes} bytes, which is more than the limit of {max_bytes}", param=param
        )
    try:
        data = pybase64.b64decode(payload, validate=True)  # It releases the interpreter's lock while it decodes.
    except ValueError as error:
        message = f"{param}: the payload is not valid base64 (RFC 4648, without line breaks)"
        raise InvalidMedia(message, param=param) from error
    if not data:
        raise InvalidMedia(f"{param}: the payload is empty", param=param)
    return data


# ------------------------------------------------------------ from a header to an item


GIVEN_FEATURES = "given features"
"""Stands in the identity of features that a client sends where the processing options of other media stand."""


class PlannedMedium(NamedTuple):
    plan: ItemPlan
    item: MediaItem


def plan_media(
    family: Family,
    data: bytes,
    header: MediaHeader | FeaturesHeader,
    index: int,
    part: str,
    cache_salt: str = "",
    options: MediaOptions = DEFAULT_OPTIONS,
    anchor: int = -1,
    digest: bytes | None = None,
) -> PlannedMedium:
    """Returns the plan and the item of a medium, or of features that a client sends in its place: `data` is then the
    feature itself. `index` is its position among the request's media, and `part` is its place in the request. `anchor`
    is the index of the video whose sound track the medium is, and `digest` is the digest of `data` if the caller knows
    it. The hash covers the bytes, the model, the processing options, the decoded size and the tenant's salt. Raises
    InvalidMedia (naming the part) if the family refuses the medium."""
    try:
        plan = plan_medium(family, header, options)
    except InvalidMedia as error:
        raise InvalidMedia(f"{part}: {error.message}", param=part) from error
    if anchor != plan.anchor:
        plan = dataclasses.replace(plan, anchor=anchor)
    is_given = isinstance(header, FeaturesHeader)
    sampled = "" if is_given else options.encode()
    identity = mm_hash(
        content_digest(data) if digest is None else digest,
        namespace=family.model_id,
        modality=plan.modality,
        options=GIVEN_FEATURES if is_given else family.options(plan.modality) + sampled,
        geometry=plan.geometry,
        salt=cache_salt,
    )
    item = MediaItem(
        index=index,
        modality=plan.modality,
        mm_hash=identity,
        grid=plan.grid,
        unit_tokens=plan.unit_tokens,
        cost=plan.cost,
        part=part,
        options=sampled,
        row_seconds=plan.row_seconds,
        anchor=anchor,
        num_levels=plan.num_levels or family.shape.num_levels,
        decode_bytes=0 if isinstance(header, FeaturesHeader) else decode_bytes(header, len(data), plan.cost),
        is_given=is_given,
    )
    return PlannedMedium(plan, item)


# ------------------------------------------------------------ the memory that decoding takes

BASE_BYTES = 64 * 2**20
"""Covers the buffers whose size is constant, and the memory that the allocator keeps."""
COST_BYTES = 16 * 2**10
"""Counts the bytes for each patch (or mel frame): a patch of 16 x 16 is gathered through indexes of 8 bytes per
value."""
FILE_COPIES = 3
"""Counts the copies of the file: the received one, the one that the decoder reads, and one between them."""

_MODE_TO_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2}
"""Maps a mode to the bytes per pixel that Pillow stores; all other modes take 4."""
_FORMAT_TO_BYTES = {"PNG": 0, "BMP": 0, "GIF": 1, "JPEG": 6, "TIFF": 8, "WEBP": 13}
"""Maps a format to the bytes per pixel that the decoder uses in addition to its result: the coefficients of a
progressive JPEG, WebP's two canvases and their copy, a TIFF of one strip."""
_OTHER_FORMAT_BYTES = 16
_COPY_BYTES = 2 * 4
"""Counts the bytes per pixel of two copies: one that is rotated or has other colours, and one that is scaled."""
_FRAME_BYTES = 48
"""Counts the bytes per pixel of a video frame: 16 frames that other frames refer to, and one frame during its
conversion to RGB."""
_KEPT_FRAMES = 16
"""Counts the frames that a decoder keeps because others may refer to them (H.264 and H.265 allow 16)."""
_VIDEO_BYTES = 256 * 2**20
"""Covers FFmpeg's own memory, of which most is only reserved."""
_SAMPLE_BYTES = 8
"""Counts the bytes per sample: one float32 in the list of blocks and one in the joined array. The samples of other
channels and rates are already freed by then."""


def decoded_bytes(header: MediaHeader | FeaturesHeader) -> int:
    """Returns the bytes that a medium takes once it is decoded, as its header says: 4 for each pixel of a picture, 4
    for each sample of each channel of a sound, and 3 for each pixel of the frames that a video's decoder keeps, because
    a video is decoded frame by frame. It is 0 for features, which are not decoded, and for the media of other plugins,
    which have limits of their own."""
    nbytes = 0
    if isinstance(header, ImageHeader):
        nbytes = 4 * header.width * header.height
    elif isinstance(header, AudioHeader):
        nbytes = 4 * header.num_samples * header.num_channels
    elif isinstance(header, VideoHeader):
        nbytes = 3 * min(header.num_frames, _KEPT_FRAMES) * header.width * header.height
        nbytes += 0 if header.sound is None else decoded_bytes(header.sound)
    return nbytes


def decode_bytes(header: MediaHeader, num_file_bytes: int, cost: int) -> int:
    """Returns the bytes of data that a process takes at most, in addition to what it has, to decode a file of
    `num_file_bytes` bytes and preprocess it to `cost` patches or mel frames. A decode process may use this much for the
    medium.

    The numbers are measured with Pillow 13 and PyAV 18 (`docs/adr/0031-decoding-within-budgets.md`) and rounded up. A
    file that takes more is not what its header says, and is refused."""
    nbytes = BASE_BYTES + FILE_COPIES * num_file_bytes + COST_BYTES * cost
    if isinstance(header, ImageHeader):
        stored = _MODE_TO_BYTES.get(header.mode, 4)
        per_pixel = stored + _FORMAT_TO_BYTES.get(header.format, _OTHER_FORMAT_BYTES) + _COPY_BYTES
        nbytes += header.width * header.height * per_pixel
    elif isinstance(header, VideoHeader):
        nbytes += _VIDEO_BYTES + header.width * header.height * _FRAME_BYTES
    elif isinstance(header, AudioHeader):
        nbytes += header.num_samples * _SAMPLE_BYTES
    return nbytes


# ------------------------------------------------------------ the tolerance

# A medium within this tolerance of its planned length is padded or trimmed, and one beyond it is refused. Containers
# with correct headers are exact, but encoders' delays, variable frame rates and broken indexes are not.
FRAMES = 1
"""Limits the frames of a video that may be missing at its end (the last one is repeated) or be left over (they are
dropped)."""
AUDIO_S = 0.1
"""Limits the seconds of sound that may be missing (silence replaces them) or left over (they are dropped). It equals a
few windows of the mel spectrogram."""


# ------------------------------------------------------------ the time of decoding

P = ParamSpec("P")
T = TypeVar("T")

_thread = threading.local()


def decoding(decode: Callable[P, T]) -> Callable[P, T]:
    """Wraps `decode` to note the time of each call, separately for each thread. The notes say how much of the
    preprocessing time is decoding (`take_decode_s`)."""

    @functools.wraps(decode)
    def timed(*arguments: P.args, **options: P.kwargs) -> T:
        started_s = time.perf_counter()
        try:
            return decode(*arguments, **options)
        finally:
            _note(started_s)

    return timed


def decoding_piecewise(decode: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Wraps `decode` to note the time that each item takes to arrive, without the time that the caller spends between
    items."""

    @functools.wraps(decode)
    def timed(*arguments: P.args, **options: P.kwargs) -> Iterator[T]:
        pieces = decode(*arguments, **options)
        while True:
            started_s = time.perf_counter()
            try:
                piece = next(pieces)
            except StopIteration:
                return
            finally:
                _note(started_s)
            yield piece

    return timed


def _note(started_s: float) -> None:
    _thread.seconds = getattr(_thread, "seconds", 0.0) + time.perf_counter() - started_s


def take_decode_s() -> float:
    """Returns the seconds that this thread has decoded since the last call."""
    seconds: float = getattr(_thread, "seconds", 0.0)
    _thread.seconds = 0.0
    return seconds


# ------------------------------------------------------------ what a refused file seems to be

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (8, b"WEBP", "a WEBP image"),
    (0, b"BM", "a BMP image"),
    (0, b"II*\x00", "a TIFF image"),
    (0, b"MM\x00*", "a TIFF image"),
    (4, b"ftypavif", "an AVIF image"),
    (4, b"ftypavis", "an AVIF image"),
    (4, b"ftypheic", "a HEIC image"),
    (4, b"ftypheix", "a HEIC image"),
    (4, b"ftypmif1", "a HEIF image"),
    (0, b"\x00\x00\x01\x00", "an icon"),
    (8, b"WAVE", "a WAV file"),
    (8, b"AVI ", "an AVI file"),
    (4, b"ftyp", "an MP4 file"),
    (0, b"\x1a\x45\xdf\xa3", "a Matroska or WebM file"),
    (0, b"OggS", "an Ogg file"),
    (0, b"fLaC", "a FLAC file"),
    (0, b"ID3", "an MP3 file"),
    (0, b"%PDF", "a PDF document"),
    (0, b"PK\x03\x04", "a ZIP archive or a document in the ZIP format"),
    (0, b"\x1f\x8b", "a gzip archive"),
)
"""Lists tuples of an offset, the bytes at this offset, and a name, as the formats' specifications define them."""
_MARKUP = ((b"<svg", "an SVG drawing"), (b"<!doctype html", "an HTML page"), (b"<html", "an HTML page"))
_NUM_BYTES = 512


def seeming(data: bytes) -> str:
    """Returns text to append to a refusal, e.g. `; it seems to be a PNG image`. Returns an empty string if the file is
    unknown.

    The guess uses the file's first bytes alone, and nothing is decided by it. It helps because clients mix up fields,
    and forward error pages."""
    name = _seeming_kind(data)
    return f"; it {name}" if name else ""


def _seeming_kind(data: bytes) -> str:
    if not data:
        return "is empty"
    for offset, signature, name in _SIGNATURES:
        if data.startswith(signature, offset):
            return f"seems to be {name}"
    head = data[:_NUM_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for start, name in _MARKUP:
        if head.startswith(start) or (head.startswith(b"<?xml") and start in head):
            return f"seems to be {name}"
    is_text = not any(byte < 9 or 13 < byte < 32 for byte in data[:_NUM_BYTES]) and data[:_NUM_BYTES].isascii()
    return "seems to be text" if is_text else ""
