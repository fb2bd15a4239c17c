"""Checks calls to a named replica on real Ray Serve, in the four situations that made it hang before the guards (they
are listed as traps in the design)."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deploy.ray.ray_pools import PinnedRequestRouter, RayWorkerPool, call_pinned
from fabric.contracts import EncoderLost, GenerateRequest, InvalidMedia, Member, MemberId, TargetGone, WorkerLost

pytestmark = pytest.mark.ray

# Replicas cannot import a test module, so its classes travel by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

PINNED = RequestRouterConfig(request_router_class=PinnedRequestRouter, request_router_kwargs={"unknown_grace_s": 2.0})
ACTOR = {"num_cpus": 0}


class Target:
    """A `Target` is a replica that gives its name and that a test can hold."""

    def __init__(self) -> None:
        self._released = asyncio.Event()

    def who(self) -> str:
        return serve.get_replica_context().replica_id.unique_id

    def generate(self, request: str) -> str:
        return f"{request} of {self.who()}"

    def pid(self) -> int:
        return os.getpid()

    async def hold(self) -> str:
        await self._released.wait()
        self._released.clear()
        return self.who()

    def release(self) -> None:
        self._released.set()

    def refuse(self) -> None:
        raise InvalidMedia("broken", param="messages.0.content.1")


class SlowToReturn(Target):
    """A `SlowToReturn` is a target that starts only while the file `gate` exists."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        while not os.path.exists(gate):
            time.sleep(0.05)


class Caller:
    """Makes two pinned calls to one deployment inside one request. The other deployment only belongs to the same
    application."""

    def __init__(self, targets: DeploymentHandle, others: DeploymentHandle) -> None:
        self._targets, self._others = targets, others

    async def both(self, first: str, second: str) -> list[str]:
        calls = [call_pinned(self._targets.who, MemberId(name), EncoderLost) for name in (first, second)]
        return await asyncio.wait_for(asyncio.gather(*calls), timeout=20)


@pytest.fixture(scope="module")
def handles() -> Iterator[tuple[DeploymentHandle, DeploymentHandle]]:
    with tempfile.TemporaryDirectory(prefix="weft-ray-") as folder:
        ray.init(
            address="local",
            namespace="weft-test",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        serve.start(proxy_location="Disabled")
        options: dict[str, Any] = {"ray_actor_options": ACTOR, "request_router_config": PINNED}
        targets = serve.deployment(Target, num_replicas=2, max_ongoing_requests=2, **options).bind()
        others = serve.deployment(Target, name="Other", num_replicas=1, **options).bind()
        caller = serve.run(
            serve.deployment(Caller, ray_actor_options=ACTOR).bind(targets, others), name="pins", route_prefix=None
        )
        yield caller, serve.get_deployment_handle("Target", "pins")
        serve.shutdown()
        ray.shutdown()


def names(targets: DeploymentHandle) -> list[str]:
    """Returns the unique ids of both replicas; it asks for them without a pin."""
    found: set[str] = set()
    while len(found) < 2:
        found.add(targets.who.remote().result(timeout_s=20))
    return sorted(found)


def call(targets: DeploymentHandle, method: str, name: str, timeout_s: float = 20) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(call_pinned(getattr(targets, method), MemberId(name), EncoderLost), timeout_s)

    return asyncio.run(run())


def test_a_pin_reaches_the_replica_that_it_names(handles: tuple[DeploymentHandle, DeploymentHandle]) -> None:
    _, targets = handles
    for name in names(targets) * 5:
        assert call(targets, "who", name) == name


def test_one_request_reaches_two_replicas_at_once(handles: tuple[DeploymentHandle, DeploymentHandle]) -> None:
    caller, targets = handles
    first, second = names(targets)
    assert caller.both.remote(first, second).result(timeout_s=30) == [first, second]


def test_a_call_goes_to_the_deployment_of_the_workers_pool(handles: tuple[DeploymentHandle, DeploymentHandle]) -> None:
    """The record of a worker names its pool. The other deployment does not know the replica."""
    _, targets = handles
    others = serve.get_deployment_handle("Other", "pins")
    pool = RayWorkerPool({"main": targets, "more": others})
    (other,), own = {others.who.remote().result(timeout_s=20)}, names(targets)
    name_to_pool = dict.fromkeys(own, "main") | {other: "more", "stray": "none"}
    pool.update_members([Member(MemberId(name), "worker", "a", "h", 1, pool=in_) for name, in_ in name_to_pool.items()])

    def generate(name: str) -> Any:
        async def run() -> Any:
            return await asyncio.wait_for(pool.generate(MemberId(name), cast("GenerateRequest", "the call")), 20)

        return asyncio.run(run())

    for name in [*own, other] * 2:
        assert generate(name) == f"the call of {name}"
    with pytest.raises(WorkerLost, match="belongs to the pool 'none', which this cluster does not have"):
        generate("stray")
    pool.update_members([])
    with pytest.raises(TargetGone, match=f"the worker {other} has left the cluster"):
        generate(other)


def test_a_pin_that_nobody_ever_saw_fails_after_a_moment(handles: tuple[DeploymentHandle, DeploymentHandle]) -> None:
    """The short wait is for replicas that have just started; it delays no other call."""
    _, targets = handles
    with pytest.raises(TargetGone, match="the replica nobody has left the cluster"):
        call(targets, "who", "nobody")
    first, _ = names(targets)
    assert call(targets, "who", first) == first


def test_an_error_of_the_tree_keeps_its_class_and_param(handles: tuple[DeploymentHandle, DeploymentHandle]) -> None:
    _, targets = handles
    with pytest.raises(InvalidMedia) as caught:
        call(targets, "refuse", names(targets)[0])
    assert (caught.value.message, caught.value.param) == ("broken", "messages.0.content.1")


def test_a_full_replica_does_not_block_the_other(handles: tuple[DeploymentHandle, DeploymentHandle]) -> None:
    _, targets = handles
    full, free = names(targets)

    async def run() -> None:
        pin = MemberId(full)
        held = [asyncio.create_task(call_pinned(targets.hold, pin, EncoderLost)) for _ in range(2)]
        queued = asyncio.create_task(call_pinned(targets.hold, pin, EncoderLost))
        try:
            others = [call_pinned(targets.who, MemberId(free), EncoderLost) for _ in range(4)]
            assert await asyncio.wait_for(asyncio.gather(*others), 20) == [free] * 4
            assert not queued.done()
        finally:
            for task in (queued, *held):
                task.cancel()
            ended = await asyncio.gather(queued, *held, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in ended)
        # The cancellation frees the slots, so the full replica answers again.
        assert await asyncio.wait_for(call_pinned(targets.who, pin, EncoderLost), 20) == full

    asyncio.run(run())


def test_a_killed_replica_is_lost_then_gone(handles: tuple[DeploymentHandle, DeploymentHandle]) -> None:
    """A call in progress raises `EncoderLost`. Afterwards Serve starts another replica under another name."""
    _, targets = handles
    victim, survivor = names(targets)
    pid = call(targets, "pid", victim)

    async def run() -> None:
        held = asyncio.create_task(call_pinned(targets.hold, MemberId(victim), EncoderLost))
        await asyncio.wait_for(call_pinned(targets.who, MemberId(victim), EncoderLost), 20)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EncoderLost):
            await asyncio.wait_for(held, 30)

    asyncio.run(run())
    assert call(targets, "who", survivor) == survivor
    with pytest.raises((TargetGone, EncoderLost)):
        call(targets, "who", victim)


def test_no_replica_at_all_fails_cleanly(
    handles: tuple[DeploymentHandle, DeploymentHandle], tmp_path: pathlib.Path
) -> None:
    """A call waits for no other replica, neither while the only one is being replaced nor when the deployment is gone:
    the 20 s of `call` are for a busy machine, and reaching them is a failure. The replacement can't start, so a call
    that waits for it reaches them."""
    _, targets = handles
    gate = tmp_path / "gate"
    gate.touch()
    lone = serve.run(
        serve.deployment(SlowToReturn, name="Lone", ray_actor_options=ACTOR, request_router_config=PINNED).bind(
            str(gate)
        ),
        name="lone",
        route_prefix=None,
    )
    name = lone.who.remote().result(timeout_s=20)
    gate.unlink()
    os.kill(call(lone, "pid", name), signal.SIGKILL)
    for _ in range(3):  # The first call may find that the replica has died; the others find no replica.
        with pytest.raises((TargetGone, EncoderLost), match=name):
            call(lone, "who", name)
    gate.touch()
    serve.delete("lone")
    with pytest.raises(EncoderLost, match=f"{name} can't be reached"):
        call(lone, "who", name)
    first, _ = names(targets)
    assert call(targets, "who", first) == first
