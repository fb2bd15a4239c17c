"""Checks that two processes learn as one process learns from the whole batch."""

from __future__ import annotations

from pathlib import Path

import demo_learning
import numpy as np
import pytest
import torch
from torch import nn

from deploy.demo.training.batches import Batch, make_groups
from deploy.demo.training.learners import run_together, to_device

pytestmark = pytest.mark.torch


def test_learners_move_alike_and_as_one_would_from_the_whole_batch(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    run_together(demo_learning.descend, (tmp_path,), tmp_path / "meeting")
    first, second = (torch.load(tmp_path / f"{learner}.pt") for learner in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)

    torch.manual_seed(0)
    used, once, never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*used.parameters(), *once.parameters()], lr=0.1, weight_decay=0.5)
    batch = torch.arange(12.0).view(4, 3)
    for _ in range(3):
        optimizer.zero_grad()
        (used(batch).square().mean() + once(batch[2:]).sum() / 2).backward()
        optimizer.step()
    alone = [p for layer in (used, once, never) for p in layer.parameters()]
    for one, expected in zip(first, alone, strict=True):
        torch.testing.assert_close(one, expected.detach())


def test_error_of_one_learner_ends_both(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=r"the second learner|Connection"):
        run_together(demo_learning.fail, (), tmp_path / "meeting")


def test_everything_of_a_batch_moves() -> None:
    groups = make_groups([np.arange(6).reshape(2, 3)], 6)
    rows, targets, samples = torch.arange(6).view(3, 2)
    batch = Batch({"input_ids": torch.arange(6)[None], "text_groups": groups}, rows, targets, samples, 2)
    moved = to_device(batch, torch.device("meta"))
    tensors = (moved.inputs["input_ids"], moved.inputs["text_groups"].order, moved.rows, moved.targets, moved.samples)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.inputs["text_groups"].shapes == [(2, 3)]
    assert moved.num_samples == 2
    assert batch.rows.device.type == "cpu"
