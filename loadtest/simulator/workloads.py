"""Makes the requests of a simulation: arrivals, prompts, media, outputs, conversations and shared pictures.

A `WorkloadSpec` describes a mix; `generate` yields its requests in order of arrival. Requests depend on the spec and on
the random seed alone, so every policy meets the same ones. Arrivals are open-loop: a later turn of a conversation comes
at a fixed time after the earlier one, however long that one took. `closed_loop` describes the other kind, in which a
number of clients send one request after the other. The module knows nothing of members or of traces.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType

from fabric.contracts import ConfigError
from loadtest.simulator.sim_requests import Part, SimRequest

MEAN_OUTPUT = 200
_LARGEST_TOKEN = 1 << 30
QUESTION = (7, 24)
"""This text follows the media of a prompt; it is the same in all requests."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Describes a mix of requests. Raises ConfigError for numbers without a meaning."""

    num_requests: int
    rate: float
    """Counts the requests per second, later turns included."""
    kind_to_share: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"text": 1.0}))
    """Maps each kind to its share. A kind is `text`, a medium of the cost table, or several media: `image*4`,
    `video-30f+audio-30s`."""
    burstiness: float = 1.0
    """Holds the coefficient of variation of the times between arrivals: 1 is a Poisson process, more is bursts."""
    mean_prompt: float = 800.0
    """Holds the mean number of text tokens ahead of the media, or of the whole text."""
    prompt_spread: float = 0.8
    """Holds the standard deviation of the logarithm of that number; 0 makes all prompts equal."""
    mean_output: float = MEAN_OUTPUT
    fixed_output: bool = False
    """Says that every output has the mean length; otherwise lengths are geometric."""
    system_tokens: int = 0
    """Counts the tokens that all prompts begin with."""
    mean_turns: float = 1.0
    """Holds the mean number of requests of a conversation; each turn repeats the earlier ones with their answers."""
    think_s: float = 20.0
    """Holds the mean time between two turns of a conversation."""
    shared_media: float = 0.0
    """Holds the share of media whose content other requests have too."""
    num_shared: int = 64
    """Counts these contents; the k-th is 1/k times as popular as the first."""

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.rate <= 0 or self.mean_turns < 1 or self.burstiness <= 0:
            raise ConfigError("a workload needs at least one request, a positive rate, and at least one turn")
        if not self.kind_to_share or min(self.kind_to_share.values()) < 0 or sum(self.kind_to_share.values()) <= 0:
            raise ConfigError(f"the shares of a mix must be positive, not {dict(self.kind_to_share)}")


def parse_mix(text: str) -> dict[str, float]:
    """Returns the shares of a mix as the command line has it: `text=0.8,image=0.15,video-30f=0.05`."""
    shares: dict[str, float] = {}
    for entry in text.split(","):
        kind, _, share = entry.partition("=")
        try:
            shares[kind.strip()] = float(share)
        except ValueError as error:
            raise ConfigError(f"{entry!r} is no share of a mix; write for example text=0.8,image=0.2") from error
    return shares


def media_of(kind: str) -> list[str]:
    """Returns the names of the media of a kind: none for `text`, four for `image*4`, one each for
    `video-30f+audio-30s`."""
    if kind == "text":
        return []
    names: list[str] = []
    for part in kind.split("+"):
        name, _, count = part.partition("*")
        names += [name] * (int(count) if count else 1)
    return names


def generate(spec: WorkloadSpec, seed: int) -> Iterator[SimRequest]:
    """Yields the requests of the spec in order of arrival. The same spec and seed give the same requests."""
    rng = random.Random(seed)
    kinds, shares = list(spec.kind_to_share), list(spec.kind_to_share.values())
    system: tuple[Part, ...] = ((1 << 30, spec.system_tokens),) if spec.system_tokens else ()
    shape = 1.0 / spec.burstiness**2
    mean_gap_s = spec.mean_turns / spec.rate
    next_s, num_sessions, number = 0.0, 0, 0
    turns: list[tuple[float, int, str, tuple[Part, ...]]] = []
    """Holds the next turns of conversations as (time, session, kind, what was said before)."""
    while number < spec.num_requests:
        if not turns or next_s <= turns[0][0]:
            at_s, said, session = next_s, system, num_sessions
            kind = rng.choices(kinds, shares)[0]
            num_sessions += 1
            next_s += rng.gammavariate(shape, mean_gap_s / shape)
        else:
            at_s, session, kind, said = heappop(turns)
        is_first = said == system
        parts = (*said, *_turn_parts(spec, rng, kind if is_first else "text"))
        num_output, first_output = _num_output(spec, rng), rng.randrange(_LARGEST_TOKEN)
        yield SimRequest(number, at_s, kind, parts, num_output, first_output, session)
        number += 1
        if rng.random() < 1.0 - 1.0 / spec.mean_turns:
            answered = (*parts, (first_output, num_output))
            heappush(turns, (at_s + rng.expovariate(1.0 / spec.think_s), session, kind, answered))


def _turn_parts(spec: WorkloadSpec, rng: random.Random, kind: str) -> tuple[Part, ...]:
    parts: list[Part] = [(rng.randrange(_LARGEST_TOKEN), _num_prompt(spec, rng))]
    media = media_of(kind)
    parts += [(name, _content(spec, rng)) for name in media]
    return (*parts, QUESTION) if media else tuple(parts)


def _num_prompt(spec: WorkloadSpec, rng: random.Random) -> int:
    spread = spec.prompt_spread
    factor = rng.lognormvariate(-0.5 * spread * spread, spread) if spread else 1.0
    return max(1, round(spec.mean_prompt * factor))


def _num_output(spec: WorkloadSpec, rng: random.Random) -> int:
    if spec.fixed_output:
        return max(1, round(spec.mean_output))
    return max(1, round(rng.expovariate(1.0 / spec.mean_output)))


def _content(spec: WorkloadSpec, rng: random.Random) -> str:
    if spec.shared_media and rng.random() < spec.shared_media:
        ranks = range(1, spec.num_shared + 1)
        return f"shared{rng.choices(ranks, [1.0 / rank for rank in ranks])[0]}"
    return f"{rng.getrandbits(64):016x}"
