"""Searches encoders for the media of a request in Python. It is the algorithm of `landings.h`, for machines without a C
compiler, and makes the same choices. `LandingProblem` is what both search in, and the other types are what they answer.

The module knows what `landings` says of the model: a request's items queue behind each other on an encoder, and its
units share the links to the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

NONE = -1
"""Stands for "no encoder" where an array holds slots of encoders."""
FAR = 1e30
"""No landing is this late; a unit that the worker does not lack lands at its negative."""
MAX_TURNS = 6
"""The search begins with orders of items that are turned by up to this number."""
MAX_DECODERS = 16
"""A router knows of at most this many decode processes per encoder."""

# ------------------------------------------------------------ the problem


@dataclass(frozen=True, eq=False)
class LandingProblem:
    """A `LandingProblem` holds the items of one request and the encoders as they are now. Encoders are columns, by
    slot; arrays with a dimension `stride` may have more columns than there are slots in use. Times are seconds from
    now. All arrays are C-contiguous."""

    num_encoders: int
    modality: Ints
    """Holds the row of each item's modality in `rates`. Has shape `(items,)`."""
    cost: Floats
    """Holds the items' costs in patches or mel frames. Has shape `(items,)`."""
    first_unit: Ints
    """Holds the first unit of each item, and the number of units. Has shape `(items + 1,)`."""
    unit_share: Floats
    """Holds the share of the item's work that is done when the unit is complete. Has shape `(units,)`."""
    unit_bytes: Floats
    rates: Floats
    """Holds the costs of decoding, of preparing on the device and of encoding, each as base and per cost. Has shape
    `(modalities, 6, stride)`."""
    is_able: Bytes
    """Says which encoders may take a modality. Has shape `(modalities, stride)`."""
    decoder_free_s: Floats
    """Holds when a decode process of the encoder becomes free. Has shape `(stride,)`."""
    num_decoders: Ints
    waits_s: Floats
    """Holds when the device begins with new work that is behind the first 0, 1, ... bins of its queue. Has shape
    `(bins, stride)`."""
    bin_sizes_s: Floats
    """New work that takes at least so many seconds is behind the bin. Has shape `(bins - 1, stride)`."""
    ready_s: Floats
    """Holds when a feature is complete that the encoder has or is making already, and -1 where it has to be encoded.
    Has shape `(items, stride)`."""
    alpha_s: Floats
    """Holds the latency of each link class."""
    s_per_byte: Floats

    first: int
    """Among equal encoders, the first in turn from this slot is taken."""
    kept: dict[str, Any] = field(default_factory=dict, repr=False)
    """Holds what the C library keeps from one call about this problem to the next."""

    @property
    def num_items(self) -> int:
        return len(self.cost)

    @property
    def num_units(self) -> int:
        return len(self.unit_share)

    @property
    def stride(self) -> int:
        return len(self.decoder_free_s)

    def idle(self) -> LandingProblem:
        """Returns the same problem with empty queues at all encoders, and with all features complete that are on their
        way."""
        return replace(
            self,
            waits_s=np.zeros_like(self.waits_s),
            decoder_free_s=np.zeros_like(self.decoder_free_s),
            ready_s=np.minimum(self.ready_s, 0.0),
            first=0,
            kept={},
        )


class LandingRows(NamedTuple):
    """Holds the greedy choice for each row."""

    encoders: Ints
    """Holds the slot of each item's encoder; it is `NONE` for an item that the row does not lack, and for one that no
    encoder can take. Has shape `(rows, items)`."""
    landings_s: Floats
    """Holds when each unit lands. Has shape `(rows, units)`."""


class LandingGoal(NamedTuple):
    """A `LandingGoal` is what a worker makes of landing times: its prefill ends at the latest of `least_s` and, over
    all units, landing + `s_per_token` * `behind`."""

    least_s: float
    s_per_token: float
    behind: Floats
    """Holds the weighted tokens from the unit's first missing one to the end of the prompt. Has shape `(units,)`."""


class ItemStage(NamedTuple):
    """Explains an item's way through its encoder."""

    wait_s: float
    """This is the time until the device begins with work of this size; for a feature that is there already, until the
    feature is complete."""
    decode_wait_s: float
    decode_s: float
    device_s: float
    encode_s: float
    done_s: float
    """This is the time until the last unit is complete."""


class Improved(NamedTuple):
    """Holds the best choice that was found for one worker."""

    end_s: float
    encoders: list[int]
    landings_s: Floats
    """Holds when each unit lands. Has shape `(units,)`."""
    stages: list[ItemStage]


# ------------------------------------------------------------ the search


def land_rows(problem: LandingProblem, classes: Bytes, lacks: Bytes) -> LandingRows:
    """Does what `landings.land_rows` does."""
    search = _Search(problem)
    rows = [_Row(search, *each) for each in zip(classes.tolist(), lacks.tolist(), strict=True)]
    encoders = [row.greedy(range(problem.num_items)) for row in rows]
    landings_s = [row.land(chosen) for row, chosen in zip(rows, encoders, strict=True)]
    shape = len(rows), -1
    return LandingRows(np.array(encoders, np.int64).reshape(shape), np.array(landings_s, np.float64).reshape(shape))


def improve(
    problem: LandingProblem, classes: Bytes, lacks: Bytes, encoders: Ints, goal: LandingGoal, max_trials: int
) -> Improved:
    """Does what `landings.improve` does. It climbs from the given assignment, from the best single encoder, and from
    greedy choices in descending order of cost, in reverse order and in order from later items on; then it goes on from
    the best one with items of all encoders."""
    search = _Search(problem)
    row = _Row(search, classes.tolist(), lacks.tolist())
    climber = _Climber(row, goal.least_s, goal.s_per_token, goal.behind.tolist())
    best, chosen = climber.climb(encoders.tolist(), max_trials // 4)
    numbers = range(problem.num_items)
    descending = sorted(numbers, key=lambda item: -search.cost[item])
    turns = [[*numbers[turn:], *numbers[:turn]] for turn in range(1, min(problem.num_items - 1, MAX_TURNS) + 1)]
    orders: list[Sequence[int]] = [descending, numbers[::-1], *turns]
    starts: list[Callable[[], list[int] | None]] = [
        climber.best_single,
        *(partial(row.greedy, each) for each in orders),
    ]
    for start in starts if row.num_lacking > 1 and max_trials > 0 else ():
        if best.unit == NONE or (trial := start()) is None:
            continue
        score, trial = climber.climb(trial, max_trials // 4)
        if score[:2] < best[:2]:
            best, chosen = score, trial
    if row.num_lacking > 1 and max_trials > 0:
        best, chosen = climber.climb(chosen, max_trials, is_wide=True)
    stages = [ItemStage(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)] * problem.num_items
    landings_s = np.array(row.land(chosen, stages), np.float64)
    return Improved(best.end_s, chosen, landings_s, stages)


class _Lane:
    """A `_Lane` is what an encoder has been given of the request."""

    __slots__ = ("decoder_free_s", "device_free_s", "modalities", "own_s")

    def __init__(
        self, decoder_free_s: list[float], device_free_s: float, own_s: float, modalities: frozenset[int]
    ) -> None:
        self.decoder_free_s = decoder_free_s
        self.device_free_s = device_free_s
        self.own_s = own_s
        self.modalities = modalities

    def copy(self) -> _Lane:
        return _Lane(self.decoder_free_s[:], self.device_free_s, self.own_s, self.modalities)


class _Search:
    """Computes what assignments of one problem lead to. An assignment holds the slot of each item's encoder, or
    `NONE`."""

    def __init__(self, problem: LandingProblem) -> None:
        self.num_items, self.num_units = problem.num_items, problem.num_units
        num_encoders, self.num_classes = problem.num_encoders, len(problem.alpha_s)
        self.cost, self.modality = problem.cost.tolist(), problem.modality.tolist()
        self.units = [
            range(*ends) for ends in zip(problem.first_unit[:-1].tolist(), problem.first_unit[1:].tolist(), strict=True)
        ]
        self.share, self.nbytes = problem.unit_share.tolist(), problem.unit_bytes.tolist()
        self.rates, self.able = problem.rates.tolist(), problem.is_able.tolist()
        self.decoder_free_s, self.num_decoders = problem.decoder_free_s.tolist(), problem.num_decoders.tolist()
        self.waits_s, self.sizes_s = problem.waits_s.tolist(), problem.bin_sizes_s.tolist()
        self.ready_s = problem.ready_s.tolist()
        self.alpha_s, self.s_per_byte = problem.alpha_s.tolist(), problem.s_per_byte.tolist()
        self.offers = [
            sorted(
                _Offer(self.put(item, slot, self.lane(slot), None, None), (slot - problem.first) % num_encoders, slot)
                for slot in range(num_encoders)
                if self.is_able(item, slot)
            )
            for item in range(self.num_items)
        ]

    def is_able(self, item: int, encoder: int) -> bool:
        return bool(self.able[self.modality[item]][encoder])

    def lane(self, encoder: int) -> _Lane:
        num = min(max(self.num_decoders[encoder], 1), MAX_DECODERS)
        return _Lane([self.decoder_free_s[encoder]] * num, 0.0, 0.0, frozenset())

    def put(
        self, item: int, encoder: int, lane: _Lane, done_s: list[float] | None, stages: list[ItemStage] | None
    ) -> float:
        """Puts an item into a lane and returns when its last unit is complete."""
        ready_s = self.ready_s[item][encoder]
        if ready_s >= 0.0:
            if done_s is not None:
                for unit in self.units[item]:
                    done_s[unit] = ready_s
            if stages is not None:
                stages[item] = ItemStage(ready_s, 0.0, 0.0, 0.0, 0.0, ready_s)
            return float(ready_s)
        cost, modality = self.cost[item], self.modality[item]
        rates = [row[encoder] for row in self.rates[modality]]
        decode_s, device_s = rates[0] + rates[1] * cost, rates[2] + rates[3] * cost
        base_s, work_s = 0.0 if modality in lane.modalities else rates[4], rates[5] * cost
        begin_s = min(lane.decoder_free_s)
        lane.decoder_free_s[lane.decoder_free_s.index(begin_s)] = begin_s + decode_s
        lane.modalities |= {modality}
        lane.own_s += device_s + base_s + work_s
        waited_s = self._wait_s(encoder, lane.own_s)
        now_s, share = max(lane.device_free_s, waited_s), 0.0
        if device_s > 0.0:
            now_s = max(now_s, begin_s + decode_s) + device_s
        for unit in self.units[item]:
            now_s = max(now_s, begin_s + decode_s * self.share[unit])
            if unit == self.units[item].start:
                now_s += base_s
            now_s += work_s * (self.share[unit] - share)
            share = self.share[unit]
            if done_s is not None:
                done_s[unit] = now_s
        lane.device_free_s = now_s
        if stages is not None:
            stages[item] = ItemStage(waited_s, begin_s, decode_s, device_s, base_s + work_s, now_s)
        return now_s

    def _wait_s(self, encoder: int, own_s: float) -> float:
        number = 0
        while number < len(self.waits_s) - 1 and self.sizes_s[number][encoder] <= own_s:
            number += 1
        return float(self.waits_s[number][encoder])


class _Row:
    """A `_Row` is a set of lacking items with the class of the link to each encoder."""

    def __init__(self, search: _Search, classes: Sequence[int], lacking: Sequence[int]) -> None:
        self.search, self.classes, self.lacking = search, classes, lacking
        self.num_lacking = sum(lacking)

    def land(self, encoders: Sequence[int], stages: list[ItemStage] | None = None) -> list[float]:
        """Returns when each unit lands."""
        search = self.search
        done_s, landings_s = [0.0] * search.num_units, [-FAR] * search.num_units
        link_free_s = [0.0] * search.num_classes
        lanes: dict[int, _Lane] = {}
        heads = [units.stop if encoders[item] == NONE else units.start for item, units in enumerate(search.units)]
        for item, encoder in enumerate(encoders):
            if encoder != NONE:
                lane = lanes.get(encoder) or lanes.setdefault(encoder, search.lane(encoder))
                search.put(item, encoder, lane, done_s, stages)
        while waiting := [item for item, head in enumerate(heads) if head < search.units[item].stop]:
            item = min(waiting, key=lambda each: done_s[heads[each]])
            unit, link = heads[item], self.classes[encoders[item]]
            heads[item] += 1
            link_free_s[link] = max(done_s[unit], link_free_s[link]) + search.s_per_byte[link] * search.nbytes[unit]
            landings_s[unit] = link_free_s[link] + search.alpha_s[link]
        return landings_s

    def shortlist(self, item: int) -> list[_Offer]:
        """Returns the offers worth considering: the best of each link class, two more than items are lacking. In any
        assignment one of these encoders is free for the item, so a worse one can't help."""
        wanted = [2 + self.num_lacking] * self.search.num_classes
        chosen = []
        for offer in self.search.offers[item]:
            if wanted[self.classes[offer.encoder]]:
                wanted[self.classes[offer.encoder]] -= 1
                chosen.append(offer)
        return chosen

    def greedy(self, order: Sequence[int]) -> list[int]:
        """Gives each lacking item, in order, to the encoder from which its last unit lands first."""
        search, lanes = self.search, dict[int, _Lane]()
        encoders = [NONE] * search.num_items
        for item in order:
            best_s = FAR
            for alone_s, _, encoder in self.shortlist(item) if self.lacking[item] else ():
                link_s, done_s = self.link_s(item, encoder), alone_s
                if alone_s + link_s >= best_s:
                    continue
                if encoder in lanes:
                    done_s = search.put(item, encoder, lanes[encoder].copy(), None, None)
                if done_s + link_s < best_s:
                    best_s, encoders[item] = done_s + link_s, encoder
            if (chosen := encoders[item]) != NONE:
                search.put(item, chosen, lanes.get(chosen) or lanes.setdefault(chosen, search.lane(chosen)), None, None)
        return encoders

    def link_s(self, item: int, encoder: int) -> float:
        """Returns the time that the item's last unit takes on a free link."""
        search, link = self.search, self.classes[encoder]
        return float(search.alpha_s[link] + search.s_per_byte[link] * search.nbytes[search.units[item].stop - 1])


class _Offer(NamedTuple):
    """An `_Offer` is an encoder with the time at which one item alone would be complete there. Offers are ordered by
    time, and equal ones in turn."""

    alone_s: float
    turn: int
    encoder: int


class _Score(NamedTuple):
    """A `_Score` judges an assignment; the smaller one is better."""

    end_s: float
    landings_sum_s: float
    unit: int
    """Names the unit that decides the end, or is `NONE`."""


class _Climber:
    """Improves assignments for one worker."""

    def __init__(self, row: _Row, least_s: float, s_per_token: float, behind: Sequence[float]) -> None:
        self._row, self._search = row, row.search
        self._least_s, self._s_per_token, self._behind = least_s, s_per_token, behind

    def climb(self, encoders: list[int], num_trials: int, *, is_wide: bool = False) -> tuple[_Score, list[int]]:
        """Moves items off the encoder that decides the end, or swaps them with items of other encoders, while that
        helps. With `is_wide` it moves items of all encoders, because what delays the deciding unit may be the link."""
        search, encoders = self._search, encoders[:]
        best = self._judge(encoders)
        while best.unit != NONE and num_trials > 0:
            decider = next(item for item, units in enumerate(search.units) if best.unit in units)
            found, change = best, None
            movable = {*encoders} - {NONE} if is_wide else {encoders[decider]}
            for item in [number for number, encoder in enumerate(encoders) if encoder in movable]:
                for trial, least_s in self._neighbours(encoders, item):
                    if least_s > found.end_s or num_trials <= 0:
                        continue
                    num_trials -= 1
                    score = self._judge(trial)
                    if score[:2] < found[:2]:
                        found, change = score, trial
            if change is None:
                break
            best, encoders = found, change
        return best, encoders

    def best_single(self) -> list[int] | None:
        """Returns the best assignment of all items to one encoder, or None if no encoder can take them all. Only the
        encoders that the first lacking item considers are tried."""
        lacking = [item for item, lacks in enumerate(self._row.lacking) if lacks]
        singles = [
            [offer.encoder if lacks else NONE for lacks in self._row.lacking]
            for offer in self._row.shortlist(lacking[0])
            if all(self._search.is_able(item, offer.encoder) for item in lacking)
        ]
        return min(singles, key=lambda encoders: self._judge(encoders)[:2], default=None)

    def _neighbours(self, encoders: Sequence[int], item: int) -> Iterator[tuple[list[int], float]]:
        """Yields the assignments in which the item has moved to another encoder or has changed places with an item of
        another encoder, each with a bound of its end."""
        search, full, last = self._search, encoders[item], self._search.units[item].stop - 1
        for alone_s, _, encoder in self._row.shortlist(item):
            if encoder != full:
                trial = [*encoders]
                trial[item] = encoder
                yield trial, alone_s + self._row.link_s(item, encoder) + self._s_per_token * self._behind[last]
        for other, encoder in enumerate(encoders):
            if encoder in (NONE, full) or not search.is_able(item, encoder) or not search.is_able(other, full):
                continue
            trial = [*encoders]
            trial[item], trial[other] = encoder, full
            yield trial, 0.0

    def _judge(self, encoders: Sequence[int]) -> _Score:
        end_s, sum_s, decider = self._least_s, 0.0, NONE
        for unit, landing_s in enumerate(self._row.land(encoders)):
            if landing_s <= -FAR:
                continue
            sum_s += landing_s
            if landing_s + self._s_per_token * self._behind[unit] > end_s:
                end_s, decider = landing_s + self._s_per_token * self._behind[unit], unit
        return _Score(end_s, sum_s, decider)
