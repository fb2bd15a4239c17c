"""Trains one model in several processes, the learners.

`run_together` starts the learners. Each computes gradients from its part of a batch, `average_gradients` gives all of
them the mean, and each applies it. Every process holds all weights and updates them in the same way, so the weights
stay equal bit for bit. The result depends on the number of processes but not on the number of cores. `learners_device`
and `to_device` say where a learner computes and bring its part of a batch there.

The module knows no data, no optimizer, and does not know what the model learns.
"""

from __future__ import annotations

import os
import sys
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
"""Each process waits at most this long for the other. Then it ends with an error."""


def run_together(learn: Callable[..., None], arguments: Sequence[Any], scratch: Path) -> None:
    """Calls `learn(learner, *arguments)` in each process, with learners numbered from 0, and waits for all of them.

    `scratch` is an empty directory through which the processes find each other. If one of them raises an error, this
    function raises that error and ends the others."""
    arguments = (learn, scratch / "meeting", *arguments)
    learners = torch.multiprocessing.spawn(_join, arguments, nprocs=NUM_LEARNERS, join=False)
    try:
        while not learners.join():
            pass
    finally:
        # Torch leaves these files in the folder for temporary files.
        for name in learners.error_files:
            Path(name).unlink(missing_ok=True)


def _join(learner: int, learn: Callable[..., None], meeting: Path, *arguments: Any) -> None:
    dist.init_process_group("gloo", f"file://{meeting}", rank=learner, world_size=NUM_LEARNERS, timeout=PATIENCE)
    try:
        learn(learner, *arguments)
    finally:
        dist.destroy_process_group()
    # Torch's threads are ended while the interpreter ends, which aborts the process once in a great many runs
    # ("terminate called without an active exception"). All work is done here, so the process ends without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replaces each gradient by its mean over the learners. A gradient that one learner lacks counts as zero. If all
    learners lack it, it stays None, so that the optimizer does not change the parameter."""
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
    """Returns the device of a learner: a GPU if there is one, and learners share GPUs if there are too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", learner % torch.cuda.device_count())


def to_device(shown: Any, device: torch.device) -> Any:
    """Returns the same value with every tensor in it moved to the device, also inside dataclasses, dictionaries, lists
    and tuples."""
    if isinstance(shown, torch.Tensor):
        return shown.to(device)
    if is_dataclass(shown) and not isinstance(shown, type):
        return replace(shown, **{f.name: to_device(getattr(shown, f.name), device) for f in fields(shown)})
    if isinstance(shown, dict):
        return {key: to_device(value, device) for key, value in shown.items()}
    if isinstance(shown, (list, tuple)):
        return type(shown)(to_device(value, device) for value in shown)
    return shown
