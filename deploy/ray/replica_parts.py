"""Holds what the replicas of all deployments do alike: they find their id, their cluster and their place, serve their
series, and change the levels of their logs. The module knows nothing of what a replica serves.
"""

from __future__ import annotations

import asyncio

import ray
from ray import serve

from deploy import compose
from deploy.config import ClusterConfig
from deploy.logs import set_levels
from deploy.node_metrics import Exposition, MemberMetrics, NodePort
from deploy.ray.directory import keep_directory
from fabric.contracts import MemberId, MemberPlace


def replica_id() -> MemberId:
    """Returns Serve's unique id of this replica, by which `PinnedRequestRouter` finds it."""
    return MemberId(serve.get_replica_context().replica_id.unique_id)


def member_metrics(config: ClusterConfig, member_id: MemberId, address: str, exposition: Exposition) -> MemberMetrics:
    """Returns what serves the series of a member, and perhaps those of its machine, at this address."""
    node = NodePort(config.network.metrics_port, config.ray.cluster_name)
    return MemberMetrics(member_id, exposition, address, node, compose.port_range(config))


async def enter_cluster(config: ClusterConfig, has_server: bool) -> None:
    """Makes sure that the cluster of this replica has a directory, if no server owns one."""
    if not has_server:
        application = serve.get_replica_context().app_name
        await asyncio.to_thread(keep_directory, config.ray.cluster_name, application)


def change_levels(before: ClusterConfig, config: ClusterConfig) -> None:
    set_levels(config.logging, before.logging)


async def find_member_place(config: ClusterConfig, kind: str) -> MemberPlace:
    """Returns what is known of the place of a member in this process, with the labels of its Ray node."""
    labels = ray.get_runtime_context().get_node_labels()
    return await asyncio.to_thread(compose.member_place, config, kind, labels)
