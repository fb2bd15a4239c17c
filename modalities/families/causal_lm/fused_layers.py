"""Rebuilds decoder layers of transformers' dense families from their own weights, with few large operations, and runs
them.

Query, key and value are one product and are rotated together; residuals, activation and gate are computed within the
products; keys and values go straight to Weft's attention. A layer takes and returns what the layer that it replaces
did, and the rotary tables and hooks remain those of transformers. Parts that are not known here stay unchanged.

`fused` replaces the layers of a model, and `run_layers` runs them. `pad_step` and `LastRows` choose the rows on which
the layers compute: the former rounds the step's number of rows up, and the latter says which rows the last layer
finishes. RMS norm and rotary positions are computed in C where the C code is available, and otherwise with torch; the
results differ by rounding alone.

This module knows nothing of requests and checkpoints.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from fabric.c_library import load_c_library
from modalities.checkpoint_tensors import is_sharding
from modalities.families.causal_lm.projection import PackedProjection, project

# ------------------------------------------------------------ a model of fused layers

LAYERS = frozenset(
    {
        "LlamaDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "Qwen2VLDecoderLayer",
        "Qwen2_5_VLDecoderLayer",
        "Qwen2_5OmniDecoderLayer",
        "Qwen3VLTextDecoderLayer",
        "Qwen3VLMoeTextDecoderLayer",
        "Qwen3OmniMoeThinkerTextDecoderLayer",
        "Qwen3OmniMoeTalkerDecoderLayer",
    }
)
"""Lists the classes of transformers 5.23 whose layers are norm, attention, sum, norm, MLP, sum, and whose rotary table
is already merged over its axes."""


def fused(part: PreTrainedModel) -> PreTrainedModel:
    """Replaces the decoder layers, the last norm and the head of `part` (which has `model` and `lm_head`) in place, and
    returns it. A rank's share of a model stays unchanged, because transformers sums the ranks' parts inside its
    layers."""
    if is_sharding():
        return part
    model = part.model
    for index, layer in enumerate(model.layers):
        if type(layer).__name__ in LAYERS:
            is_last = index + 1 == len(model.layers)
            model.layers[index] = FusedLayer(layer, model.config.hidden_act, is_last=is_last)
    model.norm = RowNorm(model.norm)
    part.lm_head = project(part.lm_head)
    return part


class AddedLevels(NamedTuple):
    """Holds the features that a step adds to the residual stream after its first layers (DeepStack)."""

    rows: torch.Tensor
    """Holds the int64 rows of the step that have features, in ascending order, none twice."""
    levels: torch.Tensor
    """Has shape `(num_levels, len(rows), hidden)`; the level i is added after layer i."""


def run_layers(
    model: Any,
    embeddings: torch.Tensor,
    positions: torch.Tensor,
    attention: Any,
    last_rows: torch.Tensor | None,
    added: AddedLevels | None = None,
) -> torch.Tensor:
    """Runs a text model's layers, with exactly the operations around them that transformers' model has: from
    `embeddings` `(num_tokens, hidden)` and positions `(num_axes, num_tokens)` to the last hidden states, normed.
    Returns only `last_rows` if given. All layers must be fused."""
    hidden = embeddings[None]
    table = model.rotary_emb(hidden, _position_ids(positions))
    for index, layer in enumerate(model.layers):
        hidden = layer(hidden, position_embeddings=table, weft=attention, last_rows=last_rows)
        if added is not None and index < len(added.levels):
            hidden = hidden.index_add(1, added.rows, added.levels[index][None])
    normed: torch.Tensor = model.norm(hidden[0])
    return normed


def run_unfused(
    model: Any,
    embeddings: torch.Tensor,
    positions: torch.Tensor,
    attention: Any,
    last_rows: torch.Tensor | None,
    added: AddedLevels | None = None,
) -> torch.Tensor:
    """Does the same as `run_layers` with transformers' own forward pass, for a model with layers that are not fused (a
    rank's share of a model, or a layer that is not known here)."""
    deepstack: dict[str, Any] = {}  # The models of some families do not take it.
    if added is not None:
        mask = torch.zeros((1, len(embeddings)), dtype=torch.bool, device=embeddings.device)
        mask[0, added.rows] = True
        deepstack = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(added.levels.unbind(0))}
    output = model(
        inputs_embeds=embeddings[None],
        position_ids=_position_ids(positions),
        use_cache=False,
        weft=attention,
        last_rows=last_rows,
        **deepstack,
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def _position_ids(positions: torch.Tensor) -> torch.Tensor:
    """Returns positions `(num_axes, num_tokens)` as transformers takes those of one sequence: `(1, num_tokens)` for one
    axis, and `(num_axes, 1, num_tokens)` for several."""
    return positions if len(positions) == 1 else positions[:, None]


def is_fused(part: PreTrainedModel) -> bool:
    """Returns whether all layers of the part are fused."""
    return all(isinstance(layer, FusedLayer) for layer in part.model.layers)


def is_packed(part: PreTrainedModel) -> bool:
    """Returns whether oneDNN computes the part's products. If it does, steps should come in few sizes."""
    return isinstance(part.lm_head, PackedProjection)


def can_end_early(part: PreTrainedModel) -> bool:
    """Returns whether the part's last layer takes `last_rows`."""
    return isinstance(part.model.layers[-1], FusedLayer)


# ------------------------------------------------------------ the rows of a step

_STEPS = ((64, 1), (128, 8), (256, 16), (512, 32))
_LARGEST_STEP = 64


def rounded_size(num_tokens: int) -> int:
    """Returns the size that a step of packed tokens is rounded up to: at least `num_tokens`, and above it by less than
    an eighth.

    oneDNN builds each product's program for one number of rows, at the first use of that number (measured: a step of a
    new size takes half as long again), and keeps about a thousand programs. So steps come in a hundred sizes, which are
    on average 3 % above what the steps need."""
    step = next((step for most, step in _STEPS if num_tokens <= most), _LARGEST_STEP)
    return -(-num_tokens // step) * step


def pad_step(embeddings: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `embeddings` `(num_tokens, hidden)` and `positions` `(num_axes, num_tokens)` with rows of zeros
    appended."""
    extra = rounded_size(len(embeddings)) - len(embeddings)
    if not extra:
        return embeddings, positions
    return pad(embeddings, (0, 0, 0, extra)), pad(positions, (0, extra))


class LastRows:
    """Holds the rows of one step that the last layer finishes, and selects those that the caller wants.

    Of most tokens of a prompt only the keys and values that the last layer computes are needed, so the operations after
    its attention run for the other tokens alone. Two numbers of rows differ here: those that the caller *wants*, and
    those that the layer *finishes*, which may be more (rows that round a step, or all rows if the layer can't end
    early). A caller that needs every row names none, even if it draws from a few: it then selects these itself.
    `llm_workers.compute.runner` does so for side layers, because it checks every row before it selects."""

    def __init__(self, wanted: torch.Tensor | None, num_rows: int, *, is_padded: bool, can_end_early: bool) -> None:
        """Chooses the rows. `wanted` holds int64 row numbers, ascending; None means all. `num_rows` is the step's
        number of rows, padding included. `is_padded` says whether steps come in few sizes. `can_end_early` says whether
        the last layer takes `finished`."""
        self._wanted = wanted
        self.finished: torch.Tensor | None = None
        """Holds the rows of the step that the last layer finishes, the wanted ones first; None means that it finishes
        all."""
        if wanted is None or not can_end_early:
            return
        extra = rounded_size(len(wanted)) - len(wanted) if is_padded else 0
        if len(wanted) + extra < num_rows:
            self.finished = pad(wanted, (0, extra)) if extra else wanted

    def of(self, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Returns the wanted rows of `hidden`, the last layer's output, or all `num_tokens` rows if none were named."""
        if self._wanted is None:
            return hidden[:num_tokens]
        return hidden.index_select(0, self._wanted) if self.finished is None else hidden[: len(self._wanted)]


# ------------------------------------------------------------ the layers

_WITH_HEAD_NORMS = ("Qwen3",)
_GATED_MLPS = frozenset(
    {
        "LlamaMLP",
        "Qwen2MLP",
        "Qwen3MLP",
        "Qwen2_5_VLMLP",
        "Qwen3VLTextMLP",
        "Qwen3VLMoeTextMLP",
        "Qwen3OmniMoeThinkerTextMLP",
        "Qwen3OmniMoeMLP",
    }
)


class FusedLayer(nn.Module):
    """Computes one decoder layer. Its input stays unchanged."""

    def __init__(self, layer: Any, activation: str, *, is_last: bool = False) -> None:
        super().__init__()
        self.is_last = is_last
        self.before_attention = RowNorm(layer.input_layernorm)
        self.attention = FusedAttention(layer.self_attn, type(layer).__name__.startswith(_WITH_HEAD_NORMS))
        self.before_mlp = RowNorm(layer.post_attention_layernorm)
        is_known = type(layer.mlp).__name__ in _GATED_MLPS and activation == "silu"
        self.mlp = GatedMlp(layer.mlp) if is_known else OtherMlp(layer.mlp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        weft: Any,
        last_rows: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Takes `(1, num_tokens, hidden)` and the step's rotary table (cos, sin), each `(1, num_tokens, head_dim)`. The
        last layer computes the operations after its attention for `last_rows` alone, and returns only these rows,
        because of a prompt's other tokens only the keys and values are needed."""
        hidden = hidden_states[0]
        rows = last_rows if self.is_last else None
        hidden = self.attention(self.before_attention(hidden), hidden, position_embeddings, weft, rows)
        out: torch.Tensor = self.mlp(self.before_mlp(hidden), hidden)
        return out[None]


class FusedAttention(nn.Module):
    """Computes the attention of one layer, its residual included."""

    def __init__(self, attention: Any, has_head_norms: bool) -> None:
        super().__init__()
        self.layer_idx, self.scaling, self.head_dim = attention.layer_idx, attention.scaling, attention.head_dim
        self._num_heads = attention.q_proj.out_features // self.head_dim
        self._num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.inputs = project(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = project(attention.o_proj)
        self.head_norm = self._head_norm(attention) if has_head_norms else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        weft: Any,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns `(num_tokens, hidden)`, or `(len(rows), hidden)` if `rows` are given. Rows after those of the step's
        attention have no meaning."""
        heads = self.inputs(x).view(x.shape[0], -1, self.head_dim)
        rotated, v = heads.split([self._num_heads + self._num_kv_heads, self._num_kv_heads], dim=1)
        if self.head_norm is not None:
            rotated = self.head_norm(rotated)
        q, k = rotate(rotated, *table).split([self._num_heads, self._num_kv_heads], dim=1)
        attended = weft.attend(self.layer_idx, q, k, v, self.scaling)
        attended = attended.reshape(x.shape[0], -1)
        if rows is not None:
            attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
        return self.output.plus(attended, residual)

    def _head_norm(self, attention: Any) -> RowNorm:
        """Returns one norm for queries and keys together, with a row of weights per head."""
        norm = RowNorm(attention.q_norm)
        queries, keys = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        norm.weight = torch.cat([queries.expand(self._num_heads, -1), keys.expand(self._num_kv_heads, -1)])
        return norm


class GatedMlp(nn.Module):
    """Computes down(silu(gate(x)) * up(x)), and adds the residual."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = project(mlp.gate_proj), project(mlp.up_proj), project(mlp.down_proj)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down.plus(self.up.times(x, self.gate.silu(x)), residual)


class OtherMlp(nn.Module):
    """Runs a block as transformers has it (experts, other activations), and adds the residual."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.block = mlp

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x[None])[0]
        return residual + out


NORM_BYTES = 2**19
"""Limits the bytes of float32 copies that exist at once per thread, on a CPU: a norm of 1,024 rows takes a quarter
longer in one piece, and four times as long where its copies are new memory each time."""


class RowNorm(nn.Module):
    """Computes the RMS norm over the last dimension, rounded where transformers rounds."""

    weight: torch.Tensor
    _root: torch.Tensor

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.epsilon: float = norm.variance_epsilon
        weight = norm.weight.detach()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("_root", torch.tensor(norm.variance_epsilon**0.5, device=weight.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done = native_norm(x, self.weight, self.epsilon)
        if done is not None:
            return done
        at_once = _rows_at_once(x)
        if len(x) <= at_once:
            return self._normed(x).to(x.dtype).mul_(self.weight)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows, normed in zip(x.split(at_once), out.split(at_once), strict=True):
            normed.copy_(self._normed(rows)).mul_(self.weight)
        return out

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x / sqrt(mean(x^2) + epsilon) as a new float32 tensor. The root is computed as a hypotenuse, which
        takes fewer operations."""
        wide = x.to(torch.float32, copy=True)
        lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).mul_(wide.shape[-1] ** -0.5)
        return wide.div_(lengths.hypot_(self._root))


def _rows_at_once(x: torch.Tensor) -> int:
    """Returns the number of rows whose float32 copies stay in the cores' caches; on a device it is the number of all
    rows."""
    if x.device.type != "cpu":
        return x.shape[0]
    return max(1, NORM_BYTES * torch.get_num_threads() // (4 * x[0].numel()))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions to all heads. `x` has shape `(num_tokens, num_heads, head_dim)`; the table's `cos` and
    `sin` have shape `(1, num_tokens, head_dim)` with equal halves."""
    done = native_rotation(x, cos[0], sin[0])
    if done is not None:
        return done
    half = x.shape[-1] // 2
    sin = sin[0, :, None, :half]
    out = x * cos[0, :, None]
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


# ------------------------------------------------------------ norm and rotation in C

DTYPE_TO_SOURCE = {
    torch.bfloat16: Path(__file__).with_name("row_operations.c"),
    torch.float32: Path(__file__).with_name("row_operations_float32.c"),
}
_LANES = 16
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


def native_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor | None:
    """Returns the RMS norm of `x` `(num_rows, width)` with `weight` `(width,)` as a new tensor like `x`, or None where
    the C code is not available or does not take `x`."""
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
    `(num_tokens, head_dim)`. Returns a new, dense tensor like `x`, or None in the same cases as `native_norm`."""
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
    """Returns the compiled library for a dtype, or None where it is not available. The code for bfloat16 needs a
    processor that supports it."""
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return None
    library = load_c_library(DTYPE_TO_SOURCE[dtype])
    if library is not None:
        library.weft_row_norm.argtypes = [*[_POINTER] * 3, *[_COUNT] * 2, ctypes.c_float, ctypes.c_int]
        library.weft_rotate.argtypes = [_POINTER, _COUNT, *[_POINTER] * 3, *[_COUNT] * 3, ctypes.c_int]
        library.weft_row_norm.restype = library.weft_rotate.restype = None
    return library
