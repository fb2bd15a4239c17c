"""Checks what each stage of the demo model's training shows and which parameters it moves, with one step of each
stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deploy.demo.build import demo_checkpoint, write_all_but_weights
from deploy.demo.drawing import speech
from deploy.demo.drawing.facts import SAMPLE_RATE
from deploy.demo.tasks.catalogue import AUDIO_TOWER_STAGE, TASKS, VISION_TOWER_STAGE
from deploy.demo.train import ALL_STAGES, _lesson
from deploy.demo.training.batches import prepare_model
from deploy.demo.training.learners import to_device
from deploy.demo.weights import load_trainable

pytestmark = pytest.mark.torch
TOWERS = {"vision tower": ("visual",), "audio tower": ("audio_tower",)}
ALL = ("visual", "audio_tower", "language_model", "lm_head")


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces each word by a tone of its own where espeak-ng is not installed; what the model learns does not matter
    here."""

    def tone(word: str, voice: str, words_per_minute: int, pitch: int) -> np.ndarray:
        hertz = 200 + 10 * (sum(map(ord, word + voice)) % 50) + pitch
        return np.sin(np.arange(SAMPLE_RATE // 2) * (2 * np.pi * hertz / SAMPLE_RATE)).astype(np.float32)

    if not speech.has_speech():
        monkeypatch.setattr(speech, "_say", tone)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    """Yields the model, whose files except for the weights are in `tmp_path`. It enables gradients because a cluster in
    this process turns them off permanently."""
    model = load_trainable(write_all_but_weights(tmp_path), 0, demo_checkpoint())
    prepare_model(model)
    with torch.enable_grad():
        yield model


def tensors(shown: Any) -> Iterator[torch.Tensor]:
    if isinstance(shown, torch.Tensor):
        yield shown
    elif dataclasses.is_dataclass(shown):
        for field in dataclasses.fields(shown):
            yield from tensors(getattr(shown, field.name))
    elif isinstance(shown, (dict, list, tuple)):
        for value in shown.values() if isinstance(shown, dict) else shown:
            yield from tensors(value)


def are_same(one: Any, other: Any) -> bool:
    pairs = list(zip(tensors(one), tensors(other), strict=False))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("index", range(len(ALL_STAGES)), ids=[stage.name for stage in ALL_STAGES])
def test_a_step_of_a_stage(model: Any, tmp_path: Path, index: int) -> None:
    stage = ALL_STAGES[index]
    lesson = _lesson(index, model, (0, 0), tmp_path)
    assert len(lesson.shown) == stage.num_steps
    last = stage.num_steps - 1
    shown = lesson.shown[last]
    assert are_same(shown, lesson.shown[last]), "the same seed shows the same"
    assert not are_same(shown, lesson.shown[last - 1])
    assert not are_same(shown, _lesson(index, model, (0, 1), tmp_path).shown[last]), "to each learner its own"
    loss, right = lesson.judge(to_device(shown, torch.device("cpu")))
    loss.backward()
    assert torch.isfinite(loss)
    assert 0.0 <= right <= 1.0
    moved = {part for part in ALL for name, one in model.named_parameters() if part in name and one.grad is not None}
    assert moved == set(TOWERS.get(stage.name, ALL))
    assert {id(one) for one in model.parameters() if one.grad is not None} <= {
        id(one) for one in lesson.pupil.parameters()
    }
    heads = [one for name, one in lesson.pupil.named_parameters() if name.startswith("head")]
    is_asked_alone = stage in (VISION_TOWER_STAGE, AUDIO_TOWER_STAGE) or stage.num_looks > 0
    assert bool(heads) == is_asked_alone
    assert all(one.grad is not None for one in heads)


@pytest.mark.parametrize("stage", ALL_STAGES[2:], ids=lambda stage: stage.name)
def test_every_task_is_shown_in_every_stage_and_shares_add_up(stage: Any) -> None:
    assert {task.name for task in stage.tasks} == {task.name for task in TASKS}
    for step in (0, stage.num_steps // 2, stage.num_steps):
        shares = stage.shares(step)
        assert len(shares) == len(stage.tasks) + len(stage.lessons)
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1)
