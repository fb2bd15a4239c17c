"""Reads tensors from the safetensors format, and lays the features of a picture out as encoders do.

A client that has computed the features of a picture itself sends them in this format (`image_embeds`). Its header is
JSON of limited size, so reading it can run no code, unlike the pickles that `torch.save` writes; these are refused, and
never opened. `features_of` then checks the numbers, converts them to the dtype in which the model computes, and orders
them by level.

The module imports no torch. It knows nothing of requests, and of models only the numbers that callers pass.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from fabric.contracts import InvalidMedia
from modalities.media.plugin import seeming

MAX_HEADER_BYTES = 4096
"""Limits the JSON header. One of a few tensors has some hundred bytes; the library itself would take 100 MB."""
_HEADER_LENGTH = struct.Struct("<Q")

DTYPE_TO_NAME: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Maps the dtypes that features may have in a file to the names that models' dtypes have."""
_DTYPE_TO_INTEGER = {"I64": "<i8", "I32": "<i4"}
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""Lists the first bytes of what `torch.save` and pickle write: a ZIP archive, or a protocol's number."""


class Tensor(NamedTuple):
    """A `Tensor` is one tensor of a file, whose number of bytes is that of its shape and dtype."""

    dtype: str
    """Names the dtype as the format does, e.g. `F32`."""
    shape: tuple[int, ...]
    data: bytes


def read_tensors(data: bytes, param: str) -> dict[str, Tensor]:
    """Returns the tensors of a file by name. `param` names the part of the request in errors. Raises InvalidMedia for a
    file in another format, a broken one, and one with a header above `MAX_HEADER_BYTES`."""
    if len(data) < _HEADER_LENGTH.size:
        raise _unreadable(data, "the file is too short", param)
    (length,) = _HEADER_LENGTH.unpack_from(data)
    if length > MAX_HEADER_BYTES:
        raise _unreadable(data, f"the header is longer than {MAX_HEADER_BYTES} bytes", param)
    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise _unreadable(data, "the header is broken, or does not fit the data", param) from error
    return {name: Tensor(each["dtype"], tuple(each["shape"]), bytes(each["data"])) for name, each in found}


def _unreadable(data: bytes, flaw: str, param: str) -> InvalidMedia:
    if data.startswith(_PICKLES):
        message = (
            "tensors written by torch.save or pickle are never read, because reading them can run code; write them "
            'with safetensors.torch.save({"image_embeds": tensor})'
        )
    else:
        message = f"the tensors must be in the safetensors format, but {flaw}{seeming(data)}"
    return InvalidMedia(f"{param}: {message}", param=param)


def integers_of(tensor: Tensor) -> list[int] | None:
    """Returns the numbers of a tensor of integers (I64 or I32) in a row, or None for another dtype."""
    dtype = _DTYPE_TO_INTEGER.get(tensor.dtype)
    return None if dtype is None else [int(number) for number in np.frombuffer(tensor.data, dtype)]


# ------------------------------------------------------------ features


def features_of(tensor: Tensor, num_levels: int, hidden_size: int, dtype: str, param: str) -> bytes:
    """Returns the feature of a picture as encoders store it: C-contiguous, `(num_levels, num_tokens, hidden_size)`, in
    `dtype`, one of the values of `DTYPE_TO_NAME`. In `tensor`, which has the shape `(num_tokens, num_levels *
    hidden_size)`, the levels of a token follow each other; there may be one more axis of length 1 before. Numbers are
    rounded to the nearest of `dtype`, ties to even, as torch does. Raises InvalidMedia for another shape or dtype, and
    for a number that is not finite, or not in `dtype`."""
    width = num_levels * hidden_size
    num_tokens = num_rows(tensor, width, param)
    if tensor.dtype not in DTYPE_TO_NAME:
        known = ", ".join(DTYPE_TO_NAME)
        raise InvalidMedia(f"{param}: the dtype of features must be one of {known}, not {tensor.dtype}", param=param)
    found = DTYPE_TO_NAME[tensor.dtype]
    bits = np.frombuffer(tensor.data, _NAME_TO_BITS[found])
    if not _is_finite(bits, found):
        raise InvalidMedia(f"{param}: the features must be finite numbers, but some are NaN or infinite", param=param)
    if found != dtype:
        bits = _converted(bits, found, dtype)
        if not _is_finite(bits, dtype):
            message = f"{param}: some features are too large for {dtype}, the dtype in which this model computes"
            raise InvalidMedia(message, param=param)
    return bits.reshape(num_tokens, num_levels, hidden_size).transpose(1, 0, 2).tobytes()


def num_rows(tensor: Tensor, width: int, param: str) -> int:
    """Returns the number of tokens of features of `width` numbers each. Raises InvalidMedia for another shape."""
    shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
    if len(shape) != 2 or shape[1] != width or shape[0] < 1:
        raise InvalidMedia(
            f"{param}: the features of a picture must have the shape (number of tokens, {width}), not "
            f"{list(tensor.shape)}",
            param=param,
        )
    return shape[0]


_NAME_TO_BITS = {"float32": "<u4", "float16": "<u2", "bfloat16": "<u2"}
_NAME_TO_EXPONENT = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""Maps a dtype to the bits of its exponent, which are all set in a number that is not finite."""
Bits = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]


def _is_finite(bits: Bits, dtype: str) -> bool:
    exponent = bits.dtype.type(_NAME_TO_EXPONENT[dtype])
    return not bool(((bits & exponent) == exponent).any())


def _converted(bits: Bits, dtype: str, wanted: str) -> Bits:
    """Converts finite numbers between dtypes. The result is infinite where a number is too large."""
    values: npt.NDArray[np.float32]
    if dtype == "float32":
        values = bits.view("<f4")
    elif dtype == "float16":
        values = bits.view("<f2").astype("<f4")
    else:
        values = (bits.astype("<u4") << np.uint32(16)).view("<f4")
    if wanted == "float32":
        return values.view("<u4")
    if wanted == "float16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").view("<u2")
    # A carry out of the upper half is right: it leads to the next exponent, and from the largest one to infinity.
    whole: npt.NDArray[np.uint32] = values.view("<u4")
    half = np.uint32(0x7FFF) + ((whole >> np.uint32(16)) & np.uint32(1))
    rounded: npt.NDArray[np.uint16] = ((whole + half) >> np.uint32(16)).astype("<u2")
    return rounded
