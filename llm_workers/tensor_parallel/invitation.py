"""What a follower must know to join its group. Plain values, so that it can be handed to another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invitation:
    rank: int
    num_ranks: int
    host: str
    """Of rank 0."""
    door_port: int
    store_port: int
    token: bytes
    """Who shows it belongs to the group."""
    device: str
    """`cpu` or `cuda`."""
    step_timeout_s: float
    """How long one rank waits for the others in a step before it gives the group up."""
    start_timeout_s: float
