"""Keeps what the work of a member costs, as the router learns it. A `LinearCost` is a straight line `base_s +
per_unit_s * x` that starts from an anchor (a default, or what the member measured itself and reports) and that
responses correct. Two estimators learn one stage of one member: `AgeingCost`, which adds the age of what was learned,
and `ExponentialAverage`, which is the simplest one that could do. An `EncoderCost` holds an estimator for each modality
and stage, because a patch of a video and a mel frame of a sound take different times.

The longer ago the router learned the cost of a member, the less it trusts that cost, and the more it uses the common
cost of the member's kind instead (`common_line`, `believed`). Differences between members that lie within the noise of
measuring count as zero; otherwise one of two equal members would always get every request. `cost_columns` does the same
for all members at once.

The caller passes the time in. The module knows nothing of queues, of scores, or of the members themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, exp2, inf, log
from typing import NamedTuple, Protocol

from fabric.contracts import EncoderReport, corrected
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


# ------------------------------------------------------------ a cost and its age

HALF_LIFE_S = 10.0
"""This is the half-life of the trust in an estimate that nothing confirms. A machine is busy with other things for
seconds or minutes."""
MAX_HALF_LIFE_S = 160.0
"""Limits the half-life; an estimate reaches this limit when it has been confirmed after each of four silences."""
CONFIRMED = 1.5
"""A new value confirms the old one if it is within this factor of it."""
NOISE = 0.2
"""This is the logarithm of a factor. A member whose cost differs from the common one by less than this factor counts as
equal to its kind; from twice this logarithm on, its own cost counts in full."""
LEAST_TRUST = 1e-9
"""The trust never falls below this value once there is evidence. So when all estimates are old, the least old ones
still count most."""


class CostEstimator(Protocol):
    """A `CostEstimator` learns one stage of one member."""

    @property
    def line(self) -> Line:
        """Returns the line as it was learned, however long ago that was."""
        ...

    @property
    def is_measured(self) -> bool:
        """Tells whether the member reports its own measurements of the stage."""
        ...

    @property
    def evidence(self) -> Evidence: ...

    def estimate(self, now: float) -> Estimate: ...

    def observe(self, x: float, actual_s: float, now: float) -> None:
        """Corrects the line by an observation: `x` units took `actual_s` seconds. Values that carry no information are
        ignored."""
        ...

    def anchor(self, measured: Line, now: float, *, is_fresh: bool = False) -> None:
        """Takes the line that the member itself reports. A slope that is not positive means "not known yet" and is
        ignored. `is_fresh` says that the member has worked since its last report, so that even an equal line was
        measured again."""
        ...


class Evidence(NamedTuple):
    """`Evidence` says how the trust in an estimate develops: it halves in each `half_life_s` after `at_s`. Without any
    evidence (`at_s` is None), it stays at `start_trust`."""

    at_s: float | None
    half_life_s: float
    start_trust: float

    def trust(self, now: float) -> float:
        """Returns the trust, in [0, 1]."""
        if self.at_s is None:
            return self.start_trust
        return max(LEAST_TRUST, exp2(-max(0.0, now - self.at_s) / self.half_life_s))


CostListener = Callable[[CostEstimator], None]
"""Is called after each change of an estimator."""


def ignore_change(_: CostEstimator) -> None:
    pass


class AgeingCost:
    """Keeps a member's cost line and its age.

    Without ageing, a member that looked slow once would look slow for ever: it gets no requests as long as other
    members are idle, so nothing corrects its estimate. With ageing, its estimate approaches that of the others within
    some half-lives, it gets a request, and the result of that request counts. A member that really is slow is found
    slow again, and each time the estimate is trusted twice as long."""

    def __init__(self, start: Line, start_trust: float = 0.0, changed: CostListener = ignore_change) -> None:
        """Begins with a line that is trusted by `start_trust` until there is evidence."""
        self._cost = LinearCost(start)
        self._age = Age(start_trust)
        self._reported: Line | None = None
        self._changed = changed

    @property
    def line(self) -> Line:
        """Returns the line as it was learned, however long ago that was."""
        return self._cost.line

    @property
    def is_measured(self) -> bool:
        return self._cost.is_measured

    @property
    def evidence(self) -> Evidence:
        return self._age.evidence

    def estimate(self, now: float) -> Estimate:
        return Estimate(self._cost.line, self._age.trust(now))

    def observe(self, x: float, actual_s: float, now: float) -> None:
        """Corrects the line by what a response reports. After a silence the response counts for more than the earlier
        estimate."""
        if not (actual_s > 0.0 and x >= 0.0):
            return
        predicted_s = self._cost.line.at(x)
        is_confirmed = predicted_s > 0.0 and 1.0 / CONFIRMED <= actual_s / predicted_s <= CONFIRMED
        gain = 1.0 - (1.0 - LEARNING_RATE) * self._age.trust(now)
        self._cost.observe(x, actual_s, gain)
        self._age.renew(now, is_confirmed)
        self._changed(self)

    def anchor(self, measured: Line, now: float, *, is_fresh: bool = False) -> None:
        """Takes the line that the member itself reports. A line that equals the one of its last report is no news,
        unless the member has measured it again."""
        if measured == self._reported:
            if is_fresh and self._cost.is_measured:
                self._age.renew(now, is_confirmed=True)
                self._changed(self)
            return
        self._reported = measured
        before = self._cost.line
        self._cost.anchor(measured)
        if self._cost.is_measured:
            self._age.renew(now, _are_alike(before, self._cost.line))
        self._changed(self)


class Estimate(NamedTuple):
    """An `Estimate` is a cost line with the trust in it, in [0, 1]."""

    line: Line
    trust: float


class Age:
    """Keeps the time of the last evidence about a member, and the half-life with which the trust in it falls."""

    def __init__(self, start_trust: float = 0.0) -> None:
        self._at_s: float | None = None
        self._half_life_s = HALF_LIFE_S
        self._start_trust = start_trust

    @property
    def evidence(self) -> Evidence:
        return Evidence(self._at_s, self._half_life_s, self._start_trust)

    def trust(self, now: float) -> float:
        """Returns the trust, in [0, 1]. It is 1 at the moment of the last evidence."""
        return self.evidence.trust(now)

    def renew(self, now: float, is_confirmed: bool) -> None:
        """Records new evidence. If the trust had fallen below one half and the evidence confirms the estimate, the
        half-life doubles; if the evidence contradicts the estimate, the half-life falls back to `HALF_LIFE_S`."""
        if not is_confirmed:
            self._half_life_s = HALF_LIFE_S
        elif self._at_s is not None and now - self._at_s > self._half_life_s:
            self._half_life_s = min(2.0 * self._half_life_s, MAX_HALF_LIFE_S)
        self._at_s = now if self._at_s is None else max(now, self._at_s)


def _are_alike(before: Line, after: Line) -> bool:
    """Returns whether both lines predict about the same cost for a small and for a large amount."""
    return before != ZERO and all(1.0 / CONFIRMED <= after.at(x) / before.at(x) <= CONFIRMED for x in (1.0, 1000.0))


def common_line(estimates: Iterable[Estimate]) -> Line | None:
    """Returns what a kind of member costs, or None without any evidence. It is the median of the members' lines, each
    weighted by its trust, so that one slow member does not make the others look slow. If two values split the weight
    equally, the lower one is taken."""
    known = [estimate for estimate in estimates if estimate.trust > 0.0]
    if not known:
        return None
    half = 0.5 * sum(estimate.trust for estimate in known)
    return Line(
        _median(sorted((line.base_s, trust) for line, trust in known), half),
        _median(sorted((line.per_unit_s, trust) for line, trust in known), half),
    )


def _median(values: Sequence[tuple[float, float]], half: float) -> float:
    """Returns the weighted median of (value, weight) pairs that are sorted by value; `half` is half of the sum of all
    weights."""
    below = 0.0
    for value, weight in values:
        below += weight
        if below >= half:
            return value
    return values[-1][0]


def believed(estimate: Estimate, common: Line | None) -> Line:
    """Returns a line between the member's own and the common one, in proportion to the trust. Where the difference is
    within the noise, it returns the common line."""
    line, trust = estimate
    if common is None:
        return line
    if trust == 0.0:
        return common
    return Line(_drawn(line.base_s, common.base_s, trust), _drawn(line.per_unit_s, common.per_unit_s, trust))


def _drawn(own: float, common: float, trust: float) -> float:
    if own <= 0.0 or common <= 0.0:
        return own
    apart = log(own / common)
    left = trust * abs(apart)
    if left < 2.0 * NOISE:
        left = max(0.0, 2.0 * (left - NOISE))
    return common * exp(left if apart > 0.0 else -left)


# ------------------------------------------------------------ the line and its correction

ZERO = Line(0.0, 0.0)
"""This is the cost of a stage that was never seen; the first observation of the stage replaces it."""
LEARNING_RATE = 0.25
MAX_CORRECTION = 1e4
"""Limits the learned factor between an anchor and the line."""


class LinearCost:
    """A `LinearCost` is a line that observations correct (`fabric.contracts.learned_cost`), within bounds of its
    anchor.

    A surprise counts in full only if the observation before it was a surprise in the same direction. So a single pause
    of seconds moves the line by a tenth at most, while a true change gets through one observation later."""

    def __init__(self, anchor: Line) -> None:
        self._anchor = anchor
        self._last_surprise = 0.0
        """Holds the logarithm of the last observation's actual time over the predicted one."""
        self._is_measured = False
        self._factors = Line(1.0, 1.0)
        """Holds the factors between the anchor and the line, which were learned from responses."""
        self._line = anchor

    @property
    def line(self) -> Line:
        return self._line

    @property
    def is_measured(self) -> bool:
        """Tells whether the member reports its own measurements."""
        return self._is_measured

    def observe(self, x: float, actual_s: float, gain: float = LEARNING_RATE) -> None:
        """Corrects the line by an observation: `x` units took `actual_s` seconds. An observation with a negative `x`,
        or with an `actual_s` that is not positive, carries no information and is ignored. From a gain of one half on,
        as after a silence, the observation counts in full."""
        if x < 0.0:
            return
        old = self._line
        if old == ZERO:
            self._begin(x, actual_s)
            return
        predicted_s = old.at(x)
        if predicted_s > 0.0 and 0.0 < actual_s / predicted_s < inf:
            surprise, last = log(actual_s / predicted_s), self._last_surprise
            self._last_surprise = surprise
            if gain < 0.5:
                limit = max(log(CONFIRMED), abs(last) if surprise * last > 0.0 else 0.0)
                actual_s = predicted_s * exp(min(max(surprise, -limit), limit))
        base_s, per_unit_s = corrected(old, (1.0, x), actual_s, gain)
        self._factors = Line(
            _bounded(self._factors.base_s * (base_s / old.base_s if old.base_s else 1.0)),
            _bounded(self._factors.per_unit_s * (per_unit_s / old.per_unit_s if old.per_unit_s else 1.0)),
        )
        self._refresh()

    def anchor(self, measured: Line) -> None:
        """Takes the member's own measurement as the anchor. The first one replaces what was learned on top of a guess.
        Later ones keep the learned correction, which is relative, except for the part of it that the new measurement
        itself contains, so that a change that responses had already taught is not counted twice. A slope that is not
        positive means "not known yet" and is ignored."""
        if measured.per_unit_s <= 0.0 or measured.base_s < 0.0:
            return
        if not self._is_measured:
            self._factors = Line(1.0, 1.0)
        else:
            self._factors = Line(*map(_caught_up, self._factors, self._anchor, measured))
        self._is_measured = True
        self._anchor = measured
        self._refresh()

    def _begin(self, x: float, actual_s: float) -> None:
        """Begins with the first observation of a cost that was zero, because factors never change a zero. Half of the
        time counts as the base, and half as the slope."""
        if 0.0 < actual_s < inf:
            self._anchor = Line(0.5 * actual_s, 0.5 * actual_s / x) if x >= 1.0 else Line(actual_s, 0.0)
            self._refresh()

    def _refresh(self) -> None:
        anchor, factors = self._anchor, self._factors
        self._line = Line(anchor.base_s * factors.base_s, anchor.per_unit_s * factors.per_unit_s)


def _caught_up(factor: float, old: float, new: float) -> float:
    """Returns a correction without the part of it that the anchor's change from `old` to `new` already contains."""
    if old <= 0.0 or new <= 0.0 or factor == 1.0:
        return factor
    moved, correction = log(new / old), log(factor)
    if moved * correction <= 0.0:
        return factor
    left = max(0.0, abs(correction) - abs(moved))
    return exp(left if correction > 0.0 else -left)


def _bounded(factor: float) -> float:
    return min(max(factor, 1.0 / MAX_CORRECTION), MAX_CORRECTION)


class ExponentialAverage:
    """Keeps a member's cost line as the plain exponential average of what was observed, with the interface of
    `AgeingCost`: an observation moves the line by a fixed share of its error, and a report of the member replaces the
    line. It knows no age, no anchor and no noise, and nothing of outliers except what
    `fabric.contracts.corrected` does."""

    def __init__(self, start: Line, start_trust: float = 0.0, changed: CostListener = ignore_change) -> None:
        self._line = start
        self._start_trust = start_trust
        self._at_s: float | None = None
        self._is_measured = False
        self._changed = changed

    @property
    def line(self) -> Line:
        return self._line

    @property
    def is_measured(self) -> bool:
        return self._is_measured

    @property
    def evidence(self) -> Evidence:
        return Evidence(self._at_s, inf, self._start_trust)

    def estimate(self, now: float) -> Estimate:
        return Estimate(self._line, self.evidence.trust(now))

    def observe(self, x: float, actual_s: float, now: float) -> None:
        if not (0.0 < actual_s < inf and x >= 0.0):
            return
        predicted_s = self._line.at(x)
        if predicted_s <= 0.0:
            self._line = Line(0.5 * actual_s, 0.5 * actual_s / x) if x >= 1.0 else Line(actual_s, 0.0)
        else:
            gain = 1.0 if self._at_s is None else LEARNING_RATE
            self._line = Line(*corrected(self._line, (1.0, x), actual_s, gain))
        self._at_s = now
        self._changed(self)

    def anchor(self, measured: Line, now: float, *, is_fresh: bool = False) -> None:
        is_known = self._is_measured and measured == self._line and not is_fresh
        if measured.per_unit_s <= 0.0 or measured.base_s < 0.0 or is_known:
            return
        self._line, self._is_measured, self._at_s = measured, True, now
        self._changed(self)


# ------------------------------------------------------------ the costs of one encoder

GENERAL = ""
"""This is the key of the costs over all modalities, in the mix in which items came."""


STAGES = EncoderCosts._fields
"""Names the stages of an encoder, in the order of `EncoderCosts`."""
MakeCost = Callable[[str, str, Line], CostEstimator]
"""Makes the estimator of a modality and stage, which begins with the given line."""


def make_ageing_cost(_modality: str, _stage: str, start: Line) -> CostEstimator:
    return AgeingCost(start)


class EncoderCost:
    """Keeps the costs of one encoder, by modality; they start from defaults. A modality of which nothing is known yet
    costs what the encoder's work costs in general."""

    def __init__(self, defaults: EncoderCosts, make: MakeCost = make_ageing_cost) -> None:
        self._make = make
        self._modality_to_stages = {GENERAL: self._stages(GENERAL, defaults)}

    def estimates(self, now: float) -> dict[str, StageEstimates]:
        """Returns the estimates for the modalities of which something is known, and for `GENERAL`."""
        return {name: stages.estimates(now) for name, stages in self._modality_to_stages.items()}

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
    decode: CostEstimator
    device_prepare: CostEstimator
    encode: CostEstimator

    def estimates(self, now: float) -> StageEstimates:
        return StageEstimates(*(stage.estimate(now) for stage in self))


class StageEstimates(NamedTuple):
    decode: Estimate
    device_prepare: Estimate
    encode: Estimate

    def believed(self, common: CommonStages) -> EncoderCosts:
        return EncoderCosts(*map(believed, self, common))


class CommonStages(NamedTuple):
    """Holds the cost lines of encoders in general; a line is None where nothing is known."""

    decode: Line | None = None
    device_prepare: Line | None = None
    encode: Line | None = None

    @classmethod
    def of(cls, estimates: Iterable[StageEstimates]) -> CommonStages:
        return cls(*map(common_line, zip(*estimates, strict=True)))


CommonCosts = Mapping[str, CommonStages]
"""Maps each modality, and `GENERAL`, to the common cost lines."""


def common_costs(encoders: Iterable[Mapping[str, StageEstimates]]) -> dict[str, CommonStages]:
    """Returns the common costs of several encoders, given the `estimates` of each."""
    name_to_estimates: dict[str, list[StageEstimates]] = {}
    for estimates in encoders:
        for name, each in estimates.items():
            name_to_estimates.setdefault(name, []).append(each)
    return {name: CommonStages.of(each) for name, each in name_to_estimates.items()}
