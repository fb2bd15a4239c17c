"""Computes RMS norm and rotary positions in C, for float32 and, on processors that support it, for bfloat16.

The functions return None where the C code is not available, and the layers then compute the same with torch. The
results differ by rounding alone. This module knows nothing of models.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from fabric.c_library import load_c_library

DTYPE_TO_SOURCE = {
    torch.bfloat16: Path(__file__).with_name("row_operations.c"),
    torch.float32: Path(__file__).with_name("row_operations_float32.c"),
}
_LANES = 16
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


def native_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor | None:
    """Returns the RMS norm of `x` `(num_rows, width)` with `weight` `(width,)` as a new tensor like `x`, or None."""
    library = _library_for(x)
    is_dense = x.dim() == 2 and x.is_contiguous() and weight.is_contiguous()
    if library is None or weight.dtype != x.dtype or not is_dense or x.shape[1] % _LANES:
        return None
    out = torch.empty_like(x)
    place = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    library.weft_row_norm(*place, *x.shape, epsilon, torch.get_num_threads())
    return out


def native_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """Rotates `x` `(num_tokens, num_heads, head_dim)`, whose heads are dense within a row, by `cos` and `sin`
    `(num_tokens, head_dim)`. Returns a new, dense tensor like `x`, or None."""
    library = _library_for(x)
    is_dense = x.stride(2) == 1 and x.stride(1) == x.shape[2] and cos.is_contiguous() and sin.is_contiguous()
    if library is None or cos.dtype != x.dtype or not is_dense or x.shape[2] % (2 * _LANES):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    library.weft_rotate(
        x.data_ptr(),
        x.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        *x.shape,
        torch.get_num_threads(),
    )
    return out


def _library_for(x: torch.Tensor) -> ctypes.CDLL | None:
    return _library(x.dtype) if x.device.type == "cpu" and x.dtype in DTYPE_TO_SOURCE else None


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return None
    library = load_c_library(DTYPE_TO_SOURCE[dtype])
    if library is not None:
        library.weft_row_norm.argtypes = [*[_POINTER] * 3, *[_COUNT] * 2, ctypes.c_float, ctypes.c_int]
        library.weft_rotate.argtypes = [_POINTER, _COUNT, *[_POINTER] * 3, *[_COUNT] * 3, ctypes.c_int]
        library.weft_row_norm.restype = library.weft_rotate.restype = None
    return library
