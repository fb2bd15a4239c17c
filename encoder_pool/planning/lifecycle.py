"""Defines the life of one unit's feature on its encoder, as a checked state machine.

    ENCODING ──> ENCODED <──> STAGED        The design has ENCODING -> ENCODED -> STAGED -> MERGED -> PREFILLED ->
        │           │                       DISCARDED. MERGED and PREFILLED are states of the worker; here a feature
        v           v                       that every worker has released is ENCODED again: it is cached and may be
      FAILED    DISCARDED                   evicted.

The module knows nothing of memory or leases.
"""

from __future__ import annotations

from enum import Enum


class FeatureState(Enum):
    ENCODING = "encoding"
    """The feature's memory is reserved and is being written."""
    ENCODED = "encoded"
    """The feature is complete and no worker holds a lease, so it is cached."""
    STAGED = "staged"
    """The feature is announced and at least one worker holds a lease."""
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
    """Returns the target if the state machine permits the step. Any other step is a bug in this program, hence an
    assertion."""
    assert target in NEXT_STATES[state], f"a feature can't go from {state.value} to {target.value}"
    return target
