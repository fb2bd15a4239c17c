"""Multiplies float32 rows with rearranged weights in C. Weights that a checkpoint holds in bfloat16 are kept so, and
are widened during the product: this saves half of the memory, and half of the time where a product is bound by reading
its weights.

The C source is compiled at first use. Where that is not possible there are no `NativeWeights`. This module knows
nothing of models.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from fabric.c_library import load_c_library

SOURCE = Path(__file__).with_name("native_product.c")


class _Product(ctypes.Structure):
    """Mirrors the struct `Product` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "panels", "y", "bias", "factor", "addend")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_in", "num_out")),
        *((name, ctypes.c_int32) for name in ("has_silu", "is_narrow")),
    ]


class NativeWeights:
    """Holds the weights and the bias of one linear layer, rearranged for the C code. The weights are a copy."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Copies the weights. `weight` is float32 `(num_out, num_in)`, and `is_native` must hold for it; `bias` is
        `(num_out,)`."""
        library = _library()
        assert library is not None
        self.num_out, self.num_in = weight.shape
        self.is_narrow = bool((weight == weight.bfloat16()).all())
        """Says whether the weights are kept in bfloat16, which loses nothing."""
        self._bias = None if bias is None else bias.detach().float().contiguous()
        weight = weight.detach().contiguous()
        self._panels = torch.empty(weight.shape, dtype=torch.bfloat16 if self.is_narrow else torch.float32)
        library.weft_lay_out(weight.data_ptr(), *weight.shape, self.is_narrow, self._panels.data_ptr())

    def multiply(
        self,
        x: torch.Tensor,
        *,
        has_silu: bool = False,
        factor: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiplies `x` `(n, num_in)` by the weights and adds the bias. Then it applies silu, multiplies by `factor`
        and adds `addend`, in this order, each only if asked for; both have shape `(n, num_out)`. Returns a new tensor
        `(n, num_out)`; all tensors are float32. A row's result does not depend on the other rows. Raises MemoryError if
        there is no memory for the product."""
        library = _library()
        assert library is not None
        assert x.shape[1] == self.num_in
        x, y = x.contiguous(), torch.empty(len(x), self.num_out)
        factor, addend = (None if each is None else each.contiguous() for each in (factor, addend))
        assert x.dtype == torch.float32
        for each in (factor, addend):
            assert each is None or (each.shape == y.shape and each.dtype == torch.float32)
        product = _Product(
            *(None if each is None else each.data_ptr() for each in (x, self._panels, y, self._bias, factor, addend)),
            len(x),
            self.num_in,
            self.num_out,
            has_silu,
            self.is_narrow,
        )
        if library.weft_product(ctypes.byref(product), torch.get_num_threads()):
            raise MemoryError(f"no room to multiply {len(x)} rows")
        return y


def is_native(weight: torch.Tensor) -> bool:
    """Returns whether the C code can multiply by this `(num_out, num_in)` weight on this machine."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    library = _library()
    return library is not None and weight.shape[0] % library.weft_panel_width() == 0


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Returns the compiled library, or None where it is not available."""
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
