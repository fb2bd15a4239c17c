"""Computes attention over many pictures, windows or sounds that are packed one behind the other, in one call per layer.

`Segments` says where the pieces of a batch begin and end: a row sees only the rows of its own segment, in both
directions. Its lengths are numbers of the host, known before the forward pass, so no layer has to ask the device for
them. `attend_packed` computes one layer. On CUDA, in half precision, this is one call of torch's variable-length flash
kernel. Everywhere else, each run of segments of one length is a batch for torch's `scaled_dot_product_attention`.
`use_packed_attention` lets the layers of a tower of transformers call the same function.

The module knows nothing of particular towers, of requests and of queues.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from fabric.contracts import ConfigError
from modalities.device_copies import to_device

# ------------------------------------------------------------ the segments of a batch


class SegmentRun(NamedTuple):
    """Stands for neighbouring segments of one length."""

    length: int
    num_segments: int


def runs_of(lengths: Sequence[int]) -> tuple[SegmentRun, ...]:
    """Returns the runs of consecutive segments of `lengths` rows."""
    return tuple(SegmentRun(length, sum(1 for _ in run)) for length, run in groupby(lengths))


class Segments:
    """Holds the consecutive segments of a packed batch, on the host and on a device. There is at least one segment, and
    each has at least one row."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.max_length = max(self.lengths)
        self.runs = runs_of(self.lengths)
        self.bounds = to_device(np.cumsum([0, *self.lengths], dtype=np.int32), device)
        """Holds the first row of each segment, and the number of all rows: int32 `(num_segments + 1,)`."""


# ------------------------------------------------------------ one layer


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scaling: float | None
) -> torch.Tensor:
    """Computes attention without a mask within each segment. Each tensor has shape `(num_rows, num_heads, head_dim)`,
    and so has the result. `scaling` is applied to the scores; None means one over the root of `head_dim`. The device is
    not waited for."""
    if has_flash_kernel(q):
        return _attend_in_kernel(q, k, v, segments, scaling)
    return _attend_by_length(q, k, v, segments, scaling)


def has_flash_kernel(q: torch.Tensor) -> bool:
    """Returns whether the flash kernel takes tensors like `q` `(num_rows, num_heads, head_dim)`."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    is_size_known = q.shape[-1] % 8 == 0 and q.shape[-1] <= _LARGEST_HEAD
    return is_size_known and bool(_kernel_parameters()) and _has_ampere(q.device)


_LARGEST_HEAD = 256
"""The flash kernel takes heads of at most this many numbers, in multiples of 8."""


@functools.cache
def _kernel_parameters() -> frozenset[str]:
    """Returns the names of the kernel's parameters, which are more in newer versions of torch; returns none if torch
    has no such kernel."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def _has_ampere(device: torch.device) -> bool:
    """Returns whether the device is of the generation that the flash kernel needs, or of a later one."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_in_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # With one split, the result of a segment does not depend on the other segments of its batch.
    options: dict[str, Any] = {"num_splits": 1} if "num_splits" in _kernel_parameters() else {}
    lengths = (segments.bounds, segments.bounds, segments.max_length, segments.max_length)
    attended = varlen_attn(q, k, v, *lengths, scale=scaling, **options)
    assert isinstance(attended, torch.Tensor)  # It is a tuple only if further results are wanted.
    return attended


def _attend_by_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scaling: float | None
) -> torch.Tensor:
    # Segments of one length that do not lie next to each other stay apart: to bring them together, all rows would be
    # copied in each layer, which takes a CPU longer than the calls that it saves (ADR 112).
    done, start = [], 0
    for length, num_segments in segments.runs:
        end = start + length * num_segments
        queries, keys, values = (each[start:end].unflatten(0, (-1, length)).transpose(1, 2) for each in (q, k, v))
        attended = scaled_dot_product_attention(queries, keys, values, scale=scaling)
        done.append(attended.transpose(1, 2).flatten(0, 1))
        start = end
    return done[0] if len(done) == 1 else torch.cat(done)


# ------------------------------------------------------------ towers of transformers

ATTENTION_NAME = "weft_flash_segments"
"""Names the attention at transformers. The name contains `flash` because an attention layer of transformers 5.23 passes
all rows on in one call only then; otherwise it asks the device for the lengths and calls once per segment."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Sequence[Segments] = (),
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of one layer; transformers' attention modules call this function.

    `query` has shape `(1, num_heads, num_rows, head_dim)`, the result `(1, num_rows, num_heads, head_dim)`. `segments`
    holds the layouts of the batch, of which the layer uses one (`segments_of`). Raises ConfigError if it is missing."""
    layout = segments_of(segments, cu_seq_lens_q)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend_packed(q, k, v, layout, scaling)[None], None


def segments_of(segments: Sequence[Segments], bounds: torch.Tensor | None) -> Segments:
    """Returns the one of `segments` whose `bounds` a tower has passed to its layer. None stands for the only one, in a
    tower that passes no bounds. Raises ConfigError if there is no such layout."""
    for each in segments:
        if each.bounds is bounds or (bounds is None and len(segments) == 1):
            return each
    raise ConfigError("the tower does not pass its batch's `segments` to its attention, which needs them")


def use_packed_attention(part: PreTrainedModel) -> None:
    """Changes `part`, so that its attention layers call `attend`. Calls of the part must then pass the keyword
    `segments`. The function may be called again."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    for module in part.modules():
        if isinstance(module, PreTrainedModel):
            # `set_attn_implementation` takes a name with `flash` for a package to download, and refuses it.
            module.config._attn_implementation = ATTENTION_NAME
