"""Keeps what the work of a member costs, as the router learns it. A `LearnedLine` is a straight line `base_s +
per_unit_s * x`: it starts from a default, is replaced by what the member measured itself and reports, and moves a fixed
share towards each observation (ADR 65). An `EncoderCost` holds a line for each modality and stage, because a patch of a
video and a mel frame of a sound take different times.

What a member that was never seen costs follows from the others of its kind (`cost_columns`). The caller passes the time
in. The module knows nothing of queues, of scores, or of the members themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, log
from typing import NamedTuple

from fabric.contracts import CONFIRMED, EncoderReport, corrected
from router.planning.link_classes import LinkClass
from router.planning.plan_types import EncoderCosts, Line


class CostDefaults(NamedTuple):
    """Holds the costs before anything is measured: those of a small model on a CPU. An order of magnitude is enough,
    because the costs are corrected."""

    prefill: Line = Line(base_s=5e-3, per_unit_s=1e-4)
    delivery: Line = Line(base_s=2e-3, per_unit_s=0.0)
    decode: Line = Line(base_s=2e-3, per_unit_s=2e-6)
    device_prepare: Line = Line(base_s=0.0, per_unit_s=0.0)
    encode: Line = Line(base_s=2e-3, per_unit_s=2e-5)
    same_process: Line = Line(base_s=1e-4, per_unit_s=1 / 5e9)
    same_host: Line = Line(base_s=5e-4, per_unit_s=1 / 2e9)
    nvlink: Line = Line(base_s=2e-4, per_unit_s=1 / 600e9)
    rdma: Line = Line(base_s=3e-4, per_unit_s=1 / 50e9)
    tcp: Line = Line(base_s=1e-3, per_unit_s=1 / 12e9)

    @property
    def encoder(self) -> EncoderCosts:
        return EncoderCosts(self.decode, self.device_prepare, self.encode)

    def link(self, link: LinkClass) -> Line:
        return {
            LinkClass.SAME_PROCESS: self.same_process,
            LinkClass.SAME_HOST: self.same_host,
            LinkClass.NVLINK: self.nvlink,
            LinkClass.RDMA: self.rdma,
            LinkClass.TCP: self.tcp,
        }[link]


# ------------------------------------------------------------ a line and its correction

ZERO = Line(0.0, 0.0)
"""This is the cost of a stage that was never seen; the first observation of the stage replaces it."""
LEARNING_RATE = 0.25
"""An observation moves a line by this share of the error."""


def ignore_change(_: LearnedLine) -> None:
    pass


class LearnedLine:
    """Keeps the cost of one stage of one member: the exponential average of what was observed.

    A report of the member replaces the line. A surprise counts in full only if the observation before it was a surprise
    in the same direction. So a single pause of seconds moves the line by a tenth, while a true change gets through one
    observation later."""

    def __init__(
        self, start: Line, start_weight: float = 0.0, changed: Callable[[LearnedLine], None] = ignore_change
    ) -> None:
        """Begins with a line that weighs `start_weight`, at most 1, until there is evidence."""
        self._line = start
        self._start_weight = start_weight
        self._seen_at_s: float | None = None
        self._last_surprise = 0.0
        """Holds the logarithm of the last observation's actual time over the predicted one."""
        self._is_measured = False
        self._changed = changed

    @property
    def line(self) -> Line:
        return self._line

    @property
    def is_measured(self) -> bool:
        """Tells whether the member reports its own measurements of the stage."""
        return self._is_measured

    @property
    def seen_at_s(self) -> float | None:
        """Returns the time of the last evidence, or None if there is none."""
        return self._seen_at_s

    @property
    def weight(self) -> float:
        """Returns the weight of the line among those of its kind: 1 with evidence, and 0 if nothing is known."""
        return self._start_weight if self._seen_at_s is None else 1.0

    def observe(self, x: float, actual_s: float, now: float) -> None:
        """Corrects the line by an observation: `x` units took `actual_s` seconds. Values that carry no information are
        ignored. The first observation counts in full; of a stage that cost nothing, it makes half of the time the base
        and half the slope."""
        if not (0.0 < actual_s < inf and 0.0 <= x < inf):
            return
        predicted_s = self._line.at(x)
        if predicted_s <= 0.0:
            self._line = Line(0.5 * actual_s, 0.5 * actual_s / x) if x >= 1.0 else Line(actual_s, 0.0)
        else:
            self._line = Line(*corrected(self._line, (1.0, x), *self._counted(actual_s, predicted_s)))
        self._seen_at_s = now
        self._changed(self)

    def _counted(self, actual_s: float, predicted_s: float) -> tuple[float, float]:
        """Returns the time as which an observation counts, and the share of the error by which it moves the line."""
        if self._seen_at_s is None:
            return actual_s, 1.0
        log_predicted, last = log(predicted_s), self._last_surprise  # A quotient of tiny times would leave the floats.
        surprise = self._last_surprise = log(actual_s) - log_predicted
        limit = max(log(CONFIRMED), abs(last) if surprise * last > 0.0 else 0.0)
        return exp(log_predicted + min(max(surprise, -limit), limit)), LEARNING_RATE

    def anchor(self, measured: Line, now: float) -> None:
        """Takes the line that the member itself reports. A slope that is not positive means "not known yet" and is
        ignored, and so is a line that is the present one."""
        is_known = self._is_measured and measured == self._line
        if measured.per_unit_s <= 0.0 or measured.base_s < 0.0 or is_known:
            return
        self._line, self._is_measured, self._seen_at_s = measured, True, now
        self._changed(self)


# ------------------------------------------------------------ the costs of one encoder

GENERAL = ""
"""This is the key of the costs over all modalities, in the mix in which items came."""


STAGES = EncoderCosts._fields
"""Names the stages of an encoder, in the order of `EncoderCosts`."""
MakeCost = Callable[[str, str, Line], LearnedLine]
"""Makes the line of a modality and stage, which begins with the given one."""


def make_line(_modality: str, _stage: str, start: Line) -> LearnedLine:
    return LearnedLine(start)


class EncoderCost:
    """Keeps the costs of one encoder, by modality; they start from defaults. A modality of which nothing is known yet
    costs what the encoder's work costs in general."""

    def __init__(self, defaults: EncoderCosts, make: MakeCost = make_line) -> None:
        self._make = make
        self._modality_to_stages = {GENERAL: self._stages(GENERAL, defaults)}

    def of(self, modality: str) -> EncoderCosts:
        """Returns the costs as they were learned, however long ago that was."""
        stages = self._modality_to_stages.get(modality, self._modality_to_stages[GENERAL])
        return EncoderCosts(stages.decode.line, stages.device_prepare.line, stages.encode.line)

    def anchor(self, report: EncoderReport, now: float) -> None:
        """Takes the encoder's own measurements of its stages. A stage that it has not measured yet is left out."""
        general = Line(report.batch_overhead_s, report.encode_s_per_cost)
        self._modality_to_stages[GENERAL].encode.anchor(general, now)
        for cost in report.costs:
            stages = self._known(cost.modality)
            stages.encode.anchor(Line(cost.overhead_s, cost.seconds_per_cost), now)
            stages.decode.anchor(Line(cost.decode_overhead_s, cost.decode_s_per_cost), now)
            stages.device_prepare.anchor(Line(cost.device_prepare_overhead_s, cost.device_prepare_s_per_cost), now)

    def observe_decode(self, modality: str, cost: int, seconds: float, now: float) -> None:
        for name in (modality, GENERAL):
            self._known(name).decode.observe(cost, seconds, now)

    def observe_device_prepare(self, modality: str, cost: int, seconds: float, now: float) -> None:
        """Takes the time of the device's preprocessing. It says nothing of other modalities, which the device may not
        prepare at all."""
        self._known(modality).device_prepare.observe(cost, seconds, now)

    def observe_encode(self, modality: str, cost: int, seconds: float, now: float) -> None:
        for name in (modality, GENERAL):
            self._known(name).encode.observe(cost, seconds, now)

    def _known(self, modality: str) -> _Stages:
        if modality not in self._modality_to_stages:
            self._modality_to_stages[modality] = self._stages(modality, self.of(GENERAL))
        return self._modality_to_stages[modality]

    def _stages(self, modality: str, costs: EncoderCosts) -> _Stages:
        return _Stages(*(self._make(modality, stage, line) for stage, line in zip(STAGES, costs, strict=True)))


class _Stages(NamedTuple):
    decode: LearnedLine
    device_prepare: LearnedLine
    encode: LearnedLine
