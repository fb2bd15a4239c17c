"""Says which keys of the config may change while a cluster serves, and merges new values of them into its config.

Ray Serve hands such values to running replicas as their `user_config`, without restarting one (ADR 88). They are limits
and policies of requests, access, and levels of logging: what a replica reads anew for each request, and nothing for
which memory, processes or weights were set up when it started. The chart sorts the keys of a config into those that may
change and all others by the same list (`helm/weft/files/live-keys.yaml`, which `live_keys_yaml` writes).

The module knows nothing of Ray, or of how a part takes a new limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from deploy.config import ClusterConfig
from deploy.config_file import flaws_of, keys_of, section_in
from fabric.contracts import ConfigError

_LOG = logging.getLogger(__name__)

SECTION_TO_LIVE_KEYS: Mapping[str, tuple[str, ...]] = {
    "server": ("max_body_bytes",),
    "router": (
        "replicas",
        "max_in_flight",
        "max_bodies_bytes",
        "max_prompt_tokens",
        "max_num_choices",
        "min_priority",
        "dispatch_timeout_s",
        "capacity_wait_s",
        "batch_wait_s",
        "tokens_per_encoder_second",
    ),
    # Serve changes the number of replicas itself; these tell routers how many are expected.
    "encoders": ("replicas",),
    "workers": ("replicas",),
    "media": (
        "limit_mm_per_prompt",
        "sampling",
        "fps",
        "max_frames",
        "max_video_tokens",
        "num_pooled_frames",
        "keep_fraction",
        "on_encode_failure",
        "encode_timeout_ms",
    ),
    # Not the sizes of compiled grammars: workers take these when they start, and routers must check by the same.
    "limits": (
        "max_messages",
        "max_content_parts",
        "max_media_items",
        "max_stop_strings",
        "max_stop_chars",
        "max_stop_token_ids",
        "max_prompt_logprobs",
        "max_grammar_bytes",
        "max_schema_depth",
        "max_grammar_choices",
        "max_pattern_bytes",
        "grammar_timeout_s",
    ),
    "tracing": (
        "endpoint",
        "sample_ratio",
        "follow_clients",
        "max_requests_per_s",
        "headers_file",
        "timeout_s",
    ),
    "access": ("keys_file", "operator_key_digests", "allowed_hosts", "console"),
    "logging": ("level", "levels"),
}
"""Maps a section to its keys that may change while the cluster serves."""
NAMED_TO_LIVE_KEYS: Mapping[str, tuple[str, ...]] = {"more_workers": ("replicas",)}
"""Does the same for a section whose entries have names, and counts for each entry."""
LIVE_SECTIONS = ("tenants",)
"""Names the sections that may change as a whole. A new value replaces the former one."""


def live_values(config: ClusterConfig) -> dict[str, Any]:
    """Returns the values of all keys that may change, as plain data that JSON can hold."""
    data = config.model_dump(mode="json", by_alias=True)
    found = {section: {key: data[section][key] for key in keys} for section, keys in SECTION_TO_LIVE_KEYS.items()}
    for section, keys in NAMED_TO_LIVE_KEYS.items():
        found[section] = {name: {key: entry[key] for key in keys} for name, entry in data[section].items()}
    return found | {section: data[section] for section in LIVE_SECTIONS}


def with_live_values(config: ClusterConfig, values: object) -> ClusterConfig:
    """Returns the config with new values of some keys. Raises ConfigError that names every key that is unknown, that
    can't change while the cluster serves, or whose value is wrong."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"a change of the config must be a mapping of sections, not {type(values).__name__}")
    data = config.model_dump(mode="json", by_alias=True)
    refused: list[str] = []
    for section, changes in values.items():
        if section in LIVE_SECTIONS:
            data[section] = changes
        elif not isinstance(changes, Mapping):
            refused.append(f"{section}: " + ("must be a mapping of keys" if section in data else "the key is unknown"))
        elif section in NAMED_TO_LIVE_KEYS:
            refused += _change_named(str(section), data[section], changes)
        else:
            live = SECTION_TO_LIVE_KEYS.get(str(section), ())
            refused += [f"{section}.{key}: {_why_not(str(section), str(key))}" for key in changes if key not in live]
            data.setdefault(section, {}).update(changes)
    if refused:
        raise ConfigError("\n".join(refused))
    try:
        changed = ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(flaws_of(error))) from error
    if (changed.encoders.replicas == 0) != (config.encoders.replicas == 0):
        raise ConfigError("encoders.replicas: a cluster gets its first encoder, or loses its last, only by a restart")
    return changed


def _change_named(section: str, entries: dict[str, dict[str, Any]], changes: Mapping[Any, Any]) -> list[str]:
    """Changes live keys of the named entries of a section. Returns why changes are refused."""
    refused = []
    for name, values in changes.items():
        if name not in entries:
            refused.append(f"{section}.{name}: an entry comes only by a restart")
        elif not isinstance(values, Mapping):
            refused.append(f"{section}.{name}: must be a mapping of keys")
        else:
            unknown = [key for key in values if key not in NAMED_TO_LIVE_KEYS[section]]
            refused += [f"{section}.{name}.{key}: {_why_not(section, str(key))}" for key in unknown]
            entries[name].update(values)
    return refused


def _why_not(section: str, key: str) -> str:
    fields = keys_of(ClusterConfig)
    inner = section_in(fields[section].annotation) if section in fields else None
    if inner is None or key not in keys_of(inner):
        return "the key is unknown"
    return "the key can't change while the cluster serves; it belongs where replicas start again with a new value"


class LiveConfig:
    """A `LiveConfig` is the config of one replica, whose live values change. Values that can't be used never come into
    force."""

    def __init__(self, config: ClusterConfig) -> None:
        """`config` holds all other keys, and the live values of which a change says nothing."""
        self._base = self.current = config
        self.is_set = False
        """Tells whether values were taken already."""
        self.flaw = ""
        """Says what was wrong with the last change, or is empty."""

    def change(self, values: object, apply: Callable[[ClusterConfig, ClusterConfig], None]) -> bool:
        """Takes new values, and calls `apply` with the config until now and the new one. Returns False if the values
        can't be used; the former ones then stay in force, and the log says why. There are no former ones the first
        time, and a router with nothing but defaults would have no keys: then it raises the ConfigError."""
        try:
            config = with_live_values(self._base, values)
            apply(self.current, config)
        except ConfigError as error:
            self.flaw = error.message
            if not self.is_set:
                raise
            _LOG.error("the change of the config can't be used, so the former values stay: %s", error.message)
            return False
        self.current, self.flaw, self.is_set = config, "", True
        return True


def live_keys_yaml() -> str:
    """Returns the list of keys in the form in which the chart reads it."""
    text = yaml.safe_dump(
        {
            "sections": list(LIVE_SECTIONS),
            "keys": {name: list(keys) for name, keys in SECTION_TO_LIVE_KEYS.items()},
            "named": {name: list(keys) for name, keys in NAMED_TO_LIVE_KEYS.items()},
        },
        sort_keys=False,
    )
    return "# Written from deploy/live_config.py, which says what these lists are; a test holds both equal.\n" + text
