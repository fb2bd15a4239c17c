"""How the demo model's weights move: Muon for the layers' matrices, AdamW for the rest, one cycle of the rate.

Muon learned the same in fewer steps than AdamW alone. Convolutions have thousands of correlated inputs, so they learn
at a tenth of the rate: at the full one a picture's first layer knew nothing but colour. Knows no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

MUON_RATES = "match_rms_adamw"
"""One rate serves both."""
WEIGHT_DECAY = 0.05
WARM_UP = 0.08
LAST_RATE = 0.01
"""Of the peak."""
CONVOLUTION_RATE = 0.1
"""Of the stage's."""


class Optimizers:
    """`part_to_rate`: of parameters with the part in their name, as a share of the others' rate."""

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
        """Moves the weights by their gradients, clears those, and goes on in the cycle."""
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def _by_rate(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One group for each rate."""
    rate_to_parameters: dict[float, list[nn.Parameter]] = {}
    for group in groups:
        rate_to_parameters.setdefault(group["lr"], []).extend(group["params"])
    return [{"params": parameters, "lr": rate} for rate, parameters in rate_to_parameters.items()]
