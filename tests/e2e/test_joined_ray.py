"""Checks `weft serve` on a Ray that another process has started, with an environment that knows nothing of Weft."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from chat_media import image_part, user
from cluster_process import ClusterProcess, eventually, launched, start_cluster, wait_ready
from own_ray import PATIENCE, OwnRay, own_ray
from reference_model import ReferenceModel

from deploy.demo.build import demo_checkpoint
from deploy.process_setup import SWITCHES

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.torch]


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*PATIENCE)
        yield


@pytest.fixture(scope="module")
def foreign_ray(_patience: None) -> Iterator[tuple[str, OwnRay]]:
    """Yields the address of a separate Ray, and the Ray. It has the token of this run, and none of Weft's switches."""
    kept = ("PATH", "HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", PATIENCE[0])
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    with own_ray(environment, "--include-dashboard=false") as ray:
        address = re.search(r"ray start --address='([^']+)'", ray.said)
        assert address is not None, ray.said
        yield address[1], ray
        assert ray.is_running, f"the Ray ended by itself:\n{ray.last_words()}"


def is_clear(ray: OwnRay, cluster: str = "weft") -> bool:
    """Returns whether no replica of a cluster of that name is left on the Ray, and no directory."""
    return not ray.actors(f"ServeReplica:{cluster}:") and not ray.actors("DirectoryActor")


def sections(address: str, **ray: str) -> dict[str, Any]:
    return {"ray": {"address": address} | ray, "workers": {"replicas": 1}}


def answer(cluster: ClusterProcess, max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    messages = user("What is in this picture?", image_part(21))
    body = {"model": cluster.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    with cluster.client() as client:
        found: dict[str, Any] = client.post("/v1/chat/completions", json=body | fields).json()
    return found


def kill_at_once(cluster: ClusterProcess) -> None:
    """Kills supervisor and server with a signal that neither can handle."""
    tree = [psutil.Process(cluster.process.pid), *psutil.Process(cluster.process.pid).children(recursive=True)]
    for each in tree:
        each.suspend()
    for each in tree:
        each.kill()
    cluster.process.wait()
    for left in cluster.temp_dir.iterdir():
        shutil.rmtree(left)


def test_a_second_signal_leaves_nothing_on_the_ray(foreign_ray: tuple[str, OwnRay]) -> None:
    address, ray = foreign_ray
    with start_cluster(**sections(address), server={"port": 0, "drain_s": 3600}) as cluster:
        body = {"model": cluster.model, "messages": user("Go on"), "max_tokens": 3000, "ignore_eos": True}
        with cluster.client() as client:
            request = client.build_request("POST", "/v1/chat/completions", json=body | {"stream": True})
            response = client.send(request, stream=True)
            cluster.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{cluster.url}/health/ready").status_code == 503)
            cluster.process.send_signal(signal.SIGTERM)
            assert cluster.process.wait(timeout=60) == 0
            assert is_clear(ray), "at once: also what was being answered"
            response.close()


def test_a_signal_while_it_starts_leaves_nothing_on_the_ray(foreign_ray: tuple[str, OwnRay]) -> None:
    address, ray = foreign_ray
    with launched(**sections(address)) as starting:
        eventually(lambda: bool(ray.actors("ServeReplica:weft:")))
        assert "ready at" not in starting.log.read_text()
        starting.process.send_signal(signal.SIGTERM)
        assert starting.process.wait(timeout=60) == 0
        eventually(lambda: is_clear(ray), 10)


def assert_switches_reach_the_replicas(ray: OwnRay) -> None:
    assert not ray.process.environ().keys() & SWITCHES.keys(), "the test would prove nothing"
    for kind in ("encoder", "worker", "router"):
        (replica,) = ray.actors(f"ServeReplica:weft:{kind}")
        seen = {name: replica.environ().get(name) for name in SWITCHES}
        assert seen == SWITCHES, kind


def test_clusters_share_a_ray_by_their_names_and_the_next_removes_what_is_left(
    foreign_ray: tuple[str, OwnRay],
) -> None:
    messages = user("What is in this picture?", image_part(21))
    understood = ReferenceModel(demo_checkpoint()).answer(messages, 12)
    address, ray = foreign_ray
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start_cluster(**sections(address)))
        assert_switches_reach_the_replicas(ray)
        (choice,) = answer(first, return_token_ids=True)["choices"]
        assert choice["token_ids"] == understood.token_ids
        expected = answer(first)["choices"]
        with launched(**sections(address)) as refused:
            assert refused.process.wait(timeout=180) == 1
            assert "a cluster named 'weft' runs on this Ray already" in refused.log.read_text()
            assert "ray.cluster_name" in refused.log.read_text()
        other = stack.enter_context(start_cluster(**sections(address, cluster_name="other")))
        for cluster in (first, other):
            assert answer(cluster)["choices"] == expected
            with cluster.client() as client:
                members = client.get("/weft/members").json()["members"]
            assert sorted(member["kind"] for member in members) == ["encoder", "worker"], "its own alone"
        kill_at_once(first)
        orphans = {process.pid for process in ray.actors("ServeReplica:weft:")}
        assert orphans, "the replicas belong to Serve"
        again = stack.enter_context(launched(**sections(address)))
        again = wait_ready(again)
        assert not orphans & {process.pid for process in ray.actors("ServeReplica:weft:")}
        assert answer(again)["choices"] == answer(other)["choices"] == expected
    eventually(lambda: is_clear(ray) and is_clear(ray, "other"), 30)
    assert ray.is_running, "the Ray is not ours to end"
