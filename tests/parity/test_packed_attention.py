"""Tests packed attention: each segment attends to itself alone, a layer makes one call, the towers compute what they
compute with one call per window, and no value of the device is read during a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from audio_tower_rig import BUILDERS
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_files import noise
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from vision_towers import GRIDS, TOWERS, features_of, tower_of

from fabric.contracts import ConfigError
from loadtest.benches.encoder_attention import AttentionCalls, Grid, measure_attention, mixed_grids
from loadtest.benches.encoder_towers import Place, qwen2_5_vl_tower
from modalities import packed_attention
from modalities.device_copies import join_on_device, to_device
from modalities.families.audio_towers.sound_encoder import SoundEncoder
from modalities.families.qwen_vl import towers
from modalities.families.qwen_vl.tower_tables import tower_tables
from modalities.families.qwen_vl.towers import VisionEncoder, fused_tower
from modalities.family import EncoderInput
from modalities.packed_attention import (
    SegmentRun,
    Segments,
    attend,
    attend_packed,
    runs_of,
    segments_of,
    use_packed_attention,
)

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=8)
SIDES = st.integers(1, 6).map(lambda half: 2 * half)
DRAWN_GRIDS = st.lists(st.tuples(st.integers(1, 3), SIDES, SIDES), min_size=1, max_size=4)
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


class SdpaCalls(TorchFunctionMode):
    """Counts the calls of torch's attention while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func is scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def packed(name: str, is_fused: bool) -> Any:
    """Returns the tower with packed attention, in our own blocks or in those of transformers."""
    tower = tower_of(name, torch.float32)
    use_packed_attention(tower)
    return fused_tower(tower) if is_fused else tower


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scaling: float) -> torch.Tensor:
    """Computes attention over all rows with a mask, as the definition says."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    scores = scores.masked_fill(segment[:, None] != segment, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


# ------------------------------------------------------------ one layer


@settings(deadline=None, max_examples=50)
@given(LENGTHS, st.integers(1, 3))
def test_segments_attend_to_themselves_alone(lengths: list[int], num_heads: int) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k, v = torch.randn((3, sum(lengths), num_heads, 8), generator=generator).unbind(0)
    found = attend_packed(q, k, v, Segments(lengths, CPU), 0.3)
    torch.testing.assert_close(found, masked(q, k, v, lengths, 0.3), atol=1e-5, rtol=1e-5)


@given(LENGTHS)
def test_runs_are_the_segments_in_their_order(lengths: list[int]) -> None:
    runs = runs_of(lengths)
    assert [run.length for run in runs for _ in range(run.num_segments)] == lengths
    assert all(one.length != following.length for one, following in pairwise(runs))


def test_segments_of_one_length_are_one_call() -> None:
    q = torch.randn(6 * 64, 2, 8)
    with SdpaCalls() as calls:
        attend_packed(q, q, q, Segments([64] * 6, CPU), None)
    assert calls.num_calls == 1
    assert runs_of([64] * 6) == (SegmentRun(64, 6),)


@pytest.mark.parametrize("has_num_splits", [True, False])
def test_what_the_flash_kernel_is_given(monkeypatch: pytest.MonkeyPatch, has_num_splits: bool) -> None:
    """Torch 2.11 and 2.13 have kernels with different parameters. The stand-in computes by the bounds alone."""
    given_options: dict[str, Any] = {}

    def kernel(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any) -> torch.Tensor:
        given_options.update(options, cu_k=cu_k, max_q=max_q, max_k=max_k)
        assert cu_q.dtype == torch.int32
        return masked(q, k, v, cu_q.diff().tolist(), options["scale"])

    lengths = [4, 2, 2, 7]
    q, k, v = torch.randn((3, sum(lengths), 2, 8)).unbind(0)
    segments = Segments(lengths, CPU)
    expected = attend_packed(q, k, v, segments, 0.3)
    parameters = frozenset({"num_splits"} if has_num_splits else {"scale"})
    monkeypatch.setattr(packed_attention, "has_flash_kernel", lambda q: True)
    monkeypatch.setattr(packed_attention, "_kernel_parameters", lambda: parameters)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    torch.testing.assert_close(attend_packed(q, k, v, segments, 0.3), expected)
    assert given_options.pop("cu_k") is segments.bounds
    assert given_options == {"scale": 0.3, "max_q": 7, "max_k": 7} | ({"num_splits": 1} if has_num_splits else {})


def test_a_cpu_has_no_flash_kernel() -> None:
    assert not packed_attention.has_flash_kernel(torch.zeros(4, 2, 8, dtype=torch.bfloat16))


def test_a_layer_finds_its_segments() -> None:
    whole, windows = Segments([16], CPU), Segments([4] * 4, CPU)
    assert segments_of((whole, windows), windows.bounds) is windows
    assert segments_of((whole,), None) is whole
    for found, bounds in (((), whole.bounds), ((whole, windows), None), ((whole,), windows.bounds)):
        with pytest.raises(ConfigError, match="`segments`"):
            segments_of(found, bounds)


# ------------------------------------------------------------ towers


@settings(deadline=None, max_examples=25)
@given(grids=DRAWN_GRIDS)
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", [name for name in TOWERS if "wide" not in name])
def test_features_are_those_of_one_call_per_segment(
    name: str, is_fused: bool, grids: list[tuple[int, int, int]]
) -> None:
    expected = features_of(tower_of(name, torch.float32), grids, torch.float32)
    found = features_of(packed(name, is_fused), grids, torch.float32, has_tables=True)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", [name for name in TOWERS if "wide" not in name])
def test_a_layer_makes_one_call(name: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch has pictures, a video and windows that the edges cut off."""
    lengths: list[tuple[int, ...]] = []

    def counted(q: Any, k: Any, v: Any, segments: Segments, scaling: float | None) -> torch.Tensor:
        lengths.append(segments.lengths)
        return attend_packed(q, k, v, segments, scaling)

    monkeypatch.setattr(towers if is_fused else packed_attention, "attend_packed", counted)
    tower = packed(name, is_fused)
    features_of(tower, GRIDS, torch.float32, has_tables=True)
    assert len(lengths) == len(tower.blocks)
    whole = tuple(height * width for steps, height, width in GRIDS for _ in range(steps))
    if hasattr(tower, "window_size"):
        full = set(tower.fullatt_block_indexes)
        assert [each == whole for each in lengths] == [index in full for index in range(len(tower.blocks))]
    else:
        assert lengths == [whole] * len(tower.blocks)


def test_equal_pictures_are_one_call_of_torch_per_layer() -> None:
    tower = packed("qwen2.5-vl", is_fused=True)
    with SdpaCalls() as ours:
        features_of(tower, [(1, 8, 8)] * 6, torch.float32, has_tables=True)
    with SdpaCalls() as theirs:
        features_of(tower_of("qwen2.5-vl", torch.float32), [(1, 8, 8)] * 6, torch.float32)
    num_windowed = len(tower.blocks) - len(set(tower.fullatt_block_indexes))
    assert ours.num_calls == len(tower.blocks)
    assert theirs.num_calls == 6 * (len(tower.blocks) + 3 * num_windowed)


def test_a_tower_without_tables_is_refused() -> None:
    for is_fused in (False, True):
        with pytest.raises(ConfigError, match="`segments`"):
            features_of(packed("qwen2-vl", is_fused), GRIDS, torch.float32)


@pytest.mark.parametrize("name", BUILDERS)
def test_layers_for_sounds_make_one_call(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = BUILDERS[name](tmp_path)
    calls = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args[3])
        return attend_packed(*args)

    monkeypatch.setattr(packed_attention, "attend_packed", counted)
    inputs = [unit for size in (16000, 40000, 9000) for unit in built.sound.inputs(noise(size))]
    built.encoder.encode(inputs)
    assert len(calls) == 2  # This is the number of layers in these towers.


# ------------------------------------------------------------ the device is not waited for


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", TOWERS)
def test_a_vision_tower_reads_no_value_of_the_device(name: str, is_fused: bool) -> None:
    """Tensors of the device `meta` have no values, so a tower that reads one fails there. On CUDA it would wait."""
    tower = tower_of(name, torch.float32).to("meta")
    use_packed_attention(tower)
    tower = fused_tower(tower) if is_fused else tower
    width = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    inputs = [EncoderInput("image", np.zeros((h * w * t, width), np.float32), (t, h, w)) for t, h, w in GRIDS]
    features = VisionEncoder(tower, has_deepstack="qwen3" in name).encode(inputs)
    assert [each.device.type for each in features] == ["meta"] * len(GRIDS)
    assert [each.shape[1] for each in features] == [t * h * w // 4 for t, h, w in GRIDS]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_tower_for_sounds_reads_no_value_of_the_device(name: str, tmp_path: Path) -> None:
    built = BUILDERS[name](tmp_path)
    inputs = [unit for size in (16000, 40000) for unit in built.sound.inputs(noise(size))]
    expected = built.encoder.encode(inputs)
    found = SoundEncoder(built.encoder._tower.to("meta"), built.encoder._rows_of).encode(inputs)
    assert [each.device.type for each in found] == ["meta"] * len(inputs)
    assert [each.shape for each in found] == [each.shape for each in expected]


def test_transformers_itself_waits() -> None:
    """This shows that the tests above can fail: without the tables, the tower reads the grids."""
    tower = tower_of("qwen2-vl", torch.float32).to("meta")
    with pytest.raises((NotImplementedError, RuntimeError)):
        tower(torch.zeros(24, 3 * 2 * 14 * 14, device="meta"), grid_thw=torch.tensor([[1, 4, 6]], device="meta"))


@pytest.mark.parametrize(
    ("grids", "num_theirs", "num_ours"), [([(1, 32, 32)] * 16, 7232, 32), (mixed_grids(), 8016, 2916)]
)
def test_the_calls_of_a_full_size_tower(grids: list[Grid], num_theirs: int, num_ours: int) -> None:
    """These are the numbers of ADR 112 for a default batch of 16 pictures, without the flash kernel."""
    with torch.device("meta"):
        tower = qwen2_5_vl_tower(Place("meta", torch.bfloat16, 1.0))
    use_packed_attention(tower)
    tower = fused_tower(tower)
    pixels = torch.empty(sum(t * h * w for t, h, w in grids), 3 * 2 * 14 * 14, dtype=torch.bfloat16, device="meta")
    tables = tower_tables(tower, grids)
    with AttentionCalls() as calls, torch.inference_mode():
        tower(pixels, grid_thw=torch.tensor(grids), **tables)
    assert calls.num_calls == num_ours
    num_full = len(tower.fullatt_block_indexes)
    whole, windows = (len(each.lengths) for each in tables["segments"])
    assert num_full * whole + (len(tower.blocks) - num_full) * windows == num_theirs


# ------------------------------------------------------------ copies


@pytest.mark.parametrize("is_writeable", [True, False])
def test_arrays_are_joined(is_writeable: bool) -> None:
    parts = [np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((1, 2), np.float32)]
    for part in parts:
        part.flags.writeable = is_writeable
    joined = join_on_device(parts, CPU, torch.bfloat16)
    assert joined.dtype == torch.bfloat16
    assert joined.tolist() == [[0, 1], [2, 3], [4, 5], [1, 1]]
    assert join_on_device(parts, CPU).dtype == torch.float32


def test_an_array_keeps_its_dtype() -> None:
    assert to_device(np.arange(3, dtype=np.int32), CPU).dtype == torch.int32
    assert to_device(torch.tensor([1.5]), CPU, torch.float16).tolist() == [1.5]
    fixed = np.ones(2, np.float32)
    fixed.flags.writeable = False
    assert to_device(fixed, CPU).tolist() == [1.0, 1.0]


def test_the_layer_takes_what_transformers_gives() -> None:
    """Transformers' layers give heads before rows, and further keywords."""
    q = torch.randn(1, 2, 12, 8)
    segments = Segments([4, 8], CPU)
    found, weights = attend(SimpleNamespace(), q, q, q, None, scaling=0.3, segments=(segments,), dropout=0.0)
    rows = q[0].transpose(0, 1)
    torch.testing.assert_close(found[0], attend_packed(rows, rows, rows, segments, 0.3))
    assert weights is None


def test_the_bench_counts_calls() -> None:
    """`weft bench encoder` prints what this measures. Two layers of the tower have windows, and none sees whole
    pictures."""
    runs = measure_attention(Place("cpu", torch.float32, 0.0625), lambda run: 1.0)
    assert [each.num_calls for each in runs[:3]] == [2 * 16 * 16, 2, 2]
    assert runs[3].num_calls > runs[4].num_calls == runs[5].num_calls
