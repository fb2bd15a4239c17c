"""What an encoder costs, by modality: a patch of a video and a mel frame of a sound take different times.

A modality that nothing is known of yet costs what the encoder's work costs in general. Pure; knows no queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fabric.messages import EncoderReport
from router.planning.cost import LinearCost
from router.planning.views import EncoderCosts, Line


class _Stages(NamedTuple):
    prepare: LinearCost
    encode: LinearCost

    @property
    def costs(self) -> EncoderCosts:
        return EncoderCosts(self.prepare.line, self.encode.line)


class EncoderCost:
    """Of one encoder, or of encoders in general; starts from what is known of others."""

    def __init__(self, general: EncoderCosts, modality_to_costs: Mapping[str, EncoderCosts] | None = None) -> None:
        self._general = _stages(general)
        self._modality_to_stages = {name: _stages(costs) for name, costs in (modality_to_costs or {}).items()}

    @property
    def general(self) -> EncoderCosts:
        """Over all modalities, as they came."""
        return self._general.costs

    def by_modality(self) -> dict[str, EncoderCosts]:
        return {name: stages.costs for name, stages in self._modality_to_stages.items()}

    def of(self, modality: str) -> EncoderCosts:
        return self._modality_to_stages.get(modality, self._general).costs

    def anchor(self, report: EncoderReport) -> None:
        """The encoder's own measurements of its forwards."""
        self._general.encode.anchor(Line(report.batch_overhead_s, report.encode_s_per_cost))
        for cost in report.costs:
            self._known(cost.modality).encode.anchor(Line(cost.overhead_s, cost.seconds_per_cost))

    def observe_prepare(self, modality: str, cost: int, seconds: float) -> None:
        for stages in (self._known(modality), self._general):
            stages.prepare.observe(cost, seconds)

    def observe_encode(self, modality: str, cost: int, seconds: float) -> None:
        for stages in (self._known(modality), self._general):
            stages.encode.observe(cost, seconds)

    def _known(self, modality: str) -> _Stages:
        if modality not in self._modality_to_stages:
            self._modality_to_stages[modality] = _stages(self._general.costs)
        return self._modality_to_stages[modality]


def _stages(costs: EncoderCosts) -> _Stages:
    return _Stages(LinearCost(costs.prepare), LinearCost(costs.encode))
