"""What decoded inputs take in memory: a patch is some KiB of float32, a frame of a mel spectrogram half of one.

Knows nothing of units, budgets or files.
"""

from __future__ import annotations


class InputSizes:
    """Bytes for each unit of cost, by modality, as the newest inputs showed."""

    def __init__(self) -> None:
        self._modality_to_bytes: dict[str, float] = {}

    def observe(self, modality: str, cost: int, nbytes: int) -> None:
        """An input of that cost takes `nbytes`."""
        self._modality_to_bytes[modality] = nbytes / max(cost, 1)

    def in_patches(self, modality: str, cost: int) -> float:
        """What inputs of that cost take, in units of cost of the modality that takes most for one. The cost itself
        until one of the modality was seen."""
        if modality not in self._modality_to_bytes:
            return cost
        return cost * self._modality_to_bytes[modality] / max(self._modality_to_bytes.values())
