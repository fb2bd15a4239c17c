"""Two processes that learn as one: each from its half of a batch, then with the mean of both gradients.

Every process holds all weights and moves them alike, so they stay equal bit for bit, and the result depends on the
number of processes but not on the number of cores. Does not know what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NUM_LEARNERS = 2
PATIENCE = timedelta(minutes=5)
"""One that waits longer for the other ends with an error."""


def run_together(learn: Callable[..., None], arguments: Sequence[Any], scratch: Path) -> None:
    """Calls `learn(learner, *arguments)` in each process, learners numbered from 0, and waits for all of them.

    `scratch` is an empty directory where they meet. Raises what one of them raised, and ends the others."""
    arguments = (learn, scratch / "meeting", *arguments)
    learners = torch.multiprocessing.spawn(_join, arguments, nprocs=NUM_LEARNERS, join=False)
    try:
        while not learners.join():
            pass
    finally:
        for name in learners.error_files:  # torch leaves what it was told in the temporary folder
            Path(name).unlink(missing_ok=True)


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Each gradient becomes the mean over the learners; one that a learner lacks counts as zero, one that all lack
    stays away, so that its parameter is left alone."""
    device = parameters[0].device
    has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=device)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([has_gradient, *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)
    flat /= NUM_LEARNERS
    at = len(parameters)
    for parameter, share in zip(parameters, flat[:at].tolist(), strict=True):
        mean = flat[at : at + parameter.numel()].view_as(parameter)
        parameter.grad = mean if share > 0 else None
        at += parameter.numel()


def learners_device(learner: int) -> torch.device:
    """A GPU if there is one; learners share those there are."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", learner % torch.cuda.device_count())


def to_device(shown: Any, device: torch.device) -> Any:
    """The same with every tensor in it moved: through dataclasses, dictionaries, lists and tuples."""
    if isinstance(shown, torch.Tensor):
        return shown.to(device)
    if is_dataclass(shown) and not isinstance(shown, type):
        return replace(shown, **{f.name: to_device(getattr(shown, f.name), device) for f in fields(shown)})
    if isinstance(shown, dict):
        return {key: to_device(value, device) for key, value in shown.items()}
    if isinstance(shown, (list, tuple)):
        return type(shown)(to_device(value, device) for value in shown)
    return shown


def _join(learner: int, learn: Callable[..., None], meeting: Path, *arguments: Any) -> None:
    dist.init_process_group("gloo", f"file://{meeting}", rank=learner, world_size=NUM_LEARNERS, timeout=PATIENCE)
    try:
        learn(learner, *arguments)
    finally:
        dist.destroy_process_group()
