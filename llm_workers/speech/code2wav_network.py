"""Runs transformers' `Qwen3OmniMoeCode2Wav` in pieces whose samples together equal those of one forward pass.

Every layer of the network looks only at the past, or one step ahead. `Code2WavNetwork.run` takes the next frames of a
batch of requests together with what the layers remember of each request (`Memories`), and returns the samples that
these frames complete. A layer of attention remembers the keys and values of its sliding window, and a convolution the
end of its input. A transposed convolution whose kernel is twice its stride is computed as a convolution over two
neighbouring inputs, and remembers one input. It gives no output for the first input alone: transformers trims that part
and the same part at the other end, so the last frame makes fewer samples and nothing is left to flush.

Requests of a batch have the same weight matrices and nothing else in common: a row of the batch never reads another
row. The module knows nothing of requests, chunks and queues.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from fabric.c_library import load_c_library
from fabric.contracts import ConfigError


class FrameBatch(NamedTuple):
    """A `FrameBatch` is the next codec frames of several requests, padded on the right."""

    codes: torch.Tensor
    """Holds the codes as int64 on the network's device. Has shape `(num_rows, num_quantizers, num_frames)`."""
    lengths: Sequence[int]
    """Holds the number of frames of each row. At least one row has all `num_frames`."""
    starts: Sequence[int]
    """Holds the index of each row's first frame within its request. Either all of them are 0, or none is."""


class Code2WavNetwork:
    """A `Code2WavNetwork` holds the weights of one code2wav model on one device. It is stateless."""

    def __init__(self, part: Any) -> None:
        """Takes a loaded `Qwen3OmniMoeCode2Wav`."""
        config = part.config
        self.device: torch.device = part.code_embedding.weight.device
        self.dtype: torch.dtype = part.code_embedding.weight.dtype
        self.num_quantizers: int = config.num_quantizers
        self.codebook_size: int = config.codebook_size
        self._part = part
        self._attentions = [_WindowAttention(layer.self_attn, config.sliding_window) for layer in _layers(part)]
        self._blocks = _upsampling(part) + _decoder(part)
        self._ratios = tuple(block.ratio for block in self._blocks if isinstance(block, _Upsampling))
        self._memory_shapes = [shape for block in self._parts() for shape in block.memory_shapes()]

    def num_samples(self, num_frames: int) -> int:
        """Returns how many samples the first `num_frames` frames of a request complete: for transformers' defaults,
        1,920 for each frame less 555, and never less than 0."""
        count = num_frames
        for ratio, is_trimmed in self._ratios:
            count = (max(0, count - 1) if is_trimmed else count) * ratio
        return count

    @property
    def samples_per_frame(self) -> int:
        return math.prod(ratio for ratio, _ in self._ratios)

    @property
    def min_first_frames(self) -> int:
        """Returns the smallest number of frames that a request must begin with, so that every layer has an input."""
        return next(count for count in range(1, 10_000) if self.num_samples(count) > 0)

    def new_memories(self, num_rows: int) -> list[torch.Tensor]:
        """Returns what the layers remember of `num_rows` requests without frames: zeros, `(num_rows, ...)` each."""
        return [torch.zeros((num_rows, *shape), dtype=self.dtype, device=self.device) for shape in self._memory_shapes]

    @torch.inference_mode()
    def run(self, batch: FrameBatch, memories: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Computes the frames of a batch. Returns the samples as float32 `(num_rows, longest)` and the new memories.
        Row i has `num_samples(start + length) - num_samples(start)` samples; what follows them in the row is padding.
        `memories` is not changed. A request's first frames must be at least `min_first_frames`."""
        part = self._part
        step = _PassState(list(batch.lengths), is_first=batch.starts[0] == 0, memories=list(memories))
        hidden = part.code_embedding(batch.codes + part.code_offset).mean(1)
        starts = torch.tensor(list(batch.starts), device=self.device)
        positions = starts[:, None] + torch.arange(batch.codes.shape[-1], device=self.device)
        rotation = part.pre_transformer.rotary_emb(hidden, positions)
        mask = self._attentions[0].mask(positions) if self._attentions else None
        for layer, attention in zip(_layers(part), self._attentions, strict=True):
            hidden = _transformer_layer(layer, attention, hidden, (rotation, mask), step)
        hidden = part.pre_transformer.norm(hidden).transpose(1, 2)
        for block in self._blocks:
            hidden = block.run(hidden, step)
        return hidden[:, 0].clamp(min=-1, max=1).float(), step.kept

    def _parts(self) -> list[Any]:
        return [*self._attentions, *self._blocks]


class _PassState:
    """A `_PassState` hands the layers of one pass their memories in order and collects the new ones. `lengths` is how
    many columns of each row are valid at the present layer."""

    def __init__(self, lengths: list[int], *, is_first: bool, memories: list[torch.Tensor]) -> None:
        self.lengths, self.is_first = lengths, is_first
        self._memories = iter(memories)
        self.kept: list[torch.Tensor] = []

    def extend(self, values: torch.Tensor, width: int, dim: int) -> torch.Tensor:
        """Returns `values` with the layer's memory, which is `width` long, before it. Keeps the last `width` columns of
        each row's valid ones."""
        joined = torch.cat([next(self._memories), values], dim=dim)
        if len(set(self.lengths)) == 1:
            kept = joined.narrow(dim, self.lengths[0], width)
        else:
            ends = torch.tensor(self.lengths, device=values.device)
            at = ends[:, None] + torch.arange(width, device=values.device)
            shape = [1] * joined.ndim
            shape[0], shape[dim] = at.shape
            kept = joined.gather(dim, at.view(shape).expand(*_with(joined.shape, dim, width)))
        self.kept.append(kept)
        return joined


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = size
    return sizes


# ---------------------------------------------------------------- the transformer over frames


def _layers(part: Any) -> Any:
    return part.pre_transformer.layers


class _WindowAttention:
    """A `_WindowAttention` is the attention of one layer. It remembers the keys and values of `window - 1` frames."""

    def __init__(self, attention: Any, window: int) -> None:
        self._attention, self._width = attention, window - 1

    def memory_shapes(self) -> list[tuple[int, ...]]:
        config = self._attention.config
        return [(2, config.num_key_value_heads, self._width, self._attention.head_dim)]

    def mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns which keys each frame sees, as bool `(num_rows, 1, num_frames, window - 1 + num_frames)`."""
        before = positions[:, :1] - torch.arange(self._width, 0, -1, device=positions.device)
        keys = torch.cat([before, positions], dim=1)[:, None, None]
        queries = positions[:, None, :, None]
        return (keys >= 0) & (keys <= queries) & (keys >= queries - self._width)

    def run(self, hidden: torch.Tensor, rotation: Any, mask: torch.Tensor, step: _PassState) -> torch.Tensor:
        attention = self._attention
        shape = (*hidden.shape[:2], -1, attention.head_dim)
        queries, keys, values = (
            projection(hidden).view(shape).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = _rotated(queries, rotation), _rotated(keys, rotation)
        seen = step.extend(torch.stack([keys, values], dim=1), self._width, dim=3)
        attended = functional.scaled_dot_product_attention(
            queries, seen[:, 0], seen[:, 1], mask, scale=attention.scaling, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        projected: torch.Tensor = attention.o_proj(attended.transpose(1, 2).flatten(2))
        return projected


def _rotated(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Applies rotary positions to `(num_rows, num_heads, num_frames, head_dim)`."""
    cos, sin = (part[:, None] for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _transformer_layer(
    layer: Any, attention: _WindowAttention, hidden: torch.Tensor, seen: tuple[Any, Any], step: _PassState
) -> torch.Tensor:
    attended = attention.run(layer.input_layernorm(hidden), *seen, step)
    hidden = hidden + layer.self_attn_layer_scale(attended)
    added: torch.Tensor = layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(hidden)))
    return hidden + added


# ---------------------------------------------------------------- the convolutions


class _CausalConv:
    """A `_CausalConv` is a convolution over the present and past columns, which remembers the past ones."""

    def __init__(self, module: Any) -> None:
        self._conv = module.conv
        self._width: int = (self._conv.kernel_size[0] - 1) * self._conv.dilation[0]

    def memory_shapes(self) -> list[tuple[int, ...]]:
        return [(self._conv.in_channels, self._width)] if self._width else []

    def run(self, hidden: torch.Tensor, step: _PassState) -> torch.Tensor:
        joined = step.extend(hidden, self._width, dim=2) if self._width else hidden
        convolved: torch.Tensor = self._conv(joined)
        return convolved


class _Upsampling:
    """An `_Upsampling` is a transposed convolution whose ends are trimmed as transformers does it.

    With a kernel of one stride, each input makes its own outputs. With a kernel of two strides, the outputs between two
    neighbouring inputs depend on both, and the outputs before the first input and after the last are trimmed. Both are
    a plain convolution to `stride` times the channels."""

    def __init__(self, module: Any) -> None:
        conv = module.conv
        stride, taps = conv.stride[0], conv.kernel_size[0] // conv.stride[0]
        if conv.kernel_size[0] != taps * stride or taps not in (1, 2):
            raise ConfigError(f"a transposed convolution has kernel {conv.kernel_size[0]} and stride {stride}")
        self.ratio = (stride, taps == 2)
        self._in_channels, self._out_channels = conv.in_channels, conv.out_channels
        # The weight is (in, out, taps * stride); the earlier input meets the later part of the kernel.
        parts = conv.weight.detach().unflatten(2, (taps, stride)).flip(2)
        self._weight = parts.permute(1, 3, 0, 2).flatten(0, 1).contiguous()
        self._bias = None if conv.bias is None else conv.bias.detach().repeat_interleave(stride)

    def memory_shapes(self) -> list[tuple[int, ...]]:
        return [(self._in_channels, 1)] if self.ratio[1] else []

    def run(self, hidden: torch.Tensor, step: _PassState) -> torch.Tensor:
        stride, is_trimmed = self.ratio
        missing = 0
        if is_trimmed:
            joined = step.extend(hidden, 1, dim=2)
            missing = int(step.is_first)
            hidden = joined[:, :, missing:]
        step.lengths = [(length - missing) * stride for length in step.lengths]
        convolved = functional.conv1d(hidden, self._weight, self._bias)
        # The channels that hold the outputs of one input become consecutive columns.
        columns: torch.Tensor = convolved.unflatten(1, (self._out_channels, stride)).transpose(2, 3).flatten(2)
        return columns


class _ConvNeXt:
    """A `_ConvNeXt` is a ConvNeXt block: a convolution of each channel by itself, and layers on each column."""

    def __init__(self, block: Any) -> None:
        self._block, self._conv = block, _CausalConv(block.dwconv)

    def memory_shapes(self) -> list[tuple[int, ...]]:
        return self._conv.memory_shapes()

    def run(self, hidden: torch.Tensor, step: _PassState) -> torch.Tensor:
        block = self._block
        columns = block.norm(self._conv.run(hidden, step).transpose(1, 2))
        added: torch.Tensor = block.gamma * block.pwconv2(block.act(block.pwconv1(columns)))
        return hidden + added.transpose(1, 2)


class _Snake:
    """A `_Snake` is the activation `x + sin(x * a)**2 / b`. The exponentials of its parameters are computed once. On a
    CPU, C code computes it in one pass, where a compiler is available."""

    def __init__(self, module: Any) -> None:
        self._alpha = module.alpha.detach().exp()
        self._inverse = 1.0 / (module.beta.detach().exp() + module.no_div_by_zero)

    def memory_shapes(self) -> list[tuple[int, ...]]:
        return []

    def run(self, hidden: torch.Tensor, step: _PassState) -> torch.Tensor:
        done = native_snake(hidden, self._alpha, self._inverse)
        if done is not None:
            return done
        squares = torch.sin(hidden * self._alpha[:, None]).square_()
        activated: torch.Tensor = torch.addcmul(hidden, self._inverse[:, None], squares)
        return activated


def native_snake(x: torch.Tensor, alpha: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor | None:
    """Returns `x + sin(x * alpha)**2 * inverse` as a new tensor, for `x` `(num_rows, num_channels, num_columns)` and a
    scale for each channel, or None where the C code is not available or does not take `x`."""
    library = _snake_library() if x.device.type == "cpu" and x.dtype == torch.float32 else None
    if library is None:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    library.weft_snake(
        x.data_ptr(),
        alpha.data_ptr(),
        inverse.data_ptr(),
        out.data_ptr(),
        x.shape[0] * x.shape[1],
        x.shape[1],
        x.shape[2],
        torch.get_num_threads(),
    )
    return out


@functools.cache
def _snake_library() -> ctypes.CDLL | None:
    library = load_c_library(Path(__file__).with_name("snake.c"))
    if library is not None:
        library.weft_snake.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int]
        library.weft_snake.restype = None
    return library


class _ResidualUnit:
    """A `_ResidualUnit` adds two convolutions of the activated columns to these columns."""

    def __init__(self, unit: Any) -> None:
        self._parts = (_Snake(unit.act1), _CausalConv(unit.conv1), _Snake(unit.act2), _CausalConv(unit.conv2))

    def memory_shapes(self) -> list[tuple[int, ...]]:
        return [shape for part in self._parts for shape in part.memory_shapes()]

    def run(self, hidden: torch.Tensor, step: _PassState) -> torch.Tensor:
        added = hidden
        for part in self._parts:
            added = part.run(added, step)
        return hidden + added


_Block = _CausalConv | _Upsampling | _ConvNeXt | _Snake | _ResidualUnit


def _upsampling(part: Any) -> list[_Block]:
    """Returns the blocks between the transformer and the decoder."""
    return [block for upsampling, convnext in part.upsample for block in (_Upsampling(upsampling), _ConvNeXt(convnext))]


def _decoder(part: Any) -> list[_Block]:
    first, *blocks, snake, last = part.decoder
    found: list[_Block] = [_CausalConv(first)]
    for decoder_block in blocks:
        activation, upsampling, *units = decoder_block.block
        found += [_Snake(activation), _Upsampling(upsampling), *map(_ResidualUnit, units)]
    return [*found, _Snake(snake), _CausalConv(last)]
