"""Defines what a rank process must know to join its group. An `Invitation` holds plain values, so that it can be passed
to another process. It knows nothing of weights and models.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invitation:
    rank: int
    num_ranks: int
    host: str
    """Names the host of rank 0."""
    door_port: int
    store_port: int
    token: bytes
    """A connection that sends this token belongs to the group."""
    device: str
    """Is `cpu` or `cuda`."""
    step_timeout_s: float
    """One rank waits this long for the others in a step before it gives the group up."""
    start_timeout_s: float
