"""Computes matrix products with weights that are rearranged once, at load, together with the operations that follow
them.

On a CPU, float32 is multiplied by our own C code (`native_product.py`), and half precision by oneDNN in its own layout,
which torch would otherwise rebuild at every call. Everywhere else the weights stay unchanged. This module knows nothing
of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear, silu

from modalities.causal_lm.native_product import NativeWeights, is_native


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
    """Multiplies as `Projection` does, with float32 weights and by `native_product.py`."""

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


def is_packable(weight: torch.Tensor) -> bool:
    """Returns whether oneDNN multiplies weights of this kind on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


@torch.no_grad()
def _joined(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weights = [each.weight.detach() for each in linears]
    biases = [each.bias.detach() for each in linears if each.bias is not None]
    assert len(biases) in (0, len(weights)), "some of the projections have a bias, others have none"
    if len(weights) == 1:
        return weights[0], biases[0] if biases else None
    return torch.cat(weights), torch.cat(biases) if biases else None
