"""Says what a cluster that starts waits for: which members are there, and what the others do.

Each encoder and worker tells its phases (`TellPhase`): it loads weights, and says how much of them, then measures what
its stages cost. A `StartBoard` keeps what was told, and `start_state` makes one line and the share that is loaded of
it, for people. The module knows nothing of how members tell, or of where the line is shown.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple, Protocol

LOADING, LOADED, MEASURING = "loading weights", "loaded", "measuring costs"
STARTING = "starting"
"""This is the phase of a member that has told nothing: Ray starts its process, which imports libraries."""
SILENT = "not answering"
"""This is the phase of a member that was there and whose heartbeats stay away: its machine is busy, or it ended."""
KINDS = ("worker", "encoder", "stage", "router")

TELL_S = 0.5
"""A member tells at most this often how much it has loaded."""


class LoadedBytes(NamedTuple):
    """Says how much of the weights is loaded. Both are 0 as long as that is not known."""

    loaded: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        return self.loaded / self.total if self.total else 0.0

    def __str__(self) -> str:
        unit, size = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        return f"{self.share:.0%} of {self.total / size:.1f} {unit}"


class TellPhase(Protocol):
    """A `TellPhase` takes the kind of a member, its name, the phase that it is in, and how much is loaded."""

    def __call__(self, kind: str, name: str, phase: str, loaded: LoadedBytes = ..., /) -> None: ...


def tell_nobody(kind: str, name: str, phase: str, loaded: LoadedBytes = LoadedBytes(), /) -> None:  # noqa: B008
    """Takes a phase and forgets it, where nobody waits for the start."""


class LoadingTeller:
    """A `LoadingTeller` tells how much of a member's weights is loaded, over all of its parts. It listens to the loader
    (`modalities.loading_progress`), which may call it thousands of times, and tells every `TELL_S` and at the end of a
    part."""

    def __init__(self, tell: Callable[[LoadedBytes], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._before = 0
        """Counts the bytes of the parts that are loaded."""
        self._told_at_s = -TELL_S

    def __call__(self, loaded: int, total: int) -> None:
        """Takes what is loaded of the present part, and what the part has."""
        now_s, is_whole = self._clock(), loaded >= total
        if is_whole or now_s - self._told_at_s >= TELL_S:
            self._told_at_s = now_s
            self._tell(LoadedBytes(self._before + loaded, self._before + total))
        if is_whole:
            self._before += total


class ToldPhase(NamedTuple):
    kind: str
    name: str
    phase: str
    loaded: LoadedBytes = LoadedBytes()


class StartState(NamedTuple):
    """A `StartState` is what people see of a start: what the cluster waits for, and how much all members that load
    weights have loaded together."""

    text: str = ""
    loaded: LoadedBytes = LoadedBytes()


class StartBoard:
    """A `StartBoard` keeps the latest phase of each member."""

    def __init__(self) -> None:
        self._name_to_phase: dict[str, ToldPhase] = {}

    def tell(self, kind: str, name: str, phase: str, loaded: LoadedBytes = LoadedBytes(), /) -> None:  # noqa: B008
        self._name_to_phase.pop(name, None)  # The member that told something last stands at the end.
        self._name_to_phase[name] = ToldPhase(kind, name, phase, loaded)

    def told(self) -> tuple[ToldPhase, ...]:
        return tuple(self._name_to_phase.values())


def with_silent(told: Iterable[ToldPhase], was_ready: Container[str]) -> list[ToldPhase]:
    """Returns the phases, with that of members which were ready once replaced: they no longer start."""
    return [each._replace(phase=SILENT) if each.name in was_ready else each for each in told]


def start_state(wanted: Mapping[str, int], ready: Iterable[ToldPhase], told: Iterable[ToldPhase]) -> StartState:
    """Returns what the cluster waits for; the text is empty if all wanted members are there. `wanted` maps kinds to
    numbers of members, and `ready` holds those that are there. A member that has failed may have told something too, so
    of those that are not there the latest count."""
    ready_names = {each.name: each.kind for each in ready}
    num_ready = Counter(ready_names.values())
    told = list(told)
    pieces, loading = [], list[LoadedBytes]()
    for kind in KINDS:
        num_wanted = wanted.get(kind, 0)
        num_left = num_wanted - num_ready[kind]
        if num_left <= 0:
            continue
        open_ones = [each for each in told if each.kind == kind and each.name not in ready_names][-num_left:]
        loading += [each.loaded for each in open_ones if each.phase == LOADING]
        phases = Counter(each.phase for each in open_ones)
        phases[STARTING] += num_left - len(open_ones)
        listed = ", ".join(f"{num} {phase}" if num_left > 1 else phase for phase, num in phases.items() if num)
        head = f"{num_left} of {num_wanted} {kind}s" if num_wanted > 1 else f"the {kind}"
        pieces.append(f"{head} ({listed})")
    loaded = LoadedBytes(sum(each.loaded for each in loading), sum(each.total for each in loading))
    return StartState(f"waiting for {', '.join(pieces)}", loaded) if pieces else StartState()
