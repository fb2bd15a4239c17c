"""Compares the sampling of frames with the reference video processors' own `sample_frames`.

Their modules need torchvision, but this one method does not. The test therefore extracts it from the installed source,
unchanged.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.family import MediaOptions
from modalities.media import sample_frames

RATES = [10.0, 15.0, 24.0, 25.0, 30.0, 50.0, 60.0, 30000 / 1001, 24000 / 1001]


@cache
def reference(model: str) -> Callable[..., Any]:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "models" / model / f"video_processing_{model}.py"
    tree = ast.parse(path.read_text())
    (method,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "sample_frames")
    method.decorator_list = []
    space: dict[str, Any] = {"math": math, "np": np, "torch": torch, "VideoMetadata": Any}
    exec(compile(ast.Module([method], []), str(path), "exec"), space)
    found: Callable[..., Any] = space["sample_frames"]
    return found


@pytest.mark.parametrize("min_frames", [2, 4])
@given(num_frames=st.integers(4, 20_000), rate=st.sampled_from(RATES), most=st.sampled_from([2, 31, 32, 64, 768]))
@settings(deadline=None, max_examples=150)
def test_strides_are_those_of_qwen2_vl(min_frames: int, num_frames: int, rate: float, most: int) -> None:
    processor = SimpleNamespace(num_frames=None, fps=2.0, temporal_patch_size=2, min_frames=min_frames, max_frames=most)
    metadata = SimpleNamespace(total_num_frames=num_frames, fps=rate)
    expected = reference("qwen2_vl")(processor, metadata).tolist()
    options = MediaOptions(max_frames=most)
    found = sample_frames(num_frames, num_frames / rate, options, multiple=2, min_frames=min_frames)
    # torch's arange is sometimes one too long, with an index after the last frame; the reference then fails.
    assert list(found) == expected[: len(found)]
    assert expected[len(found) :] in ([], [num_frames])


@given(num_frames=st.integers(1, 20_000), rate=st.sampled_from(RATES), most=st.sampled_from([4, 32, 768]))
@settings(deadline=None, max_examples=150)
def test_ends_are_those_of_qwen3_vl(num_frames: int, rate: float, most: int) -> None:
    processor = SimpleNamespace(fps=2.0, min_frames=4, max_frames=most)
    metadata = SimpleNamespace(total_num_frames=num_frames, fps=rate)
    expected = reference("qwen3_vl")(processor, metadata).tolist()
    options = MediaOptions(max_frames=most)
    found = sample_frames(num_frames, num_frames / rate, options, multiple=2, min_frames=4, spacing="ends")
    # The reference repeats the last frame later, to fill its temporal patch.
    assert list(found) == expected + expected[-1:] * (len(expected) % 2)
