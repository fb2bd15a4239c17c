"""Attention of decoding rows in C, on processors with AVX512-BF16: pages are read where they lie, once.

`decode_attention.c` is compiled by the machine's C compiler at first use (about a second) into the user's cache, under
a name that changes with source and processor. Without compiler, processor or cache directory there is none, and
attention goes by torch: results differ by rounding alone. Knows nothing of steps and models.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from llm_workers.paged_kv import PagedKV, Rows

_LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("decode_attention.c")
COMPILE_TIMEOUT_S = 60.0
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

    def __init__(self, kv: PagedKV, rows: Sequence[Rows]) -> None:
        self._kv, self._num_rows = kv, len(rows)
        self._blocks = np.zeros((len(rows), max(len(row.block_ids) for row in rows)), dtype=np.int64)
        for index, row in enumerate(rows):
            self._blocks[index, : len(row.block_ids)] = row.block_ids
        self._contexts = np.array([row.context for row in rows], dtype=np.int64)

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
    """Compiled and loaded; None where that can't be done."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _LOG.info("no C compiler: attention goes by torch")
        return None
    try:
        path = _compiled(compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.warning("the C attention can't be used, attention goes by torch: %s", error)
        return None
    library.weft_decode_attention.argtypes = [ctypes.POINTER(_Step), ctypes.c_int]
    library.weft_decode_attention.restype = ctypes.c_int
    return library


def _compiled(compiler: str) -> Path:
    """Compiles unless it is there. Raises OSError and SubprocessError."""
    source = SOURCE.read_bytes()
    processor = Path("/proc/cpuinfo").read_bytes().partition(b"flags")[2].partition(b"\n")[0]
    name = f"decode_attention-{hashlib.blake2b(source + processor, digest_size=8).hexdigest()}.so"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (home / name).is_file():
        with tempfile.TemporaryDirectory(dir=home) as draft:
            unit, library = Path(draft) / "unit.o", Path(draft) / name
            compile_ = [compiler, "-O3", "-march=native", "-fopenmp", "-fPIC", "-c", str(SOURCE), "-o", str(unit)]
            # Not linked with OpenMP: it finds torch's own, as two pools of threads would wait for each other.
            for command in (compile_, [compiler, "-shared", str(unit), "-o", str(library)]):
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
            library.replace(home / name)
    return home / name
