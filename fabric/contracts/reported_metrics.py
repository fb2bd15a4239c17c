"""Declares the metrics of numbers: a field of a struct says with `gauge` or `counter` how operators see it.

`ProcessStats` holds the numbers that members of every kind have. The module knows nothing of Prometheus, or of what a
number means.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

# ---------------------------------------------------------------- metrics of fields


class ReportedMetric(NamedTuple):
    """A `ReportedMetric` says how a number of a report appears in a router's metrics."""

    kind: Literal["gauge", "counter"]
    name: str
    """Names the metric in full, but without the suffix `_total`, which Prometheus adds to counters."""
    text: str
    """Explains the metric to operators, in `/metrics` and in the documentation."""


def gauge(name: str, text: str) -> ReportedMetric:
    """Returns the metric of a number that rises and falls."""
    return ReportedMetric("gauge", name, text)


def counter(name: str, text: str) -> ReportedMetric:
    """Returns the metric of a number that only grows while the member lives."""
    return ReportedMetric("counter", name, text)


LABELLED_AS_MEMBER = "labelled as a member"
"""Marks a struct in a report whose metrics have other labels than those of the report, so that `metrics_of` leaves them
out."""


@cache
def metrics_of(struct: type[msgspec.Struct]) -> tuple[tuple[str, ReportedMetric], ...]:
    """Returns each metric that the struct or a struct in one of its fields declares, after the path of its field, for
    example `engine.steps`."""
    found: list[tuple[str, ReportedMetric]] = []
    for field, hint in get_type_hints(struct, include_extras=True).items():
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            found += [(f"{field}.{path}", metric) for path, metric in metrics_of(hint)]
        declared = getattr(hint, "__metadata__", ())
        found += [(field, metric) for metric in declared if isinstance(metric, ReportedMetric)]
    return tuple(found)


# ---------------------------------------------------------------- all members


class ProcessStats(msgspec.Struct, array_like=True):
    """Holds what the process of a member takes of its machine. The metrics have the labels `member` and `kind`, because
    members of every kind have them."""

    cpu_s: Annotated[
        float,
        counter(
            "weft_process_cpu_seconds",
            "Processor time of a member's process, in user and system mode; helper processes and other ranks are not "
            "counted.",
        ),
    ] = 0.0
    resident_bytes: Annotated[
        int, gauge("weft_process_resident_memory_bytes", "Memory of a member's process that is in RAM.")
    ] = 0
    num_open_files: Annotated[int, gauge("weft_process_open_fds", "Open files and sockets of a member's process.")] = 0
    max_open_files: Annotated[
        int, gauge("weft_process_max_fds", "Most files and sockets that a member's process may have open.")
    ] = 0
