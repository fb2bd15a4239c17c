"""Builds a router's view of a small cluster, and plans requests in it."""

from __future__ import annotations

import random

from planning_samples import BLOCK_SIZE, SCHEME, SHAPE, encoder_member, worker_member

from fabric.contracts import BlocksStored, KvSnapshot
from router.planning import ClusterState, RoutePlan, RouteQuery


def cluster_of(num_workers: int = 1, num_encoders: int = 0) -> ClusterState:
    """Returns the view of a cluster whose workers are `w0`, `w1` and so on, and whose encoders are `e0`, `e1` and so
    on. No member has reported yet."""
    state = ClusterState(SHAPE, BLOCK_SIZE, random.Random(3))
    members = [worker_member(f"w{number}") for number in range(num_workers)]
    members += [encoder_member(f"e{number}") for number in range(num_encoders)]
    state.update_members(members)
    return state


def route(state: ClusterState, request: RouteQuery, now: float = 0.0) -> RoutePlan:
    """Plans a request and records that it was dispatched."""
    plan = state.plan(request, now)
    state.note_dispatched(request, plan, now)
    return plan


def blocks_of(request: RouteQuery) -> bytes:
    """Returns the hashes of the prompt's blocks."""
    return request.scheme_to_hashes[SCHEME]


def knows_prompt(state: ClusterState, name: str, request: RouteQuery, now: float = 0.0) -> None:
    """Tells the view that the worker `name` has the request's prompt in its cache."""
    snapshot = KvSnapshot(name, 1, 0, (BlocksStored(None, blocks_of(request)),))
    assert state.apply(snapshot, now) == ()
