"""Updates the demo model's weights: `Optimizers` applies the gradients, and two processes compute them together.

`Optimizers` uses Muon for the layers' matrices, AdamW for the rest, and one cycle of the learning rate. `run_together`
starts the processes, the learners: each computes gradients from its half of a batch, `average_gradients` gives both the
mean, and each applies it. Every process holds all weights and updates them in the same way, so the weights stay equal
bit for bit. The result depends on the number of processes but not on the number of cores.

The module knows no data and does not know what the model learns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MUON_RATES = "match_rms_adamw"
"""With this setting one rate serves both optimizers."""
WEIGHT_DECAY = 0.05
WARM_UP = 0.08
LAST_RATE = 0.01
"""Sets the learning rate of the last step, as a share of the peak rate."""
CONVOLUTION_RATE = 0.1
"""Sets the learning rate of convolutions, as a share of the rate that they would otherwise have."""


class Optimizers:
    """Holds the optimizers of a module. `part_to_rate` maps a part of a parameter's name to the learning rate of such
    parameters, as a share of the rate of the others.

    Muon learned the same in fewer steps than AdamW alone. Convolutions have thousands of correlated inputs, so they
    learn at a tenth of the rate: at the full rate the first layer of the vision tower learned nothing but colour.
    """

    def __init__(self, module: nn.Module, peak_rate: float, num_steps: int, part_to_rate: Mapping[str, float]) -> None:
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for name, parameter in module.named_parameters():
            rate = peak_rate * next((rate for part, rate in part_to_rate.items() if part in name), 1.0)
            rate *= CONVOLUTION_RATE if parameter.ndim > 3 else 1.0
            is_matrix = parameter.ndim == 2 and "embed" not in name and "head" not in name
            (matrices if is_matrix else others).append({"params": [parameter], "lr": rate})
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(_by_rate(matrices), lr=peak_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn=MUON_RATES),
            torch.optim.AdamW(_by_rate(others), lr=peak_rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True),
        ]
        self._schedules = [
            torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                [group["lr"] for group in optimizer.param_groups],
                num_steps,
                pct_start=WARM_UP,
                final_div_factor=1 / (25 * LAST_RATE),
                cycle_momentum=False,
            )
            for optimizer in self._optimizers
        ]

    def step(self) -> None:
        """Updates the weights by their gradients, clears the gradients, and advances the cycle of the learning rate."""
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def _by_rate(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges the groups into one group per rate."""
    rate_to_parameters: dict[float, list[nn.Parameter]] = {}
    for group in groups:
        rate_to_parameters.setdefault(group["lr"], []).extend(group["params"])
    return [{"params": parameters, "lr": rate} for rate, parameters in rate_to_parameters.items()]


# ------------------------------------------------------------ two processes that train one model

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
