"""Rebuilds the blocks of the Qwen-VL families' vision towers from their own weights, with few large operations.

Query, key and value are one product and are rotated together; residuals and gate are computed within the products;
windows of one size attend in one call; the convolution over patches, which do not overlap, is computed as the product
that it equals. Blocks, mergers and patch embedding take and return what the original ones did, so the tower around them
remains that of transformers. This module knows nothing of requests and checkpoints.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from modalities.causal_lm.fused_layers import GatedMlp, RowNorm, rotate
from modalities.causal_lm.projection import project, projection_of

BLOCKS = frozenset(
    {
        "Qwen2VLVisionBlock",
        "Qwen2_5_VLVisionBlock",
        "Qwen2_5OmniVisionBlock",
        "Qwen3VLVisionBlock",
        "Qwen3OmniMoeVisionBlock",
    }
)
"""Lists the classes of transformers 5.23 whose blocks are norm, attention, sum, norm, MLP, sum."""


def fused_tower(tower: Any) -> Any:
    """Replaces the blocks, the patch embedding and the mergers' products of `tower`, a vision tower of transformers, in
    place, and returns it. Blocks that are not known here stay unchanged."""
    for index, block in enumerate(tower.blocks):
        if type(block).__name__ in BLOCKS:
            tower.blocks[index] = FusedVisionBlock(block)
    tower.patch_embed = PatchEmbedding(tower.patch_embed.proj)
    for merger in (tower.merger, *getattr(tower, "deepstack_merger_list", ())):
        _project_linears(merger)
    return tower


class FusedVisionBlock(nn.Module):
    """Computes one block. Its input stays unchanged."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = _norm(block.norm1), _norm(block.norm2)
        self.attention = FusedVisionAttention(block.attn)
        self.mlp = _mlp(block.mlp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """Takes and returns `(num_patches, hidden)`. Patches attend within the segments that start at `cu_seqlens`
        `(num_segments + 1,)`; the rotary table is (cos, sin), each `(num_patches, head_dim)`."""
        hidden = self.attention(self.before_attention(hidden_states), hidden_states, cu_seqlens, position_embeddings)
        out: torch.Tensor = self.mlp(self.before_mlp(hidden), hidden)
        return out


class FusedVisionAttention(nn.Module):
    """Computes the attention of one block, its residual included."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scaling = attention.num_heads, attention.head_dim, attention.scaling
        if hasattr(attention, "qkv"):
            self.inputs = project(attention.qkv)
        else:
            self.inputs = project(attention.q, attention.k, attention.v)
        self.output = project(attention.proj)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cu_seqlens: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Takes and returns `(num_patches, hidden)`."""
        heads = self.inputs(x).view(x.shape[0], -1, self.head_dim)
        rotated, v = heads.split([2 * self.num_heads, self.num_heads], dim=1)
        cos, sin = (each.float()[None] for each in table)
        q, k = rotate(rotated.float(), cos, sin).to(x.dtype).split(self.num_heads, dim=1)
        attended = attend_within(q, k, v, cu_seqlens.diff().tolist(), self.scaling)
        return self.output.plus(attended.flatten(1), residual)


def attend_within(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scaling: float
) -> torch.Tensor:
    """Computes attention without a mask within consecutive segments of `lengths` rows; each tensor has shape
    `(num_rows, num_heads, head_dim)`. Neighbouring segments of one length are computed in one call."""
    done, start = [], 0
    for length, run in groupby(lengths):
        end = start + length * len(list(run))
        queries, keys, values = (each[start:end].unflatten(0, (-1, length)).transpose(1, 2) for each in (q, k, v))
        attended = scaled_dot_product_attention(queries, keys, values, scale=scaling)
        done.append(attended.transpose(1, 2).flatten(0, 1))
        start = end
    return done[0] if len(done) == 1 else torch.cat(done)


class PlainMlp(nn.Module):
    """Computes second(activation(first(x))), and adds the residual."""

    def __init__(self, first: nn.Linear, activation: nn.Module, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.activation, self.second = project(first), activation, project(second)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.second.plus(self.activation(self.first(x)), residual)


class PatchEmbedding(nn.Module):
    """Computes the patch embedding as a product: its convolution's kernel is as large as a patch, and so are its
    strides."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        assert convolution.stride == convolution.kernel_size
        self.projection = projection_of(convolution.weight.detach().flatten(1), convolution.bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps `(num_patches, values of a patch)` to `(num_patches, hidden)`."""
        projected: torch.Tensor = self.projection(patches)
        return projected


def _norm(norm: nn.Module) -> nn.Module:
    return norm if isinstance(norm, nn.LayerNorm) else RowNorm(norm)


def _mlp(mlp: Any) -> nn.Module:
    if hasattr(mlp, "gate_proj"):
        return GatedMlp(mlp)
    if hasattr(mlp, "fc1"):
        return PlainMlp(mlp.fc1, mlp.act, mlp.fc2)
    return PlainMlp(mlp.linear_fc1, mlp.act_fn, mlp.linear_fc2)


def _project_linears(part: nn.Module) -> None:
    """Replaces the linear layers of `part`, which must give them rows `(n, in_features)`."""
    for parent in list(part.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, project(child))
