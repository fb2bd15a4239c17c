"""Updates the demo model's weights by their gradients: Muon for the layers' matrices, AdamW for the rest, and one cycle
of the learning rate for both.

The module knows no data, and does not know what the model learns or which processes compute the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
