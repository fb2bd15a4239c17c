"""Estimates from a medium's header how much memory decoding it takes at most. A decode process may use this much for
the medium.

The numbers are measured with Pillow 13 and PyAV 18 (`docs/adr/0031-decoding-within-budgets.md`) and rounded up. A file
that takes more is not what its header says, and is refused. This module is pure: it knows nothing of processes and
decodes nothing.
"""

from __future__ import annotations

from modalities.family import AudioHeader, ImageHeader, MediaHeader, VideoHeader

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
_VIDEO_BYTES = 256 * 2**20
"""Covers FFmpeg's own memory, of which most is only reserved."""
_SAMPLE_BYTES = 8
"""Counts the bytes per sample: one float32 in the list of blocks and one in the joined array. The samples of other
channels and rates are already freed by then."""


def decode_bytes(header: MediaHeader, num_file_bytes: int, cost: int) -> int:
    """Returns the bytes of data that a process takes at most, in addition to what it has, to decode a file of
    `num_file_bytes` bytes and preprocess it to `cost` patches or mel frames."""
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
