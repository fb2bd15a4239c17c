"""Runs a cluster on two hosts that only a cable joins: router and encoder on the first, the worker on the second. The
hosts are network namespaces of this machine (`loadtest.benches.namespaced_hosts`), with a Ray that `weft node start`
started on each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_process import eventually

from deploy.commands.ray_node import FIRST_PORT, NUM_PORTS, PROCESS_PORTS
from fabric.transport import PortRange
from loadtest.benches.namespaced_hosts import NamespacedHost, namespaced_hosts, why_no_hosts

WHY_NOT = why_no_hosts()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.nixl,
    pytest.mark.torch,
    pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT),
]

WEFT = [sys.executable, "-P", "-m", "deploy.cli"]
PORTS = PortRange(21000, 21099)
METRICS_PORT = 21200
API_PORT = 8000
CAPACITY_WAIT_S = 4.0
PLACES = {
    "router": {"ray_resources": {"front": 1}, "capacity_wait_s": CAPACITY_WAIT_S},
    "encoders": {"ray_resources": {"front": 1}},
    "workers": {"ray_resources": {"back": 1}},
}


@dataclass
class TwoHosts:
    """Holds the hosts, whose Rays run, and the folder of configs and logs on this machine."""

    front: NamespacedHost
    back: NamespacedHost
    folder: Path
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.front.address}:{API_PORT}"

    @contextlib.contextmanager
    def serving(self, **sections: Any) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """Runs `weft serve` on the first host. Yields its process and its output."""
        config, log = self.folder / "cluster.yaml", self.folder / "serve.log"
        ray = {"address": f"{self.front.address}:{FIRST_PORT}"}
        logs = {"dir": str(self.front.temp_dir / "logs")}
        shared: dict[str, Any] = {"ray": ray, "logging": logs, "server": {"host": "0.0.0.0", "port": API_PORT}}
        config.write_text(yaml.safe_dump(shared | PLACES | sections))
        with log.open("w") as output:
            process = self.front.start([*WEFT, "serve", "--config", str(config)], self.environment, output)
        try:
            yield process, log
        finally:
            self.front.terminate(process)
            process.wait(timeout=120)

    def get(self, path: str) -> Any:
        code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"
        return self.front.run(
            [sys.executable, "-c", code, path if "://" in path else self.url + path], self.environment
        )


def started(log: Path, process: subprocess.Popen[str], text: str) -> None:
    eventually(lambda: text in log.read_text() or process.poll() is not None, 240)
    assert process.poll() is None, log.read_text()[-4000:]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with namespaced_hosts(2) as (front, back):
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | {
            "HOME": str(front.temp_dir),
            "TMPDIR": str(front.temp_dir),
            "RAY_AUTH_TOKEN": "5" * 64,
            "PYTHONDONTWRITEBYTECODE": "1",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
        }
        for number, host in enumerate((front, back)):
            # This network is of no use: its cable ends on the same host.
            host.run(["ip", "link", "add", "lan0", "type", "veth", "peer", "name", "lan1"], environment)
            host.run(["ip", "address", "add", f"192.168.{number}.1/24", "dev", "lan0"], environment)
            host.run(["ip", "link", "set", "lan0", "up"], environment)
            role = ["--address", f"{front.address}:{FIRST_PORT}"] if number else ["--head"]
            resources = {"back": 1} if number else {"front": 2}
            log = folder / f"{host.name}.log"
            options = ["--num-cpus=2", f"--temp-dir={host.temp_dir}/r", f"--resources={json.dumps(resources)}"]
            command = [*WEFT, "node", "start", *role, "--node-address", host.address, "--", *options]
            with log.open("w") as output:
                process = host.start(command, environment, output)
            started(log, process, "Ray runtime started")
        yield TwoHosts(front, back, folder, environment)


def test_hosts_that_do_not_meet_are_named_with_the_addresses_that_were_tried(hosts: TwoHosts) -> None:
    with hosts.serving(network={"interface": "lan0"}) as (process, log):
        assert process.wait(timeout=120) == 1
    said = log.read_text()
    assert "do not reach each other" in said
    assert re.search(r"node host-a \(10\.\S+\) can't connect to 192\.168\.1\.1:\d+ \(lan0\) of node host-b", said)
    assert re.search(r"node host-b \(10\.\S+\) can't connect to 192\.168\.0\.1:\d+ \(lan0\) of node host-a", said)
    assert "network.interface or network.subnet" in said
    assert "Traceback" not in said


def test_a_node_without_the_interface_is_named_with_its_addresses(hosts: TwoHosts) -> None:
    with hosts.serving(network={"subnet": "192.168.1.0/24"}) as (process, log):
        assert process.wait(timeout=120) == 1
    said = log.read_text()
    assert re.search(r"node host-a \(\S+\): no address of the node fits network.subnet", said)
    assert "192.168.0.1 (lan0)" in said
    assert "host-b" not in said, "its address fits"


@pytest.fixture(scope="module")
def serving(hosts: TwoHosts) -> Iterator[TwoHosts]:
    with hosts.serving(network={"ports": str(PORTS), "metrics_port": METRICS_PORT, "subnet": "10.77.0.0/16"}) as (
        process,
        log,
    ):
        started(log, process, "ready at")
        assert f"ready at {hosts.url}" in log.read_text(), "the address of the router's node"
        yield hosts


def listeners(host: NamespacedHost, environment: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """Returns the command, the address and the port of everything that listens on a host."""
    code = (
        "import json, psutil\n"
        "found = []\n"
        "for process in psutil.process_iter():\n"
        "    for each in process.net_connections('tcp'):\n"
        "        if each.status == psutil.CONN_LISTEN:\n"
        "            found.append((' '.join(process.cmdline()), each.laddr.ip, each.laddr.port))\n"
        "print(json.dumps(found))\n"
    )
    return [(name, ip, port) for name, ip, port in json.loads(host.run([sys.executable, "-c", code], environment))]


def metric(text: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}(\{{| )", line))


def worker_metrics(serving: TwoHosts) -> str:
    targets = json.loads(serving.get("/weft/prometheus-targets"))
    (address,) = {each["targets"][0] for each in targets if each["targets"][0].startswith(f"{serving.back.address}:")}
    return str(serving.get(f"http://{address}/metrics"))


def sent_over_connections(host: NamespacedHost, pid_name: str, peer: str, environment: Mapping[str, str]) -> int:
    """Returns the most bytes that one connection of a process to a peer has sent."""
    lines = host.run(["ss", "-tnpiOH", "state", "established"], environment).splitlines()
    found = [line for line in lines if pid_name in line and re.search(rf"{re.escape(peer)}\]?:\d+", line)]
    return max((int(match[1]) for line in found if (match := re.search(r"bytes_sent:(\d+)", line))), default=0)


def test_the_directory_is_on_the_host_of_the_server(serving: TwoHosts) -> None:
    find = [sys.executable, "-c", "import psutil; print([process.cmdline() for process in psutil.process_iter()])"]
    assert "ray::DirectoryActor" in serving.front.run(find, serving.environment)
    assert "ray::DirectoryActor" not in serving.back.run(find, serving.environment)


def test_the_demos_questions_are_answered_and_features_travel_over_ucx_tcp(serving: TwoHosts) -> None:
    before, moved = metric(worker_metrics(serving), "weft_worker_transfer_bytes_total"), serving.back.received_bytes()
    said = serving.front.run([*WEFT, "demo", "--url", serving.url], serving.environment, 300)
    assert "10 of 10 answers are right" in said
    members = json.loads(serving.get("/weft/members"))["members"]
    assert {each["kind"]: each["host"] for each in members} == {
        "encoder": serving.front.address,
        "worker": serving.back.address,
    }
    pulled = metric(worker_metrics(serving), "weft_worker_transfer_bytes_total") - before
    assert pulled > 100_000, "twelve media"
    assert serving.back.received_bytes() - moved > pulled, "the hosts share no memory, so features came by the cable"
    encoder = next(each["pid"] for each in members if each["kind"] == "encoder")
    sent = sent_over_connections(serving.front, f"pid={encoder},", serving.back.address, serving.environment)
    assert sent > 0.9 * pulled, "one connection of the encoder carried them: UCX's, because messages are small"


RAY_PROCESSES = ("ray/core/src", "ray/dashboard", "ray/autoscaler", "ray.util.client", "ray::Dashboard", "ray::Runtime")


def test_everything_listens_on_a_configured_port(serving: TwoHosts) -> None:
    ray_ports = PortRange(FIRST_PORT, FIRST_PORT + NUM_PORTS - 1)
    num_members = 0
    for host in (serving.front, serving.back):
        found = listeners(host, serving.environment)
        outside = []
        for name, ip, port in found:
            is_own = ip in (host.address, "127.0.0.1") or port == API_PORT
            if name.startswith("ray::ServeReplica:weft:") and is_own:
                num_members += port in PORTS
                if port not in PORTS and port not in (API_PORT, METRICS_PORT):
                    outside.append((name, ip, port))
            elif port not in ray_ports and port not in PROCESS_PORTS:
                outside.append((name, ip, port))
        # Serve gives each replica a server that only other Serve deployments would call; nothing of Weft does.
        serves = [each for each in outside if each[0].startswith("ray::ServeReplica:weft:") and each[1] == "::"]
        assert len(serves) == sum(name.startswith("ray::ServeReplica:weft:") for name in {name for name, *_ in found})
        assert [each for each in outside if each not in serves] == []
        assert [port for _, _, port in found].count(METRICS_PORT) == 1
    assert num_members >= 5, "a port for messages of each member, and one for features of encoder and worker"


def ask(serving: TwoHosts, timeout_s: float = 150.0, **fields: Any) -> dict[str, Any]:
    """Sends a request from the first host. Returns its status, and its body as text."""
    body = {"model": "weft-demo", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]} | fields
    code = (
        "import httpx, json, sys\n"
        "answer = httpx.post(sys.argv[1] + '/v1/chat/completions', json=json.loads(sys.argv[2]), timeout=120)\n"
        "print(json.dumps({'status': answer.status_code, 'retry': answer.headers.get('retry-after'), "
        "'body': answer.text}))\n"
    )
    said = serving.front.run(
        [sys.executable, "-c", code, serving.url, json.dumps(body)], serving.environment, timeout_s
    )
    return dict(json.loads(said.strip().splitlines()[-1]))


def error_code(answer: dict[str, Any]) -> str:
    return str(json.loads(answer["body"])["error"]["code"])


def test_when_the_workers_host_goes_away_requests_wait_and_are_refused_until_it_is_back(serving: TwoHosts) -> None:
    assert ask(serving)["status"] == 200
    stream = serving.folder / "stream.txt"
    with stream.open("w") as output:
        code = (
            "import httpx, json, sys\n"
            "with httpx.stream('POST', sys.argv[1] + '/v1/chat/completions', json=json.loads(sys.argv[2]), "
            "timeout=120) as answer:\n"
            "    for line in answer.iter_lines(): print(line, flush=True)\n"
        )
        body = {"model": "weft-demo", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        body["messages"] = [{"role": "user", "content": "Go on"}]
        running = serving.front.start(
            [sys.executable, "-c", code, serving.url, json.dumps(body)], serving.environment, output
        )
        eventually(lambda: stream.read_text().count("data:") > 5)
        serving.front.cut()
    begun = time.monotonic()
    lost = ask(serving)
    # Which of these it is depends on whether Serve, the directory or the call notices first.
    assert (lost["status"], error_code(lost) in ("worker_lost", "target_gone", "no_capacity")) == (503, True), lost
    refused = ask(serving)  # By now the router has noticed that the worker is silent.
    assert (refused["status"], error_code(refused)) == (503, "no_capacity"), refused
    assert refused["retry"] is not None
    running.wait(timeout=120)
    assert '"error"' in stream.read_text(), "what was being answered ends with an error, and does not hang"
    assert time.monotonic() - begun < 60, "Weft noticed it, and not only Ray, which takes a minute"
    serving.front.plug_in()
    eventually(lambda: ask(serving)["status"] == 200, 120)
