"""Measures parts of the engine alone: the splice of a long prompt, and how a forward pass's time divides between kinds
of operation.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deploy import compose
from deploy.config import ClusterConfig
from fabric.contracts import MmHash, UnitKey

if TYPE_CHECKING:
    import torch

PROMPT_TOKENS = 5_000
NUM_PICTURES = 4
PICTURE_TOKENS = 1_000
_KIND_TO_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "products": ("mkldnn::_linear_pointwise", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_softmax",
    ),
    "pages": ("aten::index_select", "aten::index_copy_"),
    "casts and copies": ("aten::copy_", "aten::cat", "aten::_to_copy"),
}


class SpliceTimes(NamedTuple):
    ours_s: float
    loop_s: float
    copy_s: float
    """Holds the time of a bare copy of the same bytes (memmove), which is what the machine's memory allows."""


def splice_times(hidden: int = 1024) -> SpliceTimes:
    """Returns medians for a prompt of 5,000 tokens with four pictures of 1,000 tokens in bfloat16: for the runner's
    splice, for a simple loop over tokens, and for a bare copy."""
    import torch

    from llm_workers.compute import PlacedSplice, splice_features
    from llm_workers.scheduling import Splice

    features = {
        UnitKey(MmHash(f"picture {number}"), 0): torch.randn(1, PICTURE_TOKENS, hidden).bfloat16()
        for number in range(NUM_PICTURES)
    }

    class Landed:
        def feature(self, unit: UnitKey) -> torch.Tensor:
            return features[unit]

    embeddings = torch.randn(PROMPT_TOKENS, hidden).bfloat16()
    gap = PROMPT_TOKENS // NUM_PICTURES
    placed = [
        PlacedSplice(number * gap, Splice(unit=unit, at=number * gap, row=0, length=PICTURE_TOKENS))
        for number, unit in enumerate(features)
    ]

    def loop() -> None:
        for at, splice in placed:
            rows = features[splice.unit][0]
            for row in range(splice.length):
                embeddings[at + row] = rows[row]

    def copy() -> None:
        row_bytes = hidden * embeddings.element_size()
        for at, splice in placed:
            source = features[splice.unit].data_ptr() + splice.row * row_bytes
            ctypes.memmove(embeddings.data_ptr() + at * row_bytes, source, splice.length * row_bytes)

    with torch.inference_mode():
        return SpliceTimes(
            _median_s(lambda: splice_features(embeddings, placed, Landed()), 100),
            _median_s(loop, 5),
            _median_s(copy, 100),
        )


def forward_shares(
    config: ClusterConfig, num_sequences: int, prompt_tokens: int, context: int
) -> dict[str, dict[str, float]]:
    """Returns, for each step (`decode`, `prefill`), the share of the forward pass's time of each kind of operation, as
    torch's profiler measures it. Loads the model again and has the side effects of `compose.prepare_process`."""
    import torch

    from llm_workers.compute import PagedKV, SequenceRows, select_backend

    compose.prepare_process(config)
    config, model = compose.open_model(config)
    language_model = compose.load_language_model(config, model)
    shape, block_size = model.family.shape, config.workers.block_size
    per_sequence = -(-max(context, prompt_tokens) // block_size)
    heads, place = (shape.num_kv_heads, shape.head_dim), (language_model.dtype, language_model.device)
    kv = PagedKV(shape.num_layers, num_sequences * per_sequence, block_size, heads, *place)
    tables = np.random.default_rng(0).permutation(kv.num_blocks).reshape(num_sequences, per_sequence)
    at_once = max(1, config.workers.max_step_tokens // prompt_tokens)
    steps = {
        "decode": [SequenceRows(at, context - 1, 1, table) for at, table in enumerate(tables)],
        "prefill": [
            SequenceRows(at * prompt_tokens, 0, prompt_tokens, table) for at, table in enumerate(tables[:at_once])
        ],
    }
    backend = select_backend("auto", kv)

    @torch.inference_mode()
    def forward(rows: list[SequenceRows]) -> None:
        positions = np.concatenate([np.arange(row.start, row.context) for row in rows])[None]
        device = language_model.device
        embeddings = language_model.embed(torch.zeros(positions.shape[1], dtype=torch.int64, device=device))
        last_rows = torch.tensor([row.at + row.num_tokens - 1 for row in rows], device=device)
        wanted = last_rows if len(last_rows) < len(embeddings) else None
        places = torch.from_numpy(positions).to(device)
        language_model.forward(embeddings, places, backend(kv, rows), None, None, wanted)

    is_gpu = language_model.device.type == "cuda"
    return {name: _shares(partial(forward, rows), is_gpu=is_gpu) for name, rows in steps.items()}


def _shares(forward: Callable[[], Any], *, is_gpu: bool) -> dict[str, float]:
    """Returns the share of each kind of operation. On a GPU, the time of a kernel counts for the operation that started
    it, and time that only the host takes is idle time."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    forward()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=activities) as seen:
        begun = time.perf_counter()
        forward()
        if is_gpu:
            torch.cuda.synchronize()
        whole_us = (time.perf_counter() - begun) * 1e6
    operation_to_kind = {name: kind for kind, names in _KIND_TO_OPERATIONS.items() for name in names}
    kind_to_us: dict[str, float] = {}
    for event in seen.key_averages():
        if event.device_type != DeviceType.CPU:
            continue  # this is a kernel, which counts with the operation that started it
        kind = operation_to_kind.get(event.key, "norms, rotary and the rest")
        own_us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        kind_to_us[kind] = kind_to_us.get(kind, 0.0) + own_us
    outside = "waiting for the host" if is_gpu else "outside torch (loops in C, Python)"
    kind_to_us[outside] = max(0.0, whole_us - sum(kind_to_us.values()))
    total = sum(kind_to_us.values())
    return {kind: us / total for kind, us in sorted(kind_to_us.items(), key=lambda item: -item[1])}


def _median_s(work: Callable[[], Any], times: int) -> float:
    work()
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return median(taken)
