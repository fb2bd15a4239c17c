"""Lists every limit that a cluster sets on one request, with its effective value and the key that sets it, for
`weft check`. A limit that no key sets is listed with its value too. The module enforces nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from pydantic import BaseModel

from deploy.config import ClusterConfig
from deploy.http_limits import HttpLimits
from deploy.tls import TlsFiles, check_tls
from encoder_pool import encoder_config
from fabric.contracts import ConfigError, ManualClock
from modalities import probing
from router.api import FIXED_LIMITS
from router.fetch import ANSWER_LIMITS, MAX_URL_CHARS
from router.router_config import MODALITY_TO_ENCODE_TIMEOUT_MS, OTHER_ENCODE_TIMEOUT_MS

DEFAULT_HTTP = HttpLimits()
SECTION_TO_KEYS = {
    "server": (
        "max_body_bytes",
        "max_header_bytes",
        "max_connections",
        "header_timeout_s",
        "body_timeout_s",
        "min_body_bytes_per_s",
        "write_timeout_s",
    ),
    "router": (
        "max_in_flight",
        "max_bodies_bytes",
        "max_prompt_tokens",
        "max_num_choices",
        "min_priority",
        "capacity_wait_s",
        "dispatch_timeout_s",
    ),
    "media": (
        "limit_mm_per_prompt",
        "image_embeds",
        "max_bytes_per_item",
        "max_image_pixels",
        "max_video_pixels",
        "max_video_seconds",
        "max_video_frames",
        "max_frames",
        "max_video_tokens",
        "max_audio_seconds",
        "max_audio_bytes",
        "max_decoded_bytes",
        "named_media_bytes",
        "probe_cpu_s",
        "probe_timeout_s",
        "probe_memory_bytes",
        "encode_timeout_ms",
    ),
    "media.fetch": (
        "max_redirects",
        "max_request_bytes",
        "connect_timeout_s",
        "read_timeout_s",
        "total_timeout_s",
        "wait_s",
        "max_concurrent",
        "max_waiting",
        "in_flight_bytes",
        "memory_bytes",
    ),
    "encoders": ("decode_cpu_s", "decode_timeout_s", "decode_memory_bytes", "max_decode_bytes"),
    "limits": (),
}
"""Maps a section to its keys that limit requests; an empty entry stands for all keys."""
KEY_TO_DEFAULTS: dict[str, Mapping[str, float]] = {
    "media.probe_cpu_s": probing.MODALITY_TO_CPU_S | {"other": probing.OTHER_CPU_S},
    "media.encode_timeout_ms": MODALITY_TO_ENCODE_TIMEOUT_MS | {"other": OTHER_ENCODE_TIMEOUT_MS},
    "encoders.decode_cpu_s": encoder_config.MODALITY_TO_CPU_S | {"other": encoder_config.OTHER_CPU_S},
    "encoders.decode_timeout_s": encoder_config.MODALITY_TO_TIMEOUT_S | {"other": encoder_config.OTHER_TIMEOUT_S},
}
"""Maps a key to what holds for the modalities that it does not name."""
HTTP_LIMITS = {
    "max_headers": "headers of a request",
    "max_target_bytes": "bytes of a path and its query",
    "max_small_chunks": "small chunks of a body",
    "large_chunk_bytes": "bytes of a body for each further chunk",
    "max_extra_bytes": "bytes of a body's chunk extensions and trailers",
    "max_pipelined": "pipelined requests of a connection",
    "max_unsent_bytes": "bytes that wait for all clients of a server",
    "linger_s": "seconds to read a refusal",
}
"""Maps the fields of `HttpLimits` that no key sets to what they limit."""


class LimitRow(NamedTuple):
    """A `LimitRow` is one limit of the table."""

    key: str
    """Names the key with its section; in parentheses it is a limit that no key sets."""
    value: str


def limit_rows(config: ClusterConfig) -> Iterator[LimitRow]:
    """Yields every limit on a request, in the order of the config's sections, and then those of tenants."""
    for name, keys in SECTION_TO_KEYS.items():
        section: BaseModel = attrgetter(name)(config)
        for key in keys or type(section).model_fields:
            value = getattr(section, key)
            defaults = KEY_TO_DEFAULTS.get(f"{name}.{key}")
            yield LimitRow(f"{name}.{key}", _shown(key, value if defaults is None else {**defaults, **value}))
    http = {name: getattr(DEFAULT_HTTP, field) for field, name in HTTP_LIMITS.items()}
    for name, most in (http | FIXED_LIMITS | {"characters of a URL": MAX_URL_CHARS} | ANSWER_LIMITS).items():
        yield LimitRow(f"({name})", _shown("", most))
    for name, tenant in config.tenants.items():
        for key in ("max_in_flight", "requests_per_minute", "tokens_per_minute", "media_seconds_per_minute"):
            value = getattr(tenant, key)
            if value is not None:
                yield LimitRow(f"tenants.{name}.{key}", _shown(key, value))


def _shown(key: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {most:,g}" for name, most in value.items()) or "the model's own"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "taken" if value else "refused"
    assert isinstance(value, int | float)
    if "bytes" in key and value >= 2**20:
        return f"{value:,} ({value / 2**20:,.5g} MiB)"
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def limit_lines(config: ClusterConfig) -> list[str]:
    """Returns the table as lines of text."""
    rows = list(limit_rows(config))
    width = max(len(row.key) for row in rows)
    return [
        "limits of one request (docs/access.md explains them):",
        *(f"  {key:<{width}}  {value}" for key, value in rows),
    ]


def check_files(config: ClusterConfig) -> tuple[list[str], list[str]]:
    """Reads the files of keys and certificates that the config names. Returns what they hold, as lines, and what is
    wrong with them. A relative path is looked up from the current directory, as `weft serve` does."""
    from deploy.compose import tenants
    from router.run import KeyFile

    found: list[str] = []
    problems: list[str] = []
    if config.access.keys_file is not None:
        try:
            keys = KeyFile(config.access.keys_file, tenants(config), ManualClock()).keys
            num_operators = sum(key.caller.is_operator for key in keys)
            found.append(f"the file of keys has {len(keys)} keys, {num_operators} of them of operators")
        except ConfigError as error:
            problems.append(f"access.keys_file: {error.message}")
    if (files := TlsFiles.of(config.server)) is not None:
        try:
            found.append(f"the certificate is valid until {check_tls(files)}")
        except ConfigError as error:
            problems.append(error.message)
    return found, problems
