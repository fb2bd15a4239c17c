"""Tests that weights go to their device one by one: the host never holds a whole model. The device is `meta`, which
takes tensors without their values."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from family_row import FamilyRow
from family_rows_audio import QWEN2_AUDIO
from family_rows_pictures import LLAVA
from family_rows_qwen3_omni import QWEN3_OMNI
from family_rows_qwen_vl import QWEN2_5_VL
from family_rows_text import LLAMA

from llm_workers.compute import register_attention
from modalities.checkpoint_tensors import load_pretrained
from modalities.families.causal_lm import language_model
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

ROWS = {row.name: row for row in (QWEN2_5_VL, QWEN3_OMNI, QWEN2_AUDIO, LLAVA, LLAMA)}
MOST_AT_ONCE = 16
"""Transformers reads weights in a few threads, and a part of these checkpoints has more weights than this."""


class HostTensors:
    """Counts the tensors that were read from a file and are still in host memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: list[weakref.ref[torch.Tensor]] = []
        self.num_read = self.most = 0

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self.num_read += 1
            self._alive = [one for one in self._alive if one() is not None]
            self._alive.append(weakref.ref(tensor))
            self.most = max(self.most, len(self._alive))
        return tensor


class WatchedSlice:
    """A `WatchedSlice` is a slice of a file that tells `HostTensors` what it has read."""

    def __init__(self, found: Any, host: HostTensors) -> None:
        self._found, self._host = found, host

    def get_shape(self) -> list[int]:
        return list(self._found.get_shape())

    def get_dtype(self) -> str:
        return str(self._found.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._host.read(self._found[index])


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostTensors:
    found = HostTensors()

    def watched(kind: Any, tensors: Mapping[str, Any], device: str, **options: Any) -> Any:
        slices = {name: WatchedSlice(value, found) for name, value in tensors.items()}
        return load_pretrained(kind, slices, device, **options)

    monkeypatch.setattr(language_model, "load_pretrained", watched)
    return found


@pytest.fixture(scope="module", params=ROWS, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FamilyRow, Path]:
    row = ROWS[request.param]
    directory = tmp_path_factory.mktemp(row.name)
    row.build().save_pretrained(directory)
    for name, content in row.files.items():
        (directory / name).write_text(json.dumps(content))
    return row, directory


def load_all(checkpoint: tuple[FamilyRow, Path], device: str) -> list[torch.nn.Module]:
    """Loads the language model and the encoders, and returns their parts."""
    row, directory = checkpoint
    family = REGISTRY.load_family(directory)
    model: Any = family.load_language_model(directory, device, "float32", register_attention())
    parts = [model._part]
    for modality in row.modalities:
        encoder: Any = family.load_encoder(directory, device, "float32", [modality])
        if hasattr(encoder, "_modality_to_encoder"):
            encoder = encoder._modality_to_encoder[modality]
        parts.append(encoder._part if hasattr(encoder, "_part") else encoder._tower)
    return parts


def test_the_host_never_holds_a_whole_model(checkpoint: tuple[FamilyRow, Path], host: HostTensors) -> None:
    parts = load_all(checkpoint, "meta")
    assert host.num_read > MOST_AT_ONCE
    assert host.most <= MOST_AT_ONCE
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_the_host_holds_what_stays_there(checkpoint: tuple[FamilyRow, Path], host: HostTensors) -> None:
    """This shows that the test above can fail."""
    parts = load_all(checkpoint, "cpu")
    assert host.most > MOST_AT_ONCE
    assert all(tensor.device.type == "cpu" for part in parts for tensor in part.parameters())
