"""Products of float32 rows with laid-out weights, in C. Weights that a checkpoint holds in bfloat16 are kept so, and
widened on the way: half of the memory, and of the time where a product is bound by reading its weights.

The C source is compiled at first use. Where that can't be done there are no `NativeWeights`. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from fabric.c_library import load_c_library

SOURCE = Path(__file__).with_name("native_product.c")


class _Product(ctypes.Structure):
    """As in the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "panels", "addend", "y")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_in", "num_out", "addend_stride")),
        ("is_narrow", ctypes.c_int32),
    ]


class NativeWeights:
    """The weights of one linear layer, laid out for the C code. They are a copy."""

    def __init__(self, weight: torch.Tensor) -> None:
        """`weight` float32 `(num_out, num_in)` for which `is_native` holds."""
        library = _library()
        assert library is not None
        self.num_out, self.num_in = weight.shape
        self.is_narrow = bool((weight == weight.bfloat16()).all())
        """Whether they are kept in bfloat16, which loses nothing."""
        weight = weight.detach().contiguous()
        self._panels = torch.empty(weight.shape, dtype=torch.bfloat16 if self.is_narrow else torch.float32)
        library.weft_lay_out(weight.data_ptr(), *weight.shape, self.is_narrow, self._panels.data_ptr())

    def multiply(self, x: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        """`x` `(n, num_in)` times the weights, and `addend`, `(num_out,)` or `(n, num_out)`, added: a new
        `(n, num_out)`, all float32. A row's result does not depend on the other rows. Raises MemoryError."""
        library = _library()
        assert library is not None
        assert x.dtype == torch.float32
        assert x.shape[1] == self.num_in
        x, y = x.contiguous(), torch.empty(len(x), self.num_out)
        if addend is not None:
            assert addend.dtype == torch.float32
            assert addend.shape in (y.shape, y.shape[1:])
            addend = addend.contiguous()
        product = _Product(
            x.data_ptr(),
            self._panels.data_ptr(),
            None if addend is None else addend.data_ptr(),
            y.data_ptr(),
            len(x),
            self.num_in,
            self.num_out,
            self.num_out if addend is not None and addend.dim() == 2 else 0,
            self.is_narrow,
        )
        if library.weft_product(ctypes.byref(product), torch.get_num_threads()):
            raise MemoryError(f"no room to multiply {len(x)} rows")
        return y


def is_native(weight: torch.Tensor) -> bool:
    """Whether the C code multiplies by these `(num_out, num_in)`, on this machine."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    library = _library()
    return library is not None and weight.shape[0] % library.weft_panel_width() == 0


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None where it can't be had."""
    library = load_c_library(SOURCE)
    if library is not None:
        library.weft_panel_width.restype = ctypes.c_int64
        library.weft_lay_out.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        library.weft_lay_out.restype = None
        library.weft_product.argtypes = [ctypes.POINTER(_Product), ctypes.c_int]
        library.weft_product.restype = ctypes.c_int
    return library
