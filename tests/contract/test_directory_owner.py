"""Checks who owns the directory of a cluster, without starting Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from deploy.ray import directory
from deploy.ray.directory import Heartbeat, check_unclaimed
from fabric.contracts import ConfigError, Member, MemberId, Unavailable


class FakeCall:
    """A `FakeCall` is a remote method: its answer stands in place of a reference to it."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def remote(self, *_: object) -> object:
        return self._answer


def found(monkeypatch: pytest.MonkeyPatch, application: str | None) -> None:
    actor = SimpleNamespace(application=FakeCall(application))
    monkeypatch.setattr(directory, "directory_actor", lambda cluster: actor)
    monkeypatch.setattr(directory.ray, "get", lambda reference, timeout: reference)


def test_a_name_that_a_server_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)
    with pytest.raises(ConfigError, match="a server runs a cluster named 'weft'"):
        check_unclaimed("weft")


def test_a_directory_of_an_application_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, "weft")
    check_unclaimed("weft")


def test_a_name_without_a_directory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(cluster: str) -> Any:
        raise ValueError(cluster)

    monkeypatch.setattr(directory, "directory_actor", missing)
    check_unclaimed("weft")


@pytest.mark.parametrize("names", [["SERVE_REPLICA::weft#router#a"], []])
def test_an_application_may_run_while_a_replica_has_a_name(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    asked: list[str] = []

    def replicas(application: str) -> list[str]:
        asked.append(application)
        return names

    monkeypatch.setattr(directory, "replica_names", replicas)
    assert directory._may_run("weft") is bool(names)
    assert asked == ["weft"]

    def silent(application: str) -> list[str]:
        raise RayActorError

    monkeypatch.setattr(directory, "replica_names", silent)
    assert directory._may_run("weft"), "who can't be asked may be there"


async def test_a_member_whose_directory_was_removed_must_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "RETRY_S", 0.0)
    member = Member(MemberId("worker-0"), "worker", "local://worker-0", "host", epoch=1)
    heartbeat = Heartbeat("weft", member, lambda members: None)
    heartbeat.check()

    class Dead:
        """A `Dead` directory has ended for good."""

        def remote(self, *_: object) -> object:
            raise ActorDiedError

    heartbeat._actor = SimpleNamespace(heartbeat=Dead())
    running = directory.asyncio.ensure_future(heartbeat._run())
    while not heartbeat._is_directory_dead:
        await directory.asyncio.sleep(0)
    running.cancel()
    with pytest.raises(Unavailable, match="must start again"):
        heartbeat.check()
