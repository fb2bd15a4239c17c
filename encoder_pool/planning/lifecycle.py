"""The life of one unit's feature on its encoder, as a checked state machine.

    ENCODING ──> ENCODED <──> STAGED        design: ENCODING -> ENCODED -> STAGED -> MERGED -> PREFILLED -> DISCARDED
        │           │                       MERGED and PREFILLED are the worker's; here a feature that every worker
        v           v                       let go of is ENCODED again: cached, and may be evicted.
      FAILED    DISCARDED

Knows nothing of memory or leases.
"""

from __future__ import annotations

from enum import Enum


class FeatureState(Enum):
    ENCODING = "encoding"
    """Its memory is reserved and being written."""
    ENCODED = "encoded"
    """Complete, and nobody holds a lease: cached."""
    STAGED = "staged"
    """Announced: at least one worker holds a lease."""
    DISCARDED = "discarded"
    FAILED = "failed"


NEXT_STATES: dict[FeatureState, frozenset[FeatureState]] = {
    FeatureState.ENCODING: frozenset({FeatureState.ENCODED, FeatureState.FAILED}),
    FeatureState.ENCODED: frozenset({FeatureState.STAGED, FeatureState.DISCARDED}),
    FeatureState.STAGED: frozenset({FeatureState.ENCODED}),
    FeatureState.DISCARDED: frozenset(),
    FeatureState.FAILED: frozenset(),
}


def advance(state: FeatureState, target: FeatureState) -> FeatureState:
    """The target, if the machine permits the step. Any other step is a bug of ours, hence an assertion."""
    assert target in NEXT_STATES[state], f"a feature can't go from {state.value} to {target.value}"
    return target
