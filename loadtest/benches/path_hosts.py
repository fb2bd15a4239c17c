"""Runs `weft bench path --hosts 2`: measures what a cable between two hosts adds to the path of a request, with the
demo model. The hosts are network namespaces of this machine (`namespaced_hosts`).

Each round measures one host and two hosts in turn, so that other work on the machine burdens both. The parts are a
feature that a worker reads from an encoder, and requests with a text and with a picture, through a Ray that
`weft node start` started on each host. The cable is a veth pair without delay, so the bench shows the cost of UCX's TCP
and of Ray's connections between nodes, not that of a real network.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from fabric.contracts import ConfigError, FeatureTicket
from loadtest.bench_result import Bar, BenchResult
from loadtest.benches.namespaced_hosts import NamespacedHost, namespaced_hosts, why_no_hosts

FEATURE_BYTES = 8 * 2**20
ROUNDS = 3
NUM_PULLS, NUM_REQUESTS = 30, 20
HEAD_PORT, API_PORT = 6379, 8000
START_S = 300.0
_WEFT = [sys.executable, "-P", "-m", "deploy.cli"]
Medians = dict[str, float]


def run_hosts() -> BenchResult:
    """Raises ConfigError if this machine can't make hosts."""
    if why := why_no_hosts():
        raise ConfigError(f"--hosts 2 needs network namespaces: {why}")
    with namespaced_hosts(2) as (front, back):
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | {
            "HOME": str(front.temp_dir),
            "TMPDIR": str(front.temp_dir),
            "RAY_AUTH_TOKEN": "b" * 64,
            "NIXL_LOG_LEVEL": "ERROR",
        }
        pulls: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(ROUNDS):
            for num_hosts, sink in ((1, front), (2, back)):
                pulls[num_hosts].append(_pull_ms(front, sink, environment))
        requests = _requests(front, back, environment)
    return _result({hosts: statistics.median(each) for hosts, each in pulls.items()}, requests)


def _result(pull_ms: Mapping[int, float], requests: Mapping[int, Medians]) -> BenchResult:
    rows = [["what", "one host", "two hosts", "unit"]]
    rows.append(["8 MiB feature, READ", f"{pull_ms[1]:.2f}", f"{pull_ms[2]:.2f}", "ms"])
    rows += [[name, f"{requests[1][name]:.1f}", f"{requests[2][name]:.1f}", "ms"] for name in requests[1]]
    bars = [
        Bar("8 MiB over UCX's TCP", pull_ms[2], 20.0, "ms", is_max=True),
        *(
            Bar(f"{name}: two hosts over one", requests[2][name] / requests[1][name], 1.5, "x", is_max=True)
            for name in requests[1]
        ),
    ]
    notes = [
        f"Medians of {ROUNDS} rounds, one and two hosts in turn; demo model, one request at a time, 8 tokens out.",
        "Two hosts: router and encoder on one, worker on the other, over a veth pair without delay.",
    ]
    return BenchResult(rows, bars, notes, variant="hosts")


# ------------------------------------------------------------ a feature


def _pull_ms(source: NamespacedHost, sink: NamespacedHost, environment: Mapping[str, str]) -> float:
    """Returns the median milliseconds of one read between two processes."""
    publisher = source.start(_own_command("publish"), {**environment, **_device(source, sink)})
    try:
        assert publisher.stdout is not None
        ticket = next(line for line in publisher.stdout if line.startswith("ticket ")).split()[1]
        said = sink.run(_own_command("pull", ticket), {**environment, **_device(sink, source)}, 120.0)
    finally:
        source.terminate(publisher)
    return float(said.strip().splitlines()[-1])


def _device(host: NamespacedHost, peer: NamespacedHost) -> dict[str, str]:
    return {"UCX_NET_DEVICES": "lo" if host is peer else next(iter(host.cables))}


def _own_command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "loadtest.benches.path_hosts", *words]


def publish() -> None:
    """Offers a feature, prints its ticket, and lives until it is ended."""
    from fabric.transport import NixlFeatureSource

    source = NixlFeatureSource("bench-source", 2 * FEATURE_BYTES)
    slot = source.allocate(FEATURE_BYTES)
    slot.buffer[:] = 7
    ticket = source.ticket(slot, (1, FEATURE_BYTES // 4096, 1024), "float32", 600.0)
    print("ticket", msgspec.msgpack.encode(ticket).hex(), flush=True)
    while True:
        # A source helps readers for a few seconds after it has written a ticket; in a cluster it writes many.
        source.ticket(slot, (1, FEATURE_BYTES // 4096, 1024), "float32", 600.0)
        time.sleep(1.0)


def pull(ticket_hex: str) -> None:
    """Reads the feature of a ticket several times, and prints the median milliseconds."""
    from fabric.transport import NixlFeatureSink

    ticket = msgspec.msgpack.decode(bytes.fromhex(ticket_hex), type=FeatureTicket)
    sink = NixlFeatureSink("bench-sink", 2 * FEATURE_BYTES)
    seconds = []
    for _ in range(NUM_PULLS):
        landed = sink.pull(ticket, timeout_s=30).result(timeout=60)
        seconds.append(landed.seconds)
        sink.free(landed.slot_id)
    sink.close()
    print(statistics.median(seconds) * 1000, flush=True)


# ------------------------------------------------------------ requests


def _requests(front: NamespacedHost, back: NamespacedHost, environment: Mapping[str, str]) -> dict[int, Medians]:
    """Returns the medians of requests by the number of hosts. Both clusters run for the whole time, and the rounds ask
    them in turn."""
    nodes = ((front, ["--head"], {"front": 9}), (back, ["--address", f"{front.address}:{HEAD_PORT}"], {"back": 9}))
    for host, role, resources in nodes:
        options = ["--num-cpus=2", f"--temp-dir={host.temp_dir}/r", f"--resources={json.dumps(resources)}"]
        _start(host, ["node", "start", *role, "--node-address", host.address, "--", *options], environment, "started")
    taken: dict[int, list[Medians]] = {1: [], 2: []}
    with (
        _serving(front, 1, "front", environment) as one,
        _serving(front, 2, "back", environment) as two,
    ):
        for _ in range(ROUNDS):
            for num_hosts, url in ((1, one), (2, two)):
                said = front.run(_own_command("ask", url), environment, 300.0)
                taken[num_hosts].append(json.loads(said.strip().splitlines()[-1]))
    return {
        hosts: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        for hosts, rounds in taken.items()
    }


def _start(host: NamespacedHost, words: list[str], environment: Mapping[str, str], ready: str) -> Any:
    log = host.file(host.temp_dir) / f"{words[0]}-{words[-1].strip('/').rpartition('/')[2][:20]}.log"
    with log.open("w") as output:
        process = host.start([*_WEFT, *words], environment, output)
    deadline_s = time.monotonic() + START_S
    while ready not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise ConfigError(f"weft {words[0]} did not start on {host.name}:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)
    return process


@contextmanager
def _serving(front: NamespacedHost, number: int, workers_on: str, environment: Mapping[str, str]) -> Iterator[str]:
    config: dict[str, Any] = {
        "ray": {"address": f"{front.address}:{HEAD_PORT}", "cluster_name": f"bench-{number}"},
        "server": {"host": "0.0.0.0", "port": API_PORT + number},
        "router": {"ray_resources": {"front": 1}},
        "encoders": {"ray_resources": {"front": 1}},
        "workers": {"ray_resources": {workers_on: 1}},
        "logging": {"dir": str(front.temp_dir / "logs")},
    }
    path = Path(front.temp_dir) / f"cluster-{number}.yaml"
    front.file(path).write_text(yaml.safe_dump(config))
    process = _start(front, ["serve", "--config", str(path)], environment, "ready at")
    try:
        yield f"http://{front.address}:{API_PORT + number}"
    finally:
        front.terminate(process)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(url: str) -> None:
    """Sends requests to a cluster, one at a time, and prints the median milliseconds of each kind as JSON."""
    import httpx

    from loadtest.benches.synthetic import picture

    kinds: Mapping[str, list[float]] = {"request with a text": [], "request with a picture": []}
    with httpx.Client(base_url=url, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for index in range(NUM_REQUESTS + 3):
            text = {"type": "text", "text": f"Number {time.time_ns()}"}
            for (_, seconds), parts in zip(
                kinds.items(), ([text], [_part(picture(time.time_ns() % 2**32)), text]), strict=True
            ):
                body = {"model": model, "messages": [{"role": "user", "content": parts}]}
                begun = time.monotonic()
                client.post(
                    "/v1/chat/completions", json=body | {"max_tokens": 8, "ignore_eos": True}
                ).raise_for_status()
                if index >= 3:
                    seconds.append(time.monotonic() - begun)
    print(json.dumps({name: statistics.median(each) * 1000 for name, each in kinds.items()}), flush=True)


def _part(png: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}


if __name__ == "__main__":
    {"publish": publish, "pull": pull, "ask": ask}[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]
