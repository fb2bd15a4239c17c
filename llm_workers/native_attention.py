"""Attention of decoding rows in C, on processors with AVX512-BF16: pages are read where they lie, once.

`decode_attention.c` is compiled at first use (about a second). Where that can't be done, attention goes by torch:
results differ by rounding alone. Knows nothing of requests and models.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch

from fabric.c_library import load_c_library
from llm_workers.paged_kv import PagedKV, SingleRows

SOURCE = Path(__file__).with_name("decode_attention.c")
_LANES, _DIM_MULTIPLE = 16, 32
"""Of the C source: tokens at a time, values at a time."""


class _Step(ctypes.Structure):
    """As in the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "blocks", "contexts", "out")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size", "max_blocks")
        ),
        ("scale", ctypes.c_float),
    ]


class NativeDecode:
    """The decoding rows of one step."""

    def __init__(self, kv: PagedKV, rows: SingleRows) -> None:
        self._kv, self._num_rows = kv, len(rows.at)
        self._blocks, self._contexts = np.ascontiguousarray(rows.tables), rows.contexts

    def attend(self, layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
        """`queries` `(num_rows, num_heads, head_dim)`, in order of the rows and contiguous -> the same shape."""
        library = _library()
        assert library is not None
        assert queries.is_contiguous()
        assert queries.dtype == torch.bfloat16
        assert scaling > 0
        out = torch.empty_like(queries)
        keys, values = self._kv.layer(layer)
        step = _Step(
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            self._blocks.ctypes.data,
            self._contexts.ctypes.data,
            out.data_ptr(),
            *queries.shape[:2],
            *keys.shape[1:],
            self._kv.block_size,
            self._blocks.shape[1],
            scaling,
        )
        if library.weft_decode_attention(ctypes.byref(step), torch.get_num_threads()):
            raise MemoryError(f"no room for the scores of {self._num_rows} rows")
        return out


def is_native(kv: PagedKV) -> bool:
    """Whether these pages can be read by the C code."""
    if kv.device.type != "cpu" or kv.dtype != torch.bfloat16:
        return False
    keys, _ = kv.layer(0)
    return kv.block_size % _LANES == 0 and keys.shape[-1] % _DIM_MULTIPLE == 0 and _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None where it can't be had."""
    library = load_c_library(SOURCE) if torch.cpu._is_avx512_bf16_supported() else None
    if library is not None:
        library.weft_decode_attention.argtypes = [ctypes.POINTER(_Step), ctypes.c_int]
        library.weft_decode_attention.restype = ctypes.c_int
    return library
