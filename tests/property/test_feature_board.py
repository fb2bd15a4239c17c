"""Runs a simulated engine over the feature board of workers with vLLM: sequences with shared pictures, an encoder cache
that has room for few of them and evicts what it likes, features that land in any order and are taken away again. No
sequence may compute a placeholder whose feature is not there, every reference comes back once, and all end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_prompts import build, segments

from fabric.contracts import (
    FeatureTicket,
    GenerateRequest,
    MemberId,
    RequestId,
    SamplingParams,
    StopConditions,
    UnitKey,
)
from fabric.transport import LandedFeature
from llm_workers.scheduling import FeatureReference, ReleasedFeature, Sequence, prepare
from llm_workers.vllm_engine.feature_board import FeatureBoard
from llm_workers.worker_config import WorkerConfig
from modalities.family import Positions

CONFIG = WorkerConfig(block_size=4, num_blocks=1000)


def sequence_of(number: int, parts: tuple[int | str, ...]) -> tuple[GenerateRequest, Sequence]:
    token_ids, runs, media = build(parts)
    request = GenerateRequest(
        request_id=RequestId(f"r{number}"),
        attempt=0,
        router_id=MemberId("router"),
        router_address="",
        token_ids=token_ids,
        placeholders=runs,
        media=media,
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(1),
        age=(float(number), f"r{number}"),
    )
    positions = Positions(np.arange(len(token_ids))[None], 0)
    return request, prepare(request, positions, CONFIG, 10_000, 0.0).sequences[0]


class World:
    """Plays vLLM and the feature store around a board."""

    def __init__(self, prompts: list[tuple[int | str, ...]], seed: int, room: int, *, is_overlap_enabled: bool) -> None:
        self.rng, self.room = random.Random(seed), room
        self.board = FeatureBoard(is_overlap_enabled=is_overlap_enabled)
        self.numbers = itertools.count()
        self.held: dict[FeatureReference, None] = {}
        self.wanted: set[UnitKey] = set()
        self.cache: dict[str, set[int]] = {}
        """Holds the rows' units of each item in the encoder cache."""
        self.computed: dict[Sequence, int] = {}
        self.unbegun: set[Sequence] = set()
        self.in_step: set[str] = set()
        """Holds the items that the chunks of the present step read."""
        for number, parts in enumerate(prompts):
            request, sequence = sequence_of(number, parts)
            sequence.num_covered = self.rng.choice([0, 0, self.rng.randrange(len(request.token_ids))])
            self.computed[sequence] = sequence.num_covered
            self.unbegun.add(sequence)
            self.wanted.update(self.board.add(request, sequence))
            self.board.check_invariants()

    def take_back(self, released: Iterable[ReleasedFeature]) -> None:
        for feature in released:
            for reference in feature.references:
                del self.held[reference]
            if feature.missed_by:
                self.wanted.add(feature.unit)

    def land(self) -> None:
        if self.wanted:
            unit = self.rng.choice(sorted(self.wanted))
            self.wanted.discard(unit)
            ticket = FeatureTicket("e", b"", 0, 0, 4, 1, (1, 1, 1), "float32", 1.0)
            feature = LandedFeature(next(self.numbers), np.zeros(4, np.uint8), ticket, 0.0)
            reference = FeatureReference(unit, feature.slot_id, feature)
            self.held[reference] = None
            self.board.hold(reference)

    def evict(self) -> None:
        units = sorted({reference.unit for reference in self.held})
        if units:
            unit = self.rng.choice(units)
            if (released := self.board.evict(unit)) is not None:
                self.take_back([released])

    def step(self) -> None:
        """Plans a step of some sequences, loads what it needs, and commits it."""
        self.board.begin_plan()
        planned: list[tuple[Sequence, int, int]] = []
        for sequence in self.rng.sample(list(self.computed), len(self.computed)):
            if sequence in self.unbegun and self.rng.random() < 0.5:  # The prefix cache has another part of it now.
                self.computed[sequence] = self.rng.randrange(sequence.num_tokens)
            name, start = sequence.sequence_id, self.computed[sequence]
            end = min(sequence.num_tokens, start + self.rng.randint(1, 6))
            limit = self.board.limit(name, start, end)
            if limit > start:
                limit = self.allocate(sequence, start, limit)
            if limit == start:
                self.board.wait(name, start)
            else:
                planned.append((sequence, start, limit))
        loads = self.board.take_loads()
        for load in loads:
            self.cache[load.unit.mm_hash].add(load.unit.unit)
        for sequence, start, end in planned:
            for _, unit in sequence.layout.runs_between(start, end):
                assert unit.unit in self.cache[unit.mm_hash], f"{unit} was computed without its feature"
        if self.rng.random() < 0.3:
            self.evict()
        self.take_back(self.board.end_loads([load.unit for load in loads]))
        for sequence, _, end in planned:
            sequence.is_started, self.computed[sequence] = True, end
            self.unbegun.discard(sequence)
            self.board.advance(sequence.sequence_id, end)
            if end == sequence.num_tokens:
                self.board.remove(sequence.sequence_id)
                del self.computed[sequence]
            elif self.rng.random() < 0.1:
                self.board.restart(sequence.sequence_id)
                self.computed[sequence] = 0
                self.unbegun.add(sequence)
        self.board.check_invariants()
        self.take_back(self.board.take_unneeded())
        self.wanted.update(needed.unit for needed in self.board.drain_needed())
        for unit, reads in self.board.drain_reads().items():
            assert all(read is None or read.position >= 0 for read in reads.values()), unit

    def allocate(self, sequence: Sequence, start: int, end: int) -> int:
        """Makes room for the items of a chunk, at the cost of items that no chunk of this step reads."""
        for run, unit in sequence.layout.runs_between(start, end):
            if unit.mm_hash not in self.cache:
                if len(self.cache) >= self.room:
                    gone = self.rng.choice(sorted(self.cache))
                    if gone in self.in_step:
                        return max(start, run.offset)
                    del self.cache[gone]
                    self.board.uncache(gone)
                self.cache[unit.mm_hash] = set()
                self.board.cache(sequence.sequence_id, unit.mm_hash)
            self.in_step.add(unit.mm_hash)
        return end


@given(
    prompts=st.lists(segments, min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    room=st.integers(1, 3),
    is_overlap_enabled=st.booleans(),
)
def test_every_sequence_ends_and_every_reference_comes_back(
    prompts: list[tuple[int | str, ...]], seed: int, room: int, is_overlap_enabled: bool
) -> None:
    world = World(prompts, seed, room, is_overlap_enabled=is_overlap_enabled)
    for _ in range(3000):
        if not world.computed:
            break
        world.in_step = set()
        world.land()
        world.step()
    assert not world.computed, "a sequence waits for ever"
    world.take_back(world.board.take_unneeded())
    assert not world.held, "a reference has not come back"
    world.board.check_at_rest()


def test_a_unit_that_a_step_loads_is_given_up_behind_it() -> None:
    world = World([("a1",)], 0, 3, is_overlap_enabled=True)
    (sequence,) = world.computed
    world.computed[sequence] = sequence.num_covered = 0
    world.wanted.update([sequence.layout.units_after(0)[0]])
    world.land()
    unit = next(iter(world.held)).unit
    world.board.cache(sequence.sequence_id, unit.mm_hash)
    (load,) = world.board.take_loads()
    assert world.board.evict(unit) is None
    (released,) = world.board.end_loads([load.unit])
    assert released.missed_by == ()
    assert list(released.references) == list(world.held)


@pytest.mark.parametrize("is_overlap_enabled", [True, False])
def test_a_held_sequence_computes_nothing_before_all_its_units_are_here(is_overlap_enabled: bool) -> None:
    world = World([(3, "a1", 1)], 0, 3, is_overlap_enabled=is_overlap_enabled)
    (sequence,) = world.computed
    first = sequence.layout.next_read(sequence.layout.units_after(0)[0], 0)
    expected = first if is_overlap_enabled else 0
    assert world.board.limit(sequence.sequence_id, 0, sequence.num_tokens) == expected
