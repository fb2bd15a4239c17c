"""Computes paged attention in C on a CPU: for bfloat16 on processors with AVX512-BF16, and for float32 on any
processor.

The C sources are compiled at first use, which takes about a second. Where this is not possible, torch computes the
attention; the results differ only by rounding. This module knows nothing of requests or models.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fabric.c_library import load_c_library
from llm_workers.compute.paged_kv import PagedKV, SequenceRows, SingleRows, padded_tables

DTYPE_TO_SOURCE = {
    torch.bfloat16: Path(__file__).with_name("paged_attention.c"),
    torch.float32: Path(__file__).with_name("paged_attention_float32.c"),
}
_LANES, _DIM_MULTIPLE = 16, 32
"""Repeats two sizes of the C sources, which process 16 tokens and 32 values of a head at a time."""
_MAX_DIM, _MAX_GROUP = 256, 96
"""Repeats two limits of the C sources for chunks: the values of one head, and the query heads per KV head."""


def is_native(kv: PagedKV) -> bool:
    """Returns whether the C code can attend decoding rows of these pages."""
    if kv.device.type != "cpu" or kv.dtype not in DTYPE_TO_SOURCE:
        return False
    keys, _ = kv.layer(0)
    is_of_size = kv.block_size % _LANES == 0 and keys.shape[-1] % _DIM_MULTIPLE == 0
    return is_of_size and _library(kv.dtype) is not None


def is_native_for_chunks(kv: PagedKV, num_heads: int) -> bool:
    """Returns whether the C code can attend prompt chunks and does so faster than torch. It is slower in bfloat16 where
    torch uses the AMX matrix units, and it can't attend heads beyond its limits (`_MAX_DIM`, `_MAX_GROUP`)."""
    if not is_native(kv) or (kv.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()):
        return False
    _, num_kv_heads, head_dim = kv.layer(0)[0].shape
    return head_dim <= _MAX_DIM and num_heads <= _MAX_GROUP * num_kv_heads


class NativeDecode:
    """Attends the decoding rows of one step."""

    def __init__(self, kv: PagedKV, rows: SingleRows) -> None:
        self._kv, self._num_rows = kv, len(rows.at)
        self._blocks, self._contexts = np.ascontiguousarray(rows.tables), rows.contexts

    def attend(self, layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attends one layer. `queries` has shape `(num_rows, num_heads, head_dim)`, is in the order of the rows and is
        contiguous. The result has the same shape. Raises MemoryError if there is no memory for the scores."""
        library = _library(self._kv.dtype)
        assert library is not None
        assert queries.is_contiguous()
        assert queries.dtype == self._kv.dtype
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
            raise MemoryError(f"there is no memory for the attention scores of {self._num_rows} rows")
        return out


class NativeChunks:
    """Attends the prompt chunks of one step. Their keys and values must already lie in the pages."""

    def __init__(self, kv: PagedKV, rows: Sequence[SequenceRows]) -> None:
        """Prepares the tables of the chunks. `rows` must contain at least one chunk."""
        self._kv = kv
        self._tables = padded_tables([row.block_ids for row in rows])
        self._places = np.array([(row.at, row.start, row.context) for row in rows], dtype=np.int64).T.copy()

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor, scaling: float) -> None:
        """Attends one layer and fills the chunks' rows of `out`. `queries` has shape
        `(num_tokens, num_heads, head_dim)` and holds the packed rows of the step. `out` has the same shape and is
        contiguous. Raises MemoryError if there is no memory to work in."""
        library = _library(self._kv.dtype)
        assert library is not None
        assert out.is_contiguous()
        assert queries.dtype == out.dtype == self._kv.dtype
        assert scaling > 0
        if queries.stride(2) != 1 or queries.stride(1) != queries.shape[2]:
            queries = queries.contiguous()
        keys, values = self._kv.layer(layer)
        chunks = _Chunks(
            *(each.data_ptr() for each in (queries, keys, values)),
            *(each.ctypes.data for each in (self._tables, *self._places)),
            out.data_ptr(),
            queries.stride(0),
            len(self._tables),
            queries.shape[1],
            *keys.shape[1:],
            self._kv.block_size,
            self._tables.shape[1],
            scaling,
        )
        if library.weft_chunk_attention(ctypes.byref(chunks), torch.get_num_threads()):
            raise MemoryError(f"there is no memory for the attention of {len(self._tables)} chunks")


class _Step(ctypes.Structure):
    """Mirrors the struct `Step` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "blocks", "contexts", "out")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size", "max_blocks")
        ),
        ("scale", ctypes.c_float),
    ]


class _Chunks(ctypes.Structure):
    """Mirrors the struct `Chunks` of the C source."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("queries", "keys", "values", "tables", "firsts", "starts", "ends", "out")
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "query_stride",
                "num_chunks",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "block_size",
                "max_blocks",
            )
        ),
        ("scale", ctypes.c_float),
    ]


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Returns the compiled library, or None if the processor lacks AVX512-BF16 for bfloat16 or the source can't be
    compiled."""
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return None
    library = load_c_library(DTYPE_TO_SOURCE[dtype])
    if library is not None:
        library.weft_decode_attention.argtypes = [ctypes.POINTER(_Step), ctypes.c_int]
        library.weft_decode_attention.restype = ctypes.c_int
        library.weft_chunk_attention.argtypes = [ctypes.POINTER(_Chunks), ctypes.c_int]
        library.weft_chunk_attention.restype = ctypes.c_int
    return library
