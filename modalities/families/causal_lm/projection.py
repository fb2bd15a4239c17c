"""Computes matrix products with weights that are rearranged once, at load, together with the operations that follow
them.

`project` chooses the kind of layer for its weights and their device. On a CPU, `NativeProjection` multiplies float32
with our own C code, and `PackedProjection` multiplies half precision with oneDNN in its own layout, which torch would
otherwise rebuild at every call. Everywhere else the weights stay unchanged (`Projection`). `NativeWeights` is the
interface to the C code.

This module knows nothing of models.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import linear, silu

from fabric.c_library import load_c_library


def project(*linears: nn.Linear) -> Projection | NativeProjection | PackedProjection:
    """Returns the linear layers over one input as one, outputs side by side, of the fastest kind for their weights on
    their device. Weights of several are copied, those of one may be shared. All have a bias, or none has."""
    return projection_of(*_joined(linears))


def projection_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Projection | NativeProjection | PackedProjection:
    """Returns the same kind of layer as `project`, for `weight` `(out_features, in_features)` and `bias`
    `(out_features,)`."""
    if is_native(weight):
        return NativeProjection(weight, bias)
    return PackedProjection(weight, bias) if is_packable(weight) else Projection(weight, bias)


@torch.no_grad()
def _joined(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weights = [each.weight.detach() for each in linears]
    biases = [each.bias.detach() for each in linears if each.bias is not None]
    assert len(biases) in (0, len(weights)), "some of the projections have a bias, and others have none"
    if len(weights) == 1:
        return weights[0], biases[0] if biases else None
    return torch.cat(weights), torch.cat(biases) if biases else None


# ------------------------------------------------------------ the kinds of layers


class Projection(nn.Module):
    """Computes `x W^T + b`. Each call takes `(n, in_features)` and returns a new `(n, out_features)`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return silu(self(x))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Returns the product, multiplied by `factor` `(n, out_features)`."""
        product: torch.Tensor = self(x)
        return product.mul_(factor)

    def plus(self, x: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """Returns the product with `summand` `(n, out_features)` added."""
        product: torch.Tensor = self(x)
        return product.add_(summand)


class NativeProjection(nn.Module):
    """Multiplies as `Projection` does, with float32 weights and by the C code of `NativeWeights`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weights = NativeWeights(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.multiply(x)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.multiply(x, has_silu=True)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.weights.multiply(x, factor=factor)

    def plus(self, x: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self.weights.multiply(x, addend=summand)


class PackedProjection(nn.Module):
    """Multiplies as `Projection` does, with weights in the layout of oneDNN. The operations that follow a product run
    before the result is rounded."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return product

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")
        return product

    def plus(self, x: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, summand, self.weight, self.bias, "add")
        return product


def is_packable(weight: torch.Tensor) -> bool:
    """Returns whether oneDNN multiplies weights of this kind on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


# ------------------------------------------------------------ products in C

SOURCE = Path(__file__).with_name("native_product.c")


class _Product(ctypes.Structure):
    """Mirrors the struct `Product` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "panels", "y", "bias", "factor", "addend")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_in", "num_out")),
        *((name, ctypes.c_int32) for name in ("has_silu", "is_narrow")),
    ]


class NativeWeights:
    """Holds the weights and the bias of one linear layer, rearranged for the C code, which multiplies float32 rows with
    them. The weights are a copy.

    Weights that a checkpoint holds in bfloat16 are kept so, and are widened during the product: this saves half of the
    memory, and half of the time where a product is bound by reading its weights. The C source is compiled at first use.
    Where that is not possible there are no `NativeWeights` (`is_native`)."""

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
            raise MemoryError(f"there is no memory to multiply {len(x)} rows")
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
