"""Describes what goes wrong in a simulation, and when. `parse_fault` reads a fault from the command line. The module
knows nothing of how a fault is brought about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fabric.contracts import ConfigError


@dataclass(frozen=True, slots=True)
class MemberFault:
    """A `MemberFault` happens to one worker or encoder at `at_s`: it dies, or everything takes `factor` times as long
    until `until_s`."""

    kind: Literal["death", "slow"]
    member: str
    """Names the member: `worker-3` or `encoder-0`."""
    at_s: float
    factor: float = 1.0
    until_s: float = float("inf")


def parse_fault(text: str) -> MemberFault:
    """Returns the fault that `death:worker-3@10` or `slow:encoder-0@5-20x4` describes. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    member, _, when = rest.partition("@")
    try:
        if kind == "death":
            return MemberFault("death", member, float(when))
        if kind == "slow":
            span, _, factor = when.partition("x")
            begin, _, end = span.partition("-")
            return MemberFault("slow", member, float(begin), float(factor), float(end or "inf"))
    except ValueError:
        pass
    raise ConfigError(
        f"{text!r} is no fault; write `death:worker-3@10` (it dies at 10 s) or `slow:encoder-0@5-20x4` (from 5 to 20 s "
        "everything takes 4 times as long)"
    )
