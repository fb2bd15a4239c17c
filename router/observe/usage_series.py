"""Counts what each API key of each tenant uses, for bills and for quotas. The names of tenants and keys come from the
config and the file of keys, so there are no more series than those have entries. The module knows nothing of how usage
comes about.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

LABELS = ("tenant", "key")


class UsageSeries:
    """Holds the counters `weft_router_usage_*`, with the labels `tenant` and `key` (`none` for requests without a
    key)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers the counters at `registry`."""
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
        self.requests.labels(tenant, key).inc()
        self.prompt_tokens.labels(tenant, key).inc(num_prompt)
        self.cached_tokens.labels(tenant, key).inc(num_cached)
        self.completion_tokens.labels(tenant, key).inc(num_generated)

    def observe_media(self, tenant: str, key: str, modality_to_s: Mapping[str, float]) -> None:
        """Counts the seconds of the media of a request whose prompt was made."""
        for modality, seconds in modality_to_s.items():
            self.media_s.labels(tenant, key, modality).inc(seconds)


def _counter(registry: CollectorRegistry, name: str, text: str, *further: str) -> Counter:
    return Counter(f"weft_router_usage_{name}", text, (*LABELS, *further), registry=registry)
