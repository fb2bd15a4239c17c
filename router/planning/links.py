"""Derives the class of the link between two members from where they run. The planner costs links by class and never
filters by it: a fitted alpha + beta * bytes says what a topology is worth, and a name does not."""

from __future__ import annotations

from enum import Enum


class LinkClass(Enum):
    SAME_PROCESS = "same_process"
    SAME_HOST = "same_host"
    NETWORK = "network"


def link_class(host_a: str, host_b: str) -> LinkClass:
    """Returns the class of the link between two hosts. `Member.host` is `machine`, or `machine/process` for members
    that share a process with others."""
    if host_a == host_b:
        return LinkClass.SAME_PROCESS if "/" in host_a else LinkClass.SAME_HOST
    return LinkClass.SAME_HOST if machine(host_a) == machine(host_b) else LinkClass.NETWORK


def machine(host: str) -> str:
    """Returns the machine of a `Member.host`."""
    return host.partition("/")[0]
