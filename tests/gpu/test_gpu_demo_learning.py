"""Checks that a step of the demo model's training on a GPU equals one on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from deploy.demo.build import write_all_but_weights
from deploy.demo.tasks.catalogue import STAGES
from deploy.demo.train import Conversations
from deploy.demo.training.batches import forward, prepare_model
from deploy.demo.training.learners import to_device
from deploy.demo.weights import load_trainable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_loss_and_gradients(tmp_path: Path) -> None:
    model = load_trainable(write_all_but_weights(tmp_path), 0, None)
    prepare_model(model)
    batch = Conversations(replace(STAGES[0], batch_size=24), (0, 2, 0), tmp_path)[0]
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model.zero_grad()  # A model that moves takes its gradients along, also those that `found` holds.
        model.to(device)
        here = to_device(batch, device)
        loss = cross_entropy(forward(model, here), here.targets)
        loss.backward()
        found.append((loss.item(), {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (loss_there, gradients_there) = found
    assert loss_there == pytest.approx(loss, rel=1e-4)
    assert gradients.keys() == gradients_there.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradients_there[name], gradient, rtol=1e-2, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
