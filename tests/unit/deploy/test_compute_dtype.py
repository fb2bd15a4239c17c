"""Tests which dtype `model.dtype: auto` stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy import compute_dtype
from deploy.compute_dtype import processor_flags, stored_dtype, with_dtype
from deploy.config import ClusterConfig

NATIVE, OTHER = "fpu avx512f avx512_bf16", "fpu avx512f avx512_vnni"
GPU = {"device": "cuda", "gpus_per_replica": 1}


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"thinker_config": {"text_config": {"dtype": "bfloat16"}}}, "bfloat16"),
        ({"text_config": {"torch_dtype": "float16"}, "dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None, "text_config": {}}, "float32"),
        ({"dtype": "float64"}, "float32"),
        ({}, "float32"),
    ],
)
def test_a_checkpoint_says_its_dtype(checkpoint: dict[str, Any], expected: str) -> None:
    assert stored_dtype(checkpoint) == expected


@pytest.mark.parametrize(
    ("stored", "flags", "sections", "expected"),
    [
        ("bfloat16", NATIVE, {}, "bfloat16"),
        ("bfloat16", OTHER, {}, "float32"),
        ("float16", NATIVE, {}, "float32"),
        ("float32", OTHER, {}, "float32"),
        ("bfloat16", OTHER, {"workers": GPU, "encoders": GPU}, "bfloat16"),
        ("bfloat16", OTHER, {"workers": GPU}, "bfloat16"),
        ("bfloat16", OTHER, {"workers": GPU | {"replicas": 2}, "encoders": {"replicas": 0}}, "bfloat16"),
    ],
)
def test_weights_that_a_cpu_would_emulate_are_computed_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, flags: str, sections: dict[str, Any], expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nflags\t\t: none\n")
    monkeypatch.setattr(compute_dtype, "CPUINFO", tmp_path / "cpuinfo")
    config = ClusterConfig.model_validate({"model": {"dtype": "auto"}, **sections})
    assert with_dtype(config, tmp_path).model.dtype == expected


def test_a_dtype_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    config = ClusterConfig.model_validate({"model": {"dtype": "float16"}})
    assert with_dtype(config, tmp_path) is config, "the checkpoint is not even looked at"


def test_flags_of_other_systems(tmp_path: Path) -> None:
    assert processor_flags(tmp_path / "none") == frozenset()
    arm = tmp_path / "arm"
    arm.write_text("processor : 0\nFeatures : fp asimd asimdhp bf16\n")
    assert "bf16" in processor_flags(arm)
