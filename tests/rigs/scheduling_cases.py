"""Builds requests with images at given places for the scheduler's unit tests, and runs the scheduler one step at a
time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf

import numpy as np

from fabric.contracts import (
    AttemptId,
    FeatureTicket,
    GenerateRequest,
    ManualClock,
    MediaItem,
    MemberId,
    MmHash,
    PlaceholderRange,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
    UnitKey,
)
from fabric.transport import LandedFeature
from llm_workers.scheduling import AdmittedSequences, FeatureReference, Scheduler, StepEvents, StepPlan, StepResult
from llm_workers.worker_config import WorkerConfig
from modalities.family import Positions

PAD = 9
MAX_MODEL_LEN = 4096
NUMBERS = itertools.count(1)


def image(name: str, index: int, num_tokens: int) -> MediaItem:
    return MediaItem(
        index, "image", MmHash(name), (1, num_tokens, 4), (num_tokens,), 4 * num_tokens, f"messages.0.{index}"
    )


def unit(name: str) -> UnitKey:
    return UnitKey(MmHash(name), 0)


def request(
    name: str,
    length: int | Sequence[int],
    images: Sequence[tuple[str, int, int]] = (),
    *,
    age: float = 0.0,
    max_tokens: int = 100,
    **fields: object,
) -> GenerateRequest:
    """Returns a request. `length` is the number of tokens of a prompt that no other request shares, or the token ids
    themselves; each of `images` is (name, offset, tokens)."""
    seed = sum(name.encode()) * 1000
    token_ids = list(range(seed, seed + length)) if isinstance(length, int) else list(length)
    for _, offset, num_tokens in images:
        token_ids[offset : offset + num_tokens] = [PAD] * num_tokens
    defaults: dict[str, object] = {"sampling": SamplingParams(), "stop": StopConditions(max_tokens=max_tokens)}
    return GenerateRequest(
        request_id=RequestId(name),
        attempt=1,
        router_id=MemberId("router-1"),
        router_address="local://router-1",
        token_ids=tuple(token_ids),
        placeholders=tuple(PlaceholderRange(at, n, index, 0, 0) for index, (_, at, n) in enumerate(images)),
        media=tuple(image(media, index, n) for index, (media, _, n) in enumerate(images)),
        age=(age, name),
        **{**defaults, **fields},
    )


def positions(prompt: GenerateRequest, delta: int = 0) -> Positions:
    return Positions(np.arange(len(prompt.token_ids), dtype=np.int64)[None, :], delta)


def sequence_id(name: str, choice: int = 0, attempt: int = 1) -> SequenceId:
    return SequenceId(RequestId(name), attempt, choice)


def attempt_id(name: str) -> AttemptId:
    return AttemptId(RequestId(name), 1)


def reference(of: UnitKey) -> FeatureReference:
    """Returns another reference to the unit, with a feature of one byte."""
    ticket = FeatureTicket("encoder", b"", 0, 0, 1, 1, (1, 1, 1), "float32", 60.0)
    return FeatureReference(of, next(NUMBERS), LandedFeature(0, np.zeros(1, np.uint8), ticket, 0.0))


class Bench:
    """A `Bench` is a scheduler with its clock; `step` plans, answers every draw with `token` and commits, and the
    methods check the invariants."""

    def __init__(self, context_scale_tokens: float = inf, **config: object) -> None:
        self.clock = ManualClock()
        self.config = WorkerConfig(**config)
        self.scheduler = Scheduler(self.config, MAX_MODEL_LEN, self.clock, context_scale_tokens)

    def add(self, prompt: GenerateRequest, *, landed: bool = False, delta: int = 0) -> AdmittedSequences:
        admission = self.scheduler.add(self.scheduler.prepare(prompt, positions(prompt, delta)))
        if landed:
            for missing in admission.missing_units:
                self.land(missing)
        self.scheduler.check_invariants()
        return admission

    def land(self, landed: UnitKey) -> None:
        """Hands the scheduler a reference to the unit."""
        self.scheduler.hold_feature(reference(landed))

    def release_unneeded(self) -> list[UnitKey]:
        """Returns the units that the scheduler releases now."""
        return [released.unit for released in self.scheduler.release_unneeded()]

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan_step()
        self.scheduler.check_invariants()
        assert plan.num_tokens <= self.config.max_step_tokens
        assert len(plan.chunks) <= self.config.max_sequences
        return plan

    def commit(self, plan: StepPlan, token: int = 7) -> StepEvents:
        drawn = {
            chunk.sequence_id: chunk.accepted((token,) * (chunk.num_drafts + 1))
            for chunk in plan.chunks
            if chunk.sampling is not None
        }
        events = self.scheduler.commit(plan, StepResult(drawn))
        self.scheduler.check_invariants()
        return events

    def step(self, token: int = 7) -> dict[str, int]:
        """Runs one step, releases what became unneeded, and returns the number of tokens computed per request name."""
        plan = self.plan()
        self.commit(plan, token)
        self.release_unneeded()
        return {chunk.sequence_id.request_id: chunk.num_tokens for chunk in plan.chunks}
