"""Keeps what an encoder costs, by modality: a patch of a video and a mel frame of a sound take different times.

A modality of which nothing is known yet costs what the encoder's work costs in general. Estimates age towards what
encoders cost in common. This module is pure and knows nothing of queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fabric.messages import EncoderReport
from router.planning.ageing import AgeingCost, Estimate, believed, common_line
from router.planning.views import EncoderCosts, Line


class _Stages(NamedTuple):
    prepare: AgeingCost
    encode: AgeingCost

    def estimates(self, now: float) -> StageEstimates:
        return StageEstimates(self.prepare.estimate(now), self.encode.estimate(now))


class StageEstimates(NamedTuple):
    prepare: Estimate
    encode: Estimate

    def believed(self, common: CommonStages) -> EncoderCosts:
        return EncoderCosts(believed(self.prepare, common.prepare), believed(self.encode, common.encode))


class CommonStages(NamedTuple):
    """Holds the cost lines of encoders in general; a line is None where nothing is known."""

    prepare: Line | None = None
    encode: Line | None = None

    @classmethod
    def of(cls, estimates: Iterable[StageEstimates]) -> CommonStages:
        known = list(estimates)
        return cls(common_line(each.prepare for each in known), common_line(each.encode for each in known))


GENERAL = ""
"""This is the key of the costs over all modalities, in the mix in which items came."""

CommonCosts = Mapping[str, CommonStages]
"""Maps each modality, and `GENERAL`, to the common cost lines."""


class EncoderCost:
    """Keeps the costs of one encoder; they start from defaults."""

    def __init__(self, defaults: EncoderCosts) -> None:
        self._modality_to_stages = {GENERAL: _stages(defaults)}

    def estimates(self, now: float) -> dict[str, StageEstimates]:
        """Returns the estimates for the modalities of which something is known, and for `GENERAL`."""
        return {name: stages.estimates(now) for name, stages in self._modality_to_stages.items()}

    def of(self, modality: str) -> EncoderCosts:
        """Returns the costs as they were learned, however long ago that was."""
        stages = self._modality_to_stages.get(modality, self._modality_to_stages[GENERAL])
        return EncoderCosts(stages.prepare.line, stages.encode.line)

    def anchor(self, report: EncoderReport, now: float) -> None:
        """Takes the encoder's own measurements of its forward passes."""
        general = Line(report.batch_overhead_s, report.encode_s_per_cost)
        self._modality_to_stages[GENERAL].encode.anchor(general, now)
        for cost in report.costs:
            self._known(cost.modality).encode.anchor(Line(cost.overhead_s, cost.seconds_per_cost), now)

    def observe_prepare(self, modality: str, cost: int, seconds: float, now: float) -> None:
        for name in (modality, GENERAL):
            self._known(name).prepare.observe(cost, seconds, now)

    def observe_encode(self, modality: str, cost: int, seconds: float, now: float) -> None:
        for name in (modality, GENERAL):
            self._known(name).encode.observe(cost, seconds, now)

    def _known(self, modality: str) -> _Stages:
        if modality not in self._modality_to_stages:
            self._modality_to_stages[modality] = _stages(self.of(GENERAL))
        return self._modality_to_stages[modality]


def common_costs(encoders: Iterable[Mapping[str, StageEstimates]]) -> dict[str, CommonStages]:
    """Returns the common costs of several encoders, given the `estimates` of each."""
    name_to_estimates: dict[str, list[StageEstimates]] = {}
    for estimates in encoders:
        for name, each in estimates.items():
            name_to_estimates.setdefault(name, []).append(each)
    return {name: CommonStages.of(each) for name, each in name_to_estimates.items()}


def _stages(costs: EncoderCosts) -> _Stages:
    return _Stages(AgeingCost(costs.prepare), AgeingCost(costs.encode))
