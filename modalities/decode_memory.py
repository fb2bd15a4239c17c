"""How much memory decoding a medium takes at most, from its header: what a decode process may take for it.

Measured with Pillow 13 and PyAV 18 (`docs/adr/0031-decoding-within-budgets.md`), and rounded up: a file that takes more
is not what its header says, and is refused. Pure.
"""

from __future__ import annotations

from modalities.family import AudioHeader, ImageHeader, MediaHeader, VideoHeader

BASE_BYTES = 64 * 2**20
"""Buffers that grow with nothing, and what an allocator keeps."""
COST_BYTES = 16 * 2**10
"""Of each patch (or mel frame): a patch of 16 x 16 is gathered through indexes of 8 bytes a value."""
FILE_COPIES = 3
"""Of the file: as it came, as the decoder reads it, and what is in between."""

_MODE_TO_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2}
"""Of a pixel, as Pillow stores it; all other modes take 4."""
_FORMAT_TO_BYTES = {"PNG": 0, "BMP": 0, "GIF": 1, "JPEG": 6, "TIFF": 8, "WEBP": 13}
"""Of a pixel, in the decoder beside its result: the coefficients of a progressive JPEG, WebP's two canvases and their
copy, a TIFF of one strip."""
_OTHER_FORMAT_BYTES = 16
_COPY_BYTES = 2 * 4
"""Of a pixel: a copy that is turned, or of other colours, and a scaled one."""
_FRAME_BYTES = 48
"""Of a video frame's pixel: 16 frames that others lean on, and one as RGB on its way through."""
_VIDEO_BYTES = 256 * 2**20
"""FFmpeg's own, of which most is only reserved."""
_SAMPLE_BYTES = 8
"""A float in blocks, and joined; other channels and rates are gone by then."""


def decode_bytes(header: MediaHeader, num_file_bytes: int, cost: int) -> int:
    """Bytes of data that a process takes at most beyond what it has, to decode a file and preprocess it to `cost`."""
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
