"""Names the scenarios of a load test: which kinds of requests a cluster gets, and how they arrive.

A `LoadScenario` is a name and the simulator's `WorkloadSpec`, so that what locust sends to a cluster is what `weft
simulate` can send to a simulated one. `scenario_requests` draws its requests for one sender. Several senders together
make the load of the scenario: each takes its share of the rate, and draws from a seed of its own.

The module knows nothing of how a request is written or sent.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from loadtest.simulator import SimRequest, WorkloadSpec, generate

ENDLESS = 10**9
"""A sender draws at most this many requests, which is more than a load test ever sends."""
DOCUMENT_MIXES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "mixed-text": MappingProxyType({"text": 1.0}),
        "mixed-image": MappingProxyType({"text": 0.9, "image": 0.1}),
        "mixed-video": MappingProxyType({"text": 0.8, "image": 0.1, "video-30f": 0.1}),
        "mixed-media": MappingProxyType({"text": 0.5, "image": 0.3, "video-30f": 0.2}),
        "mixed-only-video": MappingProxyType({"video-30f": 1.0}),
    }
)
"""Maps a name to each row of the table of mixed workloads in the OmniConnector article (docs/references.md)."""


@dataclass(frozen=True, slots=True)
class LoadScenario:
    """A `LoadScenario` is a mix of requests with a name."""

    name: str
    summary: str
    """Says in a sentence what the scenario is for."""
    kind_to_share: Mapping[str, float]
    """Maps each kind of request to its share, as `WorkloadSpec` does."""
    settings: Mapping[str, float | bool | int] = field(default_factory=lambda: MappingProxyType({}))
    """Holds further fields of the `WorkloadSpec`."""

    def spec(self, rate: float, **changed: float) -> WorkloadSpec:
        """Returns the workload at this rate, in requests per second. `changed` replaces fields. Raises ConfigError for
        numbers without a meaning."""
        spec = WorkloadSpec(ENDLESS, rate, self.kind_to_share, **{**DEFAULTS, **self.settings})  # type: ignore[arg-type]
        return replace(spec, **{name: value for name, value in changed.items() if value is not None})  # type: ignore[arg-type]


DEFAULTS: Mapping[str, float | bool | int] = MappingProxyType({"mean_prompt": 64.0, "mean_output": 32.0})
"""Holds what a scenario does not say. Prompts and answers are short, so that a small machine can run every scenario."""

SCENARIOS: Mapping[str, LoadScenario] = MappingProxyType(
    {
        one.name: one
        for one in (
            LoadScenario("text", "Texts alone.", {"text": 1.0}),
            LoadScenario("image", "Each request has one picture.", {"image": 1.0}),
            LoadScenario("multi-image", "Each request has two to four pictures.", {"image*2": 0.5, "image*4": 0.5}),
            LoadScenario("video", "Each request has one video of 30 frames.", {"video-30f": 1.0}),
            LoadScenario("audio", "Each request has one sound of 5 s.", {"audio-5s": 1.0}),
            LoadScenario(
                "mixed",
                "Texts, pictures, videos and sounds together.",
                {"text": 0.55, "image": 0.25, "video-30f": 0.1, "audio-5s": 0.1},
            ),
            LoadScenario(
                "multi-turn",
                "Conversations of four turns on average, whose earlier turns workers may still have in their caches.",
                {"text": 0.6, "image": 0.4},
                {"mean_turns": 4.0, "think_s": 2.0},
            ),
            LoadScenario(
                "shared-pictures",
                "Four in five pictures are among 16 popular ones, whose features encoders may still have.",
                {"image": 1.0},
                {"shared_media": 0.8, "num_shared": 16},
            ),
            LoadScenario(
                "bursts",
                "Requests come in bursts: the times between them vary four times as much as at random.",
                {"text": 0.7, "image": 0.3},
                {"burstiness": 4.0},
            ),
            *(
                LoadScenario(name, "A row of the table of mixed workloads in the OmniConnector article.", shares)
                for name, shares in DOCUMENT_MIXES.items()
            ),
        )
    }
)


def scenario_requests(spec: WorkloadSpec, seed: int, num_senders: int = 1, sender: str = "0") -> Iterator[SimRequest]:
    """Yields the requests of the sender with this name, one of `num_senders`, in the order of their arrival and without
    end. Random arrivals of all senders together are again random arrivals, at the whole rate; bursts are those of each
    sender."""
    own = random.Random(f"{seed}/{sender}").getrandbits(32)
    return generate(replace(spec, rate=spec.rate / num_senders), own)
