"""Tests what is decided about the nodes of a Ray before a cluster is deployed on it, and what the messages name."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("ray")

from deploy.config import ClusterConfig
from deploy.ray import nodes
from deploy.ray.nodes import NodeEndpoint, NodeProbe, RayNode, asked_resources, hosting_nodes, peers_of, unreached
from deploy.ray.runtime import reached_host, unreached_hint
from deploy.ray.serve_app import rank_bundles, vllm_reservation
from fabric.contracts import ConfigError

HEAD = RayNode("0", "head", "10.0.0.1", {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0})
GPU = RayNode("1", "gpu-a", "10.0.0.2", {"CPU": 8.0, "GPU": 8.0, "weft_worker": 8.0})
OTHER = RayNode("2", "gpu-b", "10.0.0.3", {"CPU": 8.0, "GPU": 8.0, "weft_encoder": 8.0})
CUDA = {"device": "cuda", "gpus_per_replica": 1}


def config(**sections: object) -> ClusterConfig:
    return ClusterConfig.model_validate(sections)


def test_a_replica_that_asks_for_nothing_may_run_on_every_node() -> None:
    asked = asked_resources(config())
    assert hosting_nodes([HEAD, GPU, OTHER], asked) == [HEAD, GPU, OTHER]


def test_only_nodes_with_what_some_part_asks_for_are_looked_at() -> None:
    asked = asked_resources(
        config(
            router={"ray_resources": {"weft_encoder": 0.1}},
            encoders=CUDA | {"ray_resources": {"weft_encoder": 1}},
            workers=CUDA | {"ray_resources": {"weft_worker": 1}, "cpus_per_replica": 2},
        )
    )
    parts = [{"weft_worker": 1.0, "GPU": 1.0, "CPU": 2.0}, {"weft_encoder": 1.0, "GPU": 1.0, "CPU": 0.0}]
    assert asked[1:] == parts
    assert hosting_nodes([HEAD, GPU, OTHER], asked) == [GPU, OTHER]


def test_a_part_without_a_node_is_refused_with_what_the_nodes_have() -> None:
    asked = asked_resources(config(workers={"ray_resources": {"weft_worker": 9}}))
    with pytest.raises(ConfigError, match=r"\{weft_worker: 9\}") as caught:
        hosting_nodes([HEAD, GPU], asked)
    assert "gpu-a (10.0.0.2) has {CPU: 8, GPU: 8, weft_worker: 8}" in caught.value.message
    assert "memory" not in caught.value.message


def test_a_worker_with_vllm_asks_one_node_for_what_all_its_ranks_take() -> None:
    """vLLM starts ranks as processes of the replica; those of Weft's own engine may be on several nodes."""
    sizes = CUDA | {"tensor_parallel": 2, "cpus_per_replica": 0.5, "ray_resources": {"weft_worker": 1}}
    with_vllm = sizes | {"engine": "vllm", "vllm": {"pipeline_parallel_size": 4}}
    both = config(workers=sizes, more_workers={"fast": with_vllm})
    _, own, fast, _ = asked = asked_resources(both)
    assert own == {"weft_worker": 1.0, "GPU": 1.0, "CPU": 0.5}
    assert fast == {"weft_worker": 8.0, "GPU": 8.0, "CPU": 4.0}
    one_rank = {"num_cpus": 0.5, "num_gpus": 1, "resources": {"weft_worker": 1}, "runtime_env": {}}
    reserved = vllm_reservation(both.of_pool("fast"), one_rank)
    assert {"GPU": reserved["num_gpus"], "CPU": reserved["num_cpus"], **reserved["resources"]} == fast
    assert hosting_nodes([HEAD, GPU, OTHER], asked) == [HEAD, GPU, OTHER]
    half = RayNode("1", "gpu-a", "10.0.0.2", {"CPU": 8.0, "GPU": 4.0, "weft_worker": 8.0})
    with pytest.raises(ConfigError, match=r"no node of the Ray has the resources \{weft_worker: 8, GPU: 8, CPU: 4\}"):
        hosting_nodes([HEAD, half, half, OTHER], asked)


def test_every_rank_takes_the_custom_resources_of_a_worker() -> None:
    workers = {"tensor_parallel": 2, "ray_resources": {"rack": 0.5}}
    assert [bundle["rack"] for bundle in rank_bundles(config(workers=workers))] == [0.5, 0.5]


@pytest.mark.parametrize("num_nodes", [2, 3, 40])
def test_every_node_is_tried_by_as_many_others(num_nodes: int) -> None:
    tried = [peer for index in range(num_nodes) for peer in peers_of(index, num_nodes)]
    each = min(num_nodes - 1, nodes.MAX_PEERS)
    assert sorted(tried) == sorted(list(range(num_nodes)) * each)


def test_a_probe_finds_out_which_endpoints_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    probe = NodeProbe(config())
    own, gone = probe.endpoint(), NodeEndpoint("127.0.0.1", "lo", closed)
    assert own[:2] == ("127.0.0.1", "lo")
    assert probe.unreachable([own, gone]) == [(gone, "Connection refused")]


def test_a_message_about_nodes_that_do_not_meet_names_the_addresses() -> None:
    ends = [NodeEndpoint("10.0.0.1", "eth0", 21000), NodeEndpoint("172.17.0.1", "docker0", 21001)]
    lines = unreached([HEAD, GPU], ends, [[(ends[1], "no answer within 5 s")], []])
    assert lines[1:3] == [
        "node head (10.0.0.1) can't connect to 172.17.0.1:21001 (docker0) of node gpu-a (10.0.0.2): "
        "no answer within 5 s",
        "the addresses are 10.0.0.1 (eth0) of head (10.0.0.1), 172.17.0.1 (docker0) of gpu-a (10.0.0.2)",
    ]
    assert "network.interface" in lines[3]
    assert unreached([HEAD, GPU], ends, [[], []]) == []


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SERVER_VERSION", "9.9")
    with pytest.raises(ConfigError, match=r"node .*has Weft .* but the server has Weft 9\.9"):
        nodes.this_node(config())
    assert "the server has Weft 9.9" in nodes._examination()("9.9", b"")


def test_a_node_says_what_is_wrong_with_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    joined = config(ray={"address": "x:1"}, network={"interface": "ib9"})
    assert nodes.flaw_of_this_node(joined).startswith("no address of the node fits network.interface (ib9)")
    assert nodes.flaw_of_this_node(config(ray={"address": "x:1"})) == ""


def test_a_router_that_only_its_own_machine_reaches_is_told() -> None:
    assert unreached_hint("127.0.0.1", "127.0.0.1") == ""
    assert "set server.host to 0.0.0.0" in unreached_hint("127.0.0.1", "203.0.113.9")
    assert unreached_hint("0.0.0.0", "203.0.113.9") == ""
    assert [reached_host(listened, "10.0.0.9") for listened in ("0.0.0.0", "::", "127.0.0.1")] == [
        "10.0.0.9",
        "10.0.0.9",
        "127.0.0.1",
    ]
