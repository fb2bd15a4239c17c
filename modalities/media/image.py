"""Implements the image modality with Pillow: it parses `image_url` parts, reads headers, decodes pictures, and converts
their colours and values.

`ImagePlugin` and `decode_image` read the file. `to_rgb` and `normalise` give a decoded picture the colours and values
of transformers' Pillow image processors, bit for bit, for the families' `preprocess`.

This module knows nothing of models: the families choose sizes, crops and patches.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import AvifImagePlugin, Image, features

from fabric.contracts import InvalidMedia
from modalities.family import ImageHeader, MediaHeader
from modalities.media.first_bytes import declared_picture, is_picture
from modalities.media.image_header import picture_header
from modalities.media.plugin import FirstVerdict, MediaLimits, decode_data_url, decoding, part_url, seeming

# ------------------------------------------------------------ files

# `MediaLimits` sets the limit on pixels, which is checked on the header. Pillow's own limit would warn at half of it,
# and it holds for a whole process.
Image.MAX_IMAGE_PIXELS = None

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", *(("AVIF",) if features.check("avif") else ()))
"""Lists the decoders that are allowed: other containers that Pillow knows never reach its parsers. Pillow's own wheels
support AVIF, but builds of distributions need not."""
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # The processes of a pool already share the cores.

_FORMAT_TO_NAME = {"MPO": "JPEG"}  # Phones write MPO files: JPEG files with more pictures behind the first.
_ORIENTATION_TAG = 0x0112
_ORIENTATION_TO_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow's decoders raise these errors for broken files; they have no common base class, and were found by fuzzing and
# reading.
_DECODER_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class ImagePlugin:
    """Parses and probes images in `image_url` parts."""

    modality = "image"
    part_types = ("image_url",)
    needs_process = True

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        """Returns the bytes of the file in the part's data URL. Raises InvalidRequest if the part has another form, and
        InvalidMedia if the payload is broken or too large."""
        return decode_data_url(part_url(part, "image_url", param), param, limits.max_bytes_per_item)

    def max_file_bytes(self, limits: MediaLimits) -> int:
        return limits.max_bytes_per_item

    def judge(self, head: bytes, limits: MediaLimits) -> FirstVerdict:
        """Finds a flaw in what is no picture, and in one that declares more pixels than the limit."""
        if not is_picture(head):
            return FirstVerdict(_not_readable(head), True)
        width, height, _, is_final = declared_picture(head)
        flaw = "" if width is None or height is None else _too_many_pixels(width, height, limits)
        return FirstVerdict(flaw, is_final)

    def first_header(self, data: bytes) -> ImageHeader | None:
        """Returns the header of an ordinary file, or None; see `modalities.media.image_header`."""
        return picture_header(data)

    def probe(self, data: bytes, param: str) -> ImageHeader:
        """Returns the header of the first frame; Pillow may read the whole file for it. Raises InvalidMedia if the file
        is not a readable image."""
        return open_image(data, param).header

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        """Raises InvalidMedia if the image has more pixels than the limit."""
        assert isinstance(header, ImageHeader)
        if flaw := _too_many_pixels(header.width, header.height, limits):
            raise InvalidMedia(f"{param}: {flaw}", param=param)


def _too_many_pixels(width: int, height: int, limits: MediaLimits) -> str:
    """Returns what is wrong with the size of a picture, or an empty string."""
    if width * height <= limits.max_image_pixels:
        return ""
    return f"the image has {width}x{height} pixels, which is more than the limit of {limits.max_image_pixels} pixels"


def _not_readable(data: bytes) -> str:
    return f"the file is not a readable image of a supported format ({', '.join(FORMATS)}){seeming(data)}"


class OpenedImage(NamedTuple):
    image: Image.Image
    """This image is neither decoded nor rotated."""
    header: ImageHeader
    orientation: int
    """Gives the rotation that is still to be applied, as EXIF's number: 1 is upright, and 5 to 8 exchange width and
    height."""


def open_image(data: bytes, param: str) -> OpenedImage:
    """Opens an image and reads only its header. Raises InvalidMedia if the file is not an image of an allowed
    format."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except _DECODER_ERRORS as error:
        raise InvalidMedia(f"{param}: {_not_readable(data)}", param=param) from error
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidMedia(f"{param}: the image has no pixels: its size is {width}x{height}", param=param)
    # Pillow's TIFF reader rotates the image itself: it changes the size at once, and the pixels when they are loaded.
    orientation = 1 if image.format == "TIFF" else _orientation(image, data)
    if orientation >= 5:
        width, height = height, width
    name = image.format or ""
    return OpenedImage(image, ImageHeader(_FORMAT_TO_NAME.get(name, name), width, height, image.mode), orientation)


@decoding
def decode_image(data: bytes, param: str) -> tuple[Image.Image, ImageHeader]:
    """Returns the first frame, upright and in the file's own mode, and its header. Raises InvalidMedia if the file is
    broken or truncated, or if the size of the pixels is not the header's."""
    opened = open_image(data, param)
    image = opened.image
    try:
        image.load()
        if opened.orientation in _ORIENTATION_TO_TRANSPOSE:
            image = image.transpose(_ORIENTATION_TO_TRANSPOSE[opened.orientation])
    except _DECODER_ERRORS as error:
        raise InvalidMedia(f"{param}: the {opened.header.format} file is broken or truncated", param=param) from error
    if image.size != (opened.header.width, opened.header.height):
        size, declared = "x".join(map(str, image.size)), f"{opened.header.width}x{opened.header.height}"
        raise InvalidMedia(f"{param}: the image has {size} pixels, but its header says {declared}", param=param)
    return image, opened.header


def _orientation(image: Image.Image, data: bytes) -> int:
    """Returns the EXIF orientation, or 1 if there is none or the EXIF data are broken."""
    try:
        # The PNG reader's own method would decode all pixels to reach an EXIF chunk behind them.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG)
        if value is None and image.format == "PNG" and (late := _png_chunk(data, b"eXIf")):
            exif = Image.Exif()
            exif.load(late)
            value = exif.get(_ORIENTATION_TAG)
    except _DECODER_ERRORS:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _png_chunk(data: bytes, name: bytes) -> bytes | None:
    """Returns the body of the first chunk with that name, or None. Steps from chunk to chunk by their lengths (PNG
    specification, section 5.3)."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if data[at + 4 : at + 8] == name:
            return data[at + 8 : at + 8 + length]
        at += 12 + length
    return None


# ------------------------------------------------------------ colours and values

_WHITE = (255, 255, 255, 255)
_STRIP_PIXELS = 2**18
"""Limits the pixels that are laid on white at once, so that their copies stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Says what an 8-bit value becomes: it is multiplied by `rescale_factor`, then `mean` is subtracted and the result
    is divided by `std`; each step applies if its numbers are given."""

    rescale_factor: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns the image in RGB. Transparent pixels are laid on white (transformers' rule since 5.x). 16-bit grey is
    clipped at 255, which is Pillow's conversion and therefore the reference's.

    Takes the memory of one more picture. An RGB image without transparency is returned as it is and takes no memory."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgb = Image.new("RGB", image.size)
    num_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        strip = image.crop((0, top, image.width, min(top + num_rows, image.height))).convert("RGBA")
        rgb.paste(Image.alpha_composite(Image.new("RGBA", strip.size, _WHITE), strip).convert("RGB"), (0, top))
    return rgb


def channel_values(options: Normalisation) -> npt.NDArray[np.float32]:
    """Returns the value that each 8-bit value of each channel becomes, in the reference's order of operations. Has
    shape `(3, 256)`."""
    values: npt.NDArray[np.float32] = np.arange(256).astype(np.float32)
    if options.rescale_factor is not None:
        values = (np.arange(256, dtype=np.float64) * options.rescale_factor).astype(np.float32)
    table = np.broadcast_to(values, (3, 256))
    if options.mean is not None and options.std is not None:
        mean, std = np.array(options.mean, dtype=np.float32), np.array(options.std, dtype=np.float32)
        table = (table - mean[:, None]) / std[:, None]
    return np.ascontiguousarray(table, dtype=np.float32)


def fused_channel_values(options: Normalisation) -> npt.NDArray[np.float32]:
    """Returns the same table as `channel_values`, but in the order of operations of transformers' video processors,
    where scaling and normalising are one step."""
    values: npt.NDArray[np.float32] = np.broadcast_to(np.arange(256, dtype=np.float32), (3, 256))
    factor = options.rescale_factor
    if options.mean is None or options.std is None:
        return np.ascontiguousarray(values if factor is None else values * np.float32(factor), dtype=np.float32)
    scale = np.float32(1.0 if factor is None else 1.0 / factor)
    mean, std = (np.array(found, dtype=np.float32) * scale for found in (options.mean, options.std))
    return np.ascontiguousarray((values - mean[:, None]) / std[:, None], dtype=np.float32)


def normalise(pixels: npt.NDArray[np.uint8], options: Normalisation) -> npt.NDArray[np.float32]:
    """Returns the normalised pixels `(n, 3, height, width)` of `(n, height, width, 3)`."""
    return channel_values(options)[np.arange(3)[None, :, None, None], pixels.transpose(0, 3, 1, 2)]
