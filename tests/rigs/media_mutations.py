"""Makes files like those of a hostile client: valid files that are damaged at random, with a seed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from media_corpus import CLIPS, RECORDINGS, STORED, sound_file, video_file
from modalities_files import encode, oriented, picture

_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF0, 0x10000)


class Spoiled(NamedTuple):
    modality: str
    name: str
    data: bytes


@cache
def whole_files() -> Mapping[str, tuple[tuple[str, bytes], ...]]:
    """Returns for each modality pairs of a name and a valid file. The files are small, so that a mutation hits
    something that matters."""
    pictures = {
        "png": encode(picture(31, 17)),
        "png-palette": encode(picture(31, 17, "P"), transparency=3),
        "png-16": encode(picture(12, 9, "I;16")),
        "jpeg": encode(picture(33, 18), "JPEG"),
        "jpeg-progressive": encode(picture(33, 18), "JPEG", progressive=True),
        "jpeg-turned": oriented(picture(33, 18), 6),
        "jpeg-cmyk": encode(picture(20, 10, "CMYK"), "JPEG"),
        "webp": encode(picture(33, 18), "WEBP"),
        "webp-lossless": encode(picture(33, 18, "RGBA"), "WEBP", lossless=True),
        "gif": encode(picture(33, 18, "P"), "GIF"),
        "bmp": encode(picture(13, 8), "BMP"),
        "tiff": encode(picture(13, 8), "TIFF"),
        "tiff-lzw": encode(picture(13, 8), "TIFF", compression="tiff_lzw"),
    }
    return {
        "image": tuple(pictures.items()),
        "video": tuple((name, video_file(name)) for name in (*CLIPS, *STORED)),
        "audio": tuple((name, sound_file(name)) for name in RECORDINGS),
    }


def spoiled_file(seed: int) -> Spoiled:
    """Returns a damaged file, which is the same for the same seed."""
    rng = np.random.default_rng(seed)
    modality = ("image", "video", "video", "audio")[seed % 4]
    files = whole_files()[modality]
    name, data = files[int(rng.integers(len(files)))]
    spoiled = bytearray(data)
    if rng.random() < 0.4:  # The damage is deep inside, where a decoder reads it.
        for place in rng.integers(len(data) // 4, len(data), size=int(rng.integers(1, 4))):
            spoiled[int(place)] ^= 1 << int(rng.integers(8))
    else:
        for _ in range(int(rng.integers(1, 3))):
            _spoil(spoiled, rng, files)
    return Spoiled(modality, name, bytes(spoiled))


def _spoil(data: bytearray, rng: np.random.Generator, files: tuple[tuple[str, bytes], ...]) -> None:
    if len(data) < 16:
        return
    # Headers are at both ends and matter more than the bytes between them.
    reach = len(data) if rng.random() < 0.5 else min(len(data), 512)
    at = int(rng.integers(reach))
    at = len(data) - 1 - at if rng.random() < 0.3 else at
    length = int(rng.integers(1, max(2, len(data) // 8)))
    match int(rng.integers(7)):
        case 0:
            for place in rng.integers(reach, size=int(rng.integers(1, 30))):
                data[int(place)] ^= 1 << int(rng.integers(8))
        case 1:
            data[at : at + 4] = int(rng.choice(_EXTREMES)).to_bytes(4, "big" if rng.random() < 0.5 else "little")
        case 2:
            del data[at:]
        case 3:
            del data[at : at + length]
        case 4:
            data[at:at] = data[max(0, at - length) : at]
        case 5:
            data[at : at + length] = rng.bytes(length)
        case 6:
            other = files[int(rng.integers(len(files)))][1]
            start = int(rng.integers(len(other)))
            data[at : at + length] = other[start : start + length]
