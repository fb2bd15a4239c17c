"""Tests which connections a server ends when too many bytes wait for its clients."""

from __future__ import annotations

from typing import cast

from deploy.http_limits import HttpLimits
from deploy.http_protocol import ConnectionGuard, GuardedProtocol


class Waiting:
    """Is a connection for whose client so many bytes wait; it is its own transport too."""

    def __init__(self, num_unsent: int) -> None:
        self.num_unsent = num_unsent
        self.is_aborted = False
        self.transport = self

    def check(self, now: float) -> None:
        assert now == 5.0

    def abort(self) -> None:
        self.is_aborted = True


def test_the_connections_for_which_most_waits_are_closed_until_the_rest_fits() -> None:
    guard = ConnectionGuard(HttpLimits(max_unsent_bytes=100))
    connections = [Waiting(num_unsent) for num_unsent in (0, 40, 90, 30, 10)]
    guard.connections = dict.fromkeys(cast(list[GuardedProtocol], connections))
    guard.check(5.0)
    assert [each.num_unsent for each in connections if each.is_aborted] == [90]
    guard.connections.pop(cast(GuardedProtocol, connections[2]))
    guard.check(5.0)
    assert sum(each.is_aborted for each in connections) == 1, "the rest fits"
