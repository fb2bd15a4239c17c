"""Measures what it gains that a vision tower with windows attends over a whole batch at once (ADR 112).

The tower is Qwen2.5-VL's, with random weights. It encodes 16 pictures in three ways: as transformers alone runs it,
where each layer reads the lengths of the windows from the device and calls torch's attention for each window; with
packed attention in the same blocks; and with packed attention in Weft's own blocks, as encoders run it. The module
knows nothing of encoder services.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loadtest.benches.encoder_towers import Place, qwen2_5_vl_tower
from modalities.families.qwen_vl.tower_tables import tower_tables
from modalities.families.qwen_vl.towers import fused_tower
from modalities.packed_attention import use_packed_attention

NUM_PICTURES = 16
_KERNELS = ("scaled_dot_product", "varlen_attn")
"""Holds what the names of torch's operators for attention contain."""

Grid = tuple[int, int, int]


class AttentionRun(NamedTuple):
    """Holds the measurement of one batch in one of the ways."""

    batch: str
    way: str
    num_calls: int
    """Counts the calls of torch's attention in one forward pass."""
    seconds: float


def measure_attention(place: Place, latency_s: Callable[[Callable[[], object]], float]) -> list[AttentionRun]:
    """Measures all ways, each on pictures of one size and on pictures of many sizes. `latency_s` returns the time of a
    call."""
    with torch.device(place.device):
        plain, packed, fused = (qwen2_5_vl_tower(place) for _ in range(3))
    use_packed_attention(packed)
    use_packed_attention(fused)
    ways = (("one call per window", plain), ("packed", packed), ("packed, Weft's blocks", fused_tower(fused)))
    found = []
    for name, grids in (("448x448", [(1, 32, 32)] * NUM_PICTURES), ("of 224 to 672 pixels", mixed_grids())):
        for way, tower in ways:
            run = _forward_of(tower, grids, place, is_packed=tower is not plain)
            with AttentionCalls() as calls:
                run()
            found.append(AttentionRun(f"{NUM_PICTURES} pictures {name}", way, calls.num_calls, latency_s(run)))
    return found


def mixed_grids() -> list[Grid]:
    """Returns grids of pictures with random sides, about as many patches as in pictures of 448 x 448."""
    draw = random.Random(1)
    return [(1, 2 * draw.randint(8, 24), 2 * draw.randint(8, 24)) for _ in range(NUM_PICTURES)]


def _forward_of(tower: Any, grids: Sequence[Grid], place: Place, *, is_packed: bool) -> Callable[[], object]:
    config = tower.config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    num_patches = sum(steps * height * width_ for steps, height, width_ in grids)
    pixels = torch.randn(num_patches, width, device=place.device, dtype=place.dtype)

    def run() -> object:
        if is_packed:
            return tower(pixels, grid_thw=torch.tensor(grids), **tower_tables(tower, grids))
        return tower(pixels, grid_thw=torch.tensor(grids, device=place.device))

    return run


class AttentionCalls(TorchDispatchMode):
    """Counts the calls of torch's operators for attention while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += any(kernel in str(func) for kernel in _KERNELS)
        return func(*args, **(kwargs or {}))
