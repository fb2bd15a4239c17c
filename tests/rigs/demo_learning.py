"""Contains what the learners of `test_demo_learning` do; it is a module of its own because each process imports it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from deploy.demo.training.learners import average_gradients


def descend(learner: int, out_dir: Path) -> None:
    """Takes three steps on this learner's half of a batch, then writes the weights. A layer that only the second
    learner uses gets half of its gradient; a layer that no learner uses gets none."""
    torch.manual_seed(0)
    used, once, never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    parameters = [p for layer in (used, once, never) for p in layer.parameters()]
    # Weight decay moves every parameter that has a gradient, even a gradient of zero.
    optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)
    batch = torch.arange(12.0).view(4, 3)[learner * 2 : learner * 2 + 2]
    for _ in range(3):
        loss = used(batch).square().mean()
        if learner == 1:
            loss = loss + once(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        optimizer.step()
    torch.save([p.detach() for p in parameters], out_dir / f"{learner}.pt")


def fail(learner: int) -> None:
    """Fails in the second learner while the first one waits for it."""
    if learner == 1:
        raise ValueError("the second learner")
    average_gradients([nn.Parameter(torch.zeros(2))])
