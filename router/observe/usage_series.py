"""Counts what each API key of each tenant uses, for bills and for quotas. The names of tenants and keys come from the
config and the file of keys. That file may change while a router runs, so the names are cut off at `MAX_NAMES`. The
module knows nothing of how usage comes about.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

LABELS = ("tenant", "key")
MAX_NAMES = 1024
"""A label shows this many different names, because a series stays in the memory of the router and of Prometheus, also
when it is used no more."""
OTHER = "other"
"""Stands for every name beyond `MAX_NAMES`."""


class BoundedNames:
    """Holds the names that labels show: the first `MAX_NAMES` as they are, and `other` for all that come later."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._names: set[tuple[str, ...]] = set()

    def of(self, name: str) -> str:
        """Returns what a label shows for a name."""
        return name if self.takes(name) else OTHER

    def takes(self, *names: str) -> bool:
        """Returns whether labels show these names, which belong together."""
        if names not in self._names:
            if len(self._names) >= self._max_names:
                return False
            self._names.add(names)
        return True


class UsageSeries:
    """Holds the counters `weft_router_usage_*`, with the labels `tenant` and `key` (`none` for requests without a
    key)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the counters at `registry`."""
        self._names = BoundedNames()
        self.requests = _counter(registry, "requests", "Requests of a key that were admitted and have ended.")
        self.prompt_tokens = _counter(registry, "prompt_tokens", "Prompt tokens of a key, cached ones included.")
        self.cached_tokens = _counter(
            registry, "cached_tokens", "Prompt tokens of a key that were found in a KV cache."
        )
        self.completion_tokens = _counter(registry, "completion_tokens", "Tokens that were generated for a key.")
        self.media_s = _counter(
            registry,
            "media_seconds",
            "Length of the sounds and videos of a key, by modality. A sound track belongs to its video.",
            "modality",
        )
        self.encoder_s = _counter(registry, "encoder_seconds", "Time of encoders' forward passes for a key.")

    def observe(self, tenant: str, key: str, num_prompt: int, num_cached: int, num_generated: int) -> None:
        """Counts a request that has ended, with the tokens of its prompt, how many of them were cached, and the tokens
        of its answer."""
        shown = self._shown(tenant, key)
        self.requests.labels(*shown).inc()
        self.prompt_tokens.labels(*shown).inc(num_prompt)
        self.cached_tokens.labels(*shown).inc(num_cached)
        self.completion_tokens.labels(*shown).inc(num_generated)

    def observe_media(self, tenant: str, key: str, modality_to_s: Mapping[str, float]) -> None:
        """Counts the seconds of the media of a request whose prompt was made."""
        for modality, seconds in modality_to_s.items():
            self.media_s.labels(*self._shown(tenant, key), modality).inc(seconds)

    def observe_encoding(self, tenant: str, key: str, seconds: float) -> None:
        """Counts the time of forward passes of encoders for a key."""
        self.encoder_s.labels(*self._shown(tenant, key)).inc(seconds)

    def _shown(self, tenant: str, key: str) -> tuple[str, str]:
        return (tenant, key) if self._names.takes(tenant, key) else (OTHER, OTHER)


def _counter(registry: CollectorRegistry, name: str, text: str, *further: str) -> Counter:
    return Counter(f"weft_router_usage_{name}", text, (*LABELS, *further), registry=registry)
