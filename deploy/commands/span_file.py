"""Implements `weft trace ... --perfetto FILE`: writes the spans of one request, or of all requests of the last seconds,
as a file that Perfetto and chrome://tracing open.

The cluster makes the spans (`GET /weft/spans`). The module knows nothing of what is in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.commands.cluster_client import ClusterClient
from fabric.contracts import ConfigError

MAX_REQUESTS = 1000
"""The cluster gives the spans of at most this many requests at once."""


def spans_of_request(client: ClusterClient, name: str) -> Mapping[str, Any]:
    """Returns the spans of one request. Raises ConfigError if no router has its record."""
    spans, why_not = client.find("/weft/spans", request_id=name)
    if spans is None:
        raise ConfigError(why_not)
    return dict(spans)


def spans_of_seconds(
    client: ClusterClient, seconds: int, outcome: str | None, modality: str | None
) -> Mapping[str, Any]:
    """Returns the spans of the requests that came within the last seconds. Raises ConfigError if there are none."""
    chosen = {name: value for name, value in (("outcome", outcome), ("modality", modality)) if value}
    spans = dict(client.json("/weft/spans", seconds=seconds, limit=MAX_REQUESTS, **chosen))
    if not requests_in(spans):
        such = " of this kind" if chosen else ""
        raise ConfigError(f"no request{such} came within the last {seconds} s, so there is nothing to write")
    return spans


def requests_in(spans: Mapping[str, Any]) -> set[str]:
    """Returns the ids of the requests that have spans."""
    events = spans["traceEvents"]
    return {str(each["args"]["name"]) for each in events if each["ph"] == "M" and each["name"] == "thread_name"}


def write_spans(spans: Mapping[str, Any], path: Path) -> str:
    """Writes the file, in place of one that is there. Returns what to tell the user. Raises ConfigError if it can't be
    written."""
    try:
        path.write_text(json.dumps(spans))
    except OSError as error:
        raise ConfigError(f"--perfetto {path} can't be written: {error.strerror or error}") from error
    num_requests, num_spans = len(requests_in(spans)), sum(each["ph"] == "X" for each in spans["traceEvents"])
    requests = f"{num_requests:,} request{'' if num_requests == 1 else 's'}"
    return f"{path} has {num_spans:,} spans of {requests}; open it at https://ui.perfetto.dev or in chrome://tracing"
