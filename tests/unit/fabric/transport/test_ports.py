"""Tests the choice of ports: a range holds what it says, every port of it is used before it counts as full, and IPv6
addresses are written in brackets."""

from __future__ import annotations

import contextlib
import errno
import socket

import pytest

from fabric.contracts import ConfigError
from fabric.transport import PortRange, bind_free, join_host_port, listen


def test_a_range_holds_both_ends() -> None:
    ports = PortRange.parse(" 21000 - 21003 ")
    assert [port in ports for port in (20999, 21000, 21003, 21004)] == [False, True, True, False]
    assert (len(ports), str(ports)) == (4, "21000-21003")
    assert sorted(ports.from_somewhere()) == [21000, 21001, 21002, 21003]


@pytest.mark.parametrize("text", ["21000", "21003-21000", "0-100", "70000-70001", "a-b", "21000-21000-21000"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a range of ports"):
        PortRange.parse(text)


def test_listeners_take_every_port_of_a_range_and_the_next_is_told_that_it_is_full() -> None:
    with contextlib.ExitStack() as stack:
        found = free_run(3)
        ports = PortRange(found, found + 2)
        taken = [stack.enter_context(listen("127.0.0.1", ports)).getsockname()[1] for _ in range(3)]
        assert sorted(taken) == sorted(ports.from_somewhere())
        with pytest.raises(ConfigError, match=rf"every port of {ports} is taken.*network\.ports"):
            listen("127.0.0.1", ports)


def test_another_error_than_a_taken_port_is_passed_on_at_once() -> None:
    tried: list[int] = []

    def bind(port: int) -> None:
        tried.append(port)
        raise OSError(errno.EADDRNOTAVAIL, "no such address")

    with pytest.raises(OSError, match="no such address"):
        bind_free(PortRange(21000, 21999), bind)
    assert len(tried) == 1


def test_without_a_range_the_system_chooses() -> None:
    assert bind_free(None, lambda port: port) == 0
    with listen("::1") as sock:
        assert sock.family == socket.AF_INET6
        assert sock.getsockname()[1] > 0


def test_hosts_and_ports_are_written_so_that_they_can_be_told_apart() -> None:
    assert [join_host_port(host, 80) for host in ("10.0.0.1", "fd00::1")] == ["10.0.0.1:80", "[fd00::1]:80"]


def free_run(length: int) -> int:
    """Returns the first of some adjacent ports of the loopback on which nothing listens."""
    for first in range(24000, 29000, length):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + length):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")
