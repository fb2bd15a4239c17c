"""Estimates how much memory decoded inputs take: a patch takes some KiB of float32, and a frame of a mel spectrogram
takes half a KiB.

This module knows nothing of units, budgets or files.
"""

from __future__ import annotations


class InputSizes:
    """Keeps the bytes per unit of cost for each modality, as measured on the newest input of that modality."""

    def __init__(self) -> None:
        self._modality_to_bytes: dict[str, float] = {}

    def observe(self, modality: str, cost: int, nbytes: int) -> None:
        """Records that an input of `cost` takes `nbytes`."""
        self._modality_to_bytes[modality] = nbytes / max(cost, 1)

    def in_patches(self, modality: str, cost: int) -> float:
        """Converts the memory of inputs of that cost into units of cost of the modality with the largest bytes per unit
        of cost. Returns `cost` unchanged until an input of the modality was observed."""
        if modality not in self._modality_to_bytes:
            return cost
        return cost * self._modality_to_bytes[modality] / max(self._modality_to_bytes.values())
