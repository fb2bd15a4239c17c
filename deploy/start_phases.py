"""Says what a cluster that starts waits for: which members are there, and what the others do.

Each encoder and worker tells its phases (`TellPhase`): it loads weights, then measures what its stages cost. A
`StartBoard` keeps what was told, and `start_text` makes one line of it for people. The module knows nothing of how
members tell, or of where the line is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

LOADING, LOADED, MEASURING = "loading weights", "loaded", "measuring costs"
STARTING = "starting"
"""This is the phase of a member that has told nothing: Ray starts its process, which imports libraries."""
SILENT = "not answering"
"""This is the phase of a member that was there and whose heartbeats stay away: its machine is busy, or it ended."""
KINDS = ("worker", "encoder", "router")

TellPhase = Callable[[str, str, str], None]
"""Takes the kind of a member, its name and the phase that begins."""


def tell_nobody(kind: str, name: str, phase: str) -> None:
    """Takes a phase and forgets it, where nobody waits for the start."""


class ToldPhase(NamedTuple):
    kind: str
    name: str
    phase: str


class StartBoard:
    """A `StartBoard` keeps the latest phase of each member."""

    def __init__(self) -> None:
        self._name_to_phase: dict[str, ToldPhase] = {}

    def tell(self, kind: str, name: str, phase: str) -> None:
        self._name_to_phase.pop(name, None)  # The member that told something last stands at the end.
        self._name_to_phase[name] = ToldPhase(kind, name, phase)

    def told(self) -> tuple[ToldPhase, ...]:
        return tuple(self._name_to_phase.values())


def with_silent(told: Iterable[ToldPhase], was_ready: Container[str]) -> list[ToldPhase]:
    """Returns the phases, with that of members which were ready once replaced: they no longer start."""
    return [each._replace(phase=SILENT) if each.name in was_ready else each for each in told]


def start_text(wanted: Mapping[str, int], ready: Iterable[ToldPhase], told: Iterable[ToldPhase]) -> str:
    """Returns what the cluster waits for, or an empty text if all wanted members are there. `wanted` maps kinds to
    numbers of members, and `ready` holds those that are there. A member that has failed may have told something too, so
    of those that are not there the latest count."""
    ready_names = {each.name: each.kind for each in ready}
    num_ready = Counter(ready_names.values())
    told = list(told)
    pieces = []
    for kind in KINDS:
        num_wanted = wanted.get(kind, 0)
        num_left = num_wanted - num_ready[kind]
        if num_left <= 0:
            continue
        open_ones = [each for each in told if each.kind == kind and each.name not in ready_names][-num_left:]
        phases = Counter(each.phase for each in open_ones)
        phases[STARTING] += num_left - len(open_ones)
        listed = ", ".join(f"{num} {phase}" if num_left > 1 else phase for phase, num in phases.items() if num)
        head = f"{num_left} of {num_wanted} {kind}s" if num_wanted > 1 else f"the {kind}"
        pieces.append(f"{head} ({listed})")
    return f"waiting for {', '.join(pieces)}" if pieces else ""
