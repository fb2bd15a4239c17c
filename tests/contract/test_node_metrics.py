"""Tests the scrape endpoint of a machine: one member answers for all of them, and another takes its place."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import deploy.node_metrics
from deploy.node_metrics import CLUSTER_HEADER, MemberMetrics, NodePort
from deploy.testing import settled
from fabric.contracts import ConfigError, EngineStats, FeatureStats, Member, MemberId, WorkerReport
from fabric.transport import PortRange
from router.observe import report_exposition

HOST, WAIT_S = "127.0.0.1", 20.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def series_of(name: str, num_running: int = 1) -> bytes:
    stats = EngineStats(num_running=num_running)
    return report_exposition(WorkerReport(MemberId(name), 1, 1, (), stats, FeatureStats()))


class Machine:
    """A `Machine` holds members of one machine, each with its own servers, as the directory lists them."""

    def __init__(self, stack: AsyncExitStack, port: int, cluster: str = "weft") -> None:
        self.stack, self.node = stack, NodePort(port, cluster)
        self.ports: PortRange | None = None
        self.members: dict[str, Member] = {}
        self.metrics: dict[str, MemberMetrics] = {}

    async def add(self, name: str, exposition: Callable[[], bytes] | None = None) -> MemberMetrics:
        metrics = MemberMetrics(MemberId(name), exposition or (lambda: series_of(name)), HOST, self.node, self.ports)
        address = await metrics.start()
        self.stack.push_async_callback(self.end, name)
        self.metrics[name] = metrics
        self.members[name] = Member(MemberId(name), "worker", "tcp://x", "h", 1, http_address=address)
        self.publish()
        return metrics

    def publish(self) -> None:
        for each in self.metrics.values():
            each.update_members(self.members.values())

    async def end(self, name: str) -> None:
        """Ends the servers of a member. The directory still lists it."""
        if name in self.metrics:
            await self.metrics.pop(name).stop()

    async def scrape(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns `weft_worker_num_running` and `weft_member_up`, each by member. Fails if a series stands twice."""
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            answer = await client.get(f"http://{HOST}:{self.node.port}/metrics")
        assert answer.status_code == 200
        assert answer.headers[CLUSTER_HEADER] == self.node.cluster
        families = list(text_string_to_metric_families(answer.text))
        assert len({family.name for family in families}) == len(families)
        samples = [sample for family in families for sample in family.samples]
        assert len({(each.name, *sorted(each.labels.items())) for each in samples}) == len(samples)
        return (
            {each.labels["worker"]: each.value for each in samples if each.name == "weft_worker_num_running"},
            {each.labels["member"]: each.value for each in samples if each.name == "weft_member_up"},
        )


@asynccontextmanager
async def machine(port: int = 0, cluster: str = "weft") -> AsyncIterator[Machine]:
    async with AsyncExitStack() as stack:
        yield Machine(stack, port or free_port(), cluster)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.node_metrics, "RETRY_S", 0.05)


async def owner_of(subject: Machine) -> str:
    """Returns the member that has the port, as soon as one has it."""
    async with asyncio.timeout(WAIT_S):
        while True:
            owners = [name for name, each in subject.metrics.items() if each.has_port]
            assert len(owners) <= 1
            if owners:
                return owners[0]
            await asyncio.sleep(0.01)


async def test_one_member_answers_for_all_of_its_machine() -> None:
    async with machine() as subject:
        for number in range(3):
            await subject.add(f"w{number}", lambda number=number: series_of(f"w{number}", number + 1))
        await owner_of(subject)
        running, up = await subject.scrape()
        assert running == {"w0": 1.0, "w1": 2.0, "w2": 3.0}
        assert up == {"w0": 1.0, "w1": 1.0, "w2": 1.0}


async def test_members_of_other_machines_are_not_asked() -> None:
    async with machine() as subject:
        await subject.add("here")
        await owner_of(subject)
        subject.members["there"] = Member(MemberId("there"), "worker", "tcp://x", "h", 1, http_address="10.9.9.9:1")
        subject.members["mute"] = Member(MemberId("mute"), "worker", "tcp://x", "h", 1)
        subject.publish()
        assert await subject.scrape() == ({"here": 1.0}, {"here": 1.0})


async def test_another_member_takes_the_place_of_one_that_ends() -> None:
    async with machine() as subject:
        for number in range(4):
            await subject.add(f"w{number}")
        for _ in range(3):
            first = await owner_of(subject)
            await subject.end(first)
            second = await owner_of(subject)
            assert second != first
            running, up = await subject.scrape()
            assert set(running) == set(subject.metrics), "the directory still lists the member that ended"
            assert {name for name, is_up in up.items() if is_up} == set(subject.metrics)
            assert up[first] == 0.0
            del subject.members[first]
            subject.publish()
        running, up = await subject.scrape()
        assert len(running) == len(up) == 1, "what left the directory has no series"


async def test_a_member_that_does_not_answer_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.node_metrics, "ANSWER_S", 0.3)
    async with machine() as subject:
        await subject.add("well")
        await owner_of(subject)
        with socket.socket() as deaf, socket.socket() as closed:
            deaf.bind((HOST, 0))
            deaf.listen()
            closed.bind((HOST, 0))
            for name, sock in (("deaf", deaf), ("closed", closed)):
                address = f"{HOST}:{sock.getsockname()[1]}"
                subject.members[name] = Member(MemberId(name), "worker", "tcp://x", "h", 1, http_address=address)
            subject.publish()
            began_s = time.monotonic()
            running, up = await subject.scrape()
            assert time.monotonic() - began_s < WAIT_S / 2
        assert running == {"well": 1.0}
        assert up == {"well": 1.0, "deaf": 0.0, "closed": 0.0}


async def test_a_member_whose_series_fail_does_not_spoil_those_of_others() -> None:
    def broken() -> bytes:
        raise RuntimeError("no numbers")

    async with machine() as subject:
        await subject.add("well")
        await owner_of(subject)
        await subject.add("broken", broken)
        running, up = await subject.scrape()
        assert (running, up) == ({"well": 1.0}, {"well": 1.0, "broken": 0.0})


async def test_a_port_of_another_cluster_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with machine() as first, machine(first.node.port, "other") as second:
        await first.add("a")
        await owner_of(first)
        await first.add("b")
        await second.add("c")

        def warned() -> list[str]:
            return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]

        await settled(lambda: bool(warned()), WAIT_S)
        (message,) = warned()  # A member of the same cluster is silent.
        assert "network.metrics_port" in message
        assert str(first.node.port) in message
        assert set((await first.scrape())[0]) == {"a", "b"}
        await first.end("a")
        await first.end("b")
        assert await owner_of(second) == "c", "the port is free again"


async def test_a_member_answers_a_scrape_and_nothing_else() -> None:
    async with machine() as subject, httpx.AsyncClient(timeout=WAIT_S) as client:
        await subject.add("w")
        address = f"http://{subject.members['w'].http_address}"
        answer = await client.get(f"{address}/metrics")
        assert (answer.status_code, answer.headers["content-type"]) == (
            200,
            "text/plain; version=0.0.4; charset=utf-8",
        )
        assert 'weft_worker_num_running{worker="w"} 1.0' in answer.text.splitlines()
        assert (await client.get(address)).status_code == 404
        assert (await client.post(f"{address}/metrics")).status_code == 405


async def test_without_a_port_a_machine_has_no_endpoint() -> None:
    async with AsyncExitStack() as stack:
        subject = Machine(stack, 0)
        metrics = await subject.add("w")
        assert metrics._serving is None
        assert not metrics.has_port


async def test_members_listen_within_the_range_of_ports() -> None:
    first = free_port()
    async with AsyncExitStack() as stack:
        subject = Machine(stack, 0)
        subject.ports = PortRange(first, first)
        await subject.add("w0")
        assert subject.members["w0"].http_address == f"{HOST}:{first}"
        with pytest.raises(ConfigError, match="every port"):
            await subject.add("w1")
