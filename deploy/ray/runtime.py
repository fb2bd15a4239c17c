"""Starts Ray and Serve for `weft serve`, waits until the cluster is ready, and stops what it started.

`run_cluster` runs a cluster for the duration of a `with` block, on a Ray of its own or on one that is there already.
Replicas belong to Serve and outlive the process that started them. So on a Ray that goes on running, a cluster that was
ended at once leaves its Serve application behind; `remove_left` removes it, and so does the next cluster with that
name. The directory needs no removal: it belongs to the process that serves and ends with it (`directory.claim_name`).

The module knows nothing of what is served.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import shutil
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deploy import compose
from deploy.config import ClusterConfig
from deploy.http_server import check_port
from deploy.network import local_interfaces
from deploy.process_setup import set_local_switches, show_logs_as_written, show_token
from deploy.sizing import refuse_if_too_small
from deploy.start_phases import StartState
from deploy.tls import TlsFiles, check_tls
from deploy.vllm_worker import check_environment, check_options_there, silence_hint
from fabric.contracts import ConfigError, Unavailable
from fabric.transport import check_installed, join_host_port, remove_inboxes_without_owner

logger = logging.getLogger(__name__)
ANSWER_S = 5.0
"""The directory and the routers may take this many seconds to answer, in addition to the time that a call asks them to
wait."""
REMOVAL_S = 20.0
"""Removing what an earlier cluster has left on a Ray may take this many seconds."""


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A `RunningCluster` is a cluster that answers requests."""

    host: str
    port: int
    model_name: str
    drain: Callable[[float], None] = lambda _: None
    """Makes every router refuse new requests, and waits until those in flight have ended, for this many seconds at
    most."""
    ask_ready: Callable[[], bool] | None = None
    """Asks a router over Ray whether requests can be served: the caller may have no certificate for HTTPS, or stand on
    another machine than a router that only its own machine reaches. With None, the router is asked over HTTP."""
    scheme: str = "http"
    hint: str = ""
    """Says what keeps this machine from reaching the URL, if anything does, and what the cluster leaves out of what its
    model can do."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{join_host_port(self.host, self.port)}"


def reached_host(listened: str, node: str) -> str:
    """Returns the host at which clients reach a router that listens on `listened`, on the node with the address
    `node`."""
    return node if listened in ("0.0.0.0", "::") else listened


def unreached_hint(listened: str, node: str) -> str:
    """Returns what to change if the router listens on the loopback of another machine, or an empty text."""
    is_private = listened == "localhost" or (_is_address(listened) and ipaddress.ip_address(listened).is_loopback)
    if not is_private or any(node in addresses for addresses in local_interfaces().values()):
        return ""
    return (
        f"the router listens on {listened} of another machine ({node}), so only that machine reaches it; "
        "set server.host to 0.0.0.0, or to an address that its clients reach"
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def run_cluster(
    config: ClusterConfig,
    temp_dir: Path | None = None,
    ready_timeout_s: float = 300.0,
    show: Callable[[StartState], None] = lambda _: None,
) -> Iterator[RunningCluster]:
    """Runs a cluster for the duration of the `with` block; at its end the cluster drains. While it starts, `show` gets
    what it waits for. Side effects: starts a local
    Ray unless `config.ray.address` names one, with its files in `config.ray.temp_dir`, or `temp_dir`, or a folder that
    is removed at the end. Raises ConfigError or Unavailable (with Serve's own message) if the cluster can't start."""
    is_joined = config.ray.address is not None
    config, model = _prepare(config, is_joined)
    with _ray(config, config.ray.temp_dir or temp_dir):
        import ray
        from ray import serve

        from deploy.ray.directory import claim_name
        from deploy.ray.joining import deploy_app
        from deploy.ray.nodes import check_nodes
        from deploy.ray.serve_app import build_app
        from deploy.ray.start_watch import watched_start

        name = config.ray.cluster_name
        if is_joined:
            check_nodes(config)
        directory = claim_name(name)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        if is_joined:
            _remove_left(name)
        try:
            with watched_start(directory, _wanted(config), show):
                handle = deploy_app(build_app(config), name)
                node, port = handle.endpoint.remote().result(timeout_s=ready_timeout_s)
                is_secure = config.server.tls_cert_file is not None
                hints = (unreached_hint(config.server.host, node), silence_hint(config, model.directory))
                cluster = RunningCluster(
                    host=reached_host(config.server.host, node),
                    port=port,
                    model_name=model.name,
                    drain=partial(drain_routers, handle, directory),
                    ask_ready=partial(_ask_ready, handle) if is_joined or is_secure else None,
                    scheme="https" if is_secure else "http",
                    hint="; ".join(filter(None, hints)),
                )
                wait_ready(cluster, ready_timeout_s)
            try:
                yield cluster
            finally:
                cluster.drain(config.server.drain_s)
        finally:
            # Serve itself keeps running: a shared Ray may have other applications on it, and a Ray that this process
            # started ends with it.
            serve.delete(name)
            ray.kill(directory)


def _wanted(config: ClusterConfig) -> dict[str, int]:
    """Maps kinds of members to the numbers with which the cluster begins."""
    encoders, stages = config.encoders.first_replicas, config.num_stage_replicas
    return {"worker": config.first_workers, "encoder": encoders, "stage": stages, "router": config.router.replicas}


def _prepare(config: ClusterConfig, is_joined: bool) -> tuple[ClusterConfig, compose.Model]:
    """Checks what can be checked before a Ray is started or joined, and sets the switches that Ray reads when it is
    imported. Returns the config with the dtype that `auto` stands for, and the model."""
    if not is_joined:  # The machines of another Ray may have what this one lacks.
        check_installed()
        check_environment(config)
        for unchecked in check_options_there(config):
            logger.warning("%s", unchecked)
    config, model = compose.open_model(config)
    refuse_if_too_small(config, model)
    if not is_joined:
        if config.server.port:
            check_port(config.server.host, config.server.port)
        if (tls := TlsFiles.of(config.server)) is not None:
            check_tls(tls)
        set_local_switches()
    if config.logging.to == "terminal":
        show_logs_as_written()
    return config, model


def remove_left(config: ClusterConfig) -> None:
    """Removes what a cluster with the config's name has left on a Ray that goes on running, because that cluster was
    ended at once. Does nothing if a cluster with that name lives, or if the Ray can't be joined. Raises Unavailable if
    the removal takes longer than `REMOVAL_S`."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_ray(config, None))
        except (ConfigError, Unavailable):  # The server has already said why it can't join this Ray.
            return
        import ray

        from deploy.ray.directory import claim_name

        try:
            directory = claim_name(config.ray.cluster_name)
        except ConfigError:
            return
        _remove_left(config.ray.cluster_name)
        ray.kill(directory)


def _remove_left(name: str) -> None:
    """Removes the Serve application with that name, if there is one. The caller must have claimed the name, so no
    living cluster uses the application."""
    from deploy.ray.removal import has_application, remove_at_once

    if has_application(name):
        logger.warning("the application %r of an earlier cluster is still on this Ray, so Weft removes it", name)
        remove_at_once(name, REMOVAL_S)


def drain_routers(handle: Any, directory: Any, limit_s: float) -> None:
    """Makes every router drain for `limit_s` at most. Workers and encoders go on meanwhile, because the accepted
    requests need them. A router that does not answer is logged."""
    import ray
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    members = ray.get(directory.members.remote(), timeout=ANSWER_S)
    routers = [member.member_id for member in members if member.kind == "router"]
    deadline_s = time.monotonic() + limit_s + ANSWER_S
    drains = [handle.options(session_id=str(member_id)).drain.remote(limit_s) for member_id in routers]
    for member_id, under_way in zip(routers, drains, strict=True):
        try:
            num_left = under_way.result(timeout_s=max(0.0, deadline_s - time.monotonic()))
        except (RayError, RayServeException, TimeoutError):  # The requests of the other routers go on.
            logger.exception("router %s could not be drained", member_id)
        else:
            if num_left:
                logger.warning(
                    "router %s ends %d requests that have not ended within %g s", member_id, num_left, limit_s
                )


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Puts back the signal handlers that the block has replaced, because Ray sets its own, the last of which aborts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ray(config: ClusterConfig, temp_dir: Path | None) -> Iterator[None]:
    if config.ray.address is not None:
        if (token_file := config.ray.token_file) is not None and not token_file.is_file():
            raise ConfigError(f"ray.token_file is {token_file}, which is not a file")
        show_token(config.ray.token_file)  # Ray reads what this sets when it is imported.
    import ray

    from deploy.ray.directory import NAMESPACE
    from deploy.ray.joining import join_ray

    is_carried = config.logging.to == "terminal"
    if config.ray.address is not None:
        with _own_handlers():
            join_ray(config.ray.address, NAMESPACE, log_to_driver=is_carried)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # The path is short because Ray puts Unix sockets below it, whose names are limited to 107 bytes.
    folder = temp_dir or Path(tempfile.mkdtemp(prefix="weft-"))
    try:
        with _own_handlers():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=False,
                log_to_driver=is_carried,
                logging_level="ERROR",
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
            )
        try:
            yield
        finally:
            try:
                ray.shutdown(wait_for_processes=True)
            finally:  # A Ray that does not end in time is the one whose logs are wanted.
                _keep_ray_logs(config, folder)
                # Ray kills replicas that do not end in time, and the last of them has no successor that removes its
                # inbox.
                remove_inboxes_without_owner()
    finally:
        if temp_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


def _keep_ray_logs(config: ClusterConfig, folder: Path) -> None:
    """Copies what Ray's processes wrote, and what libraries printed in the replicas, into the folder of Weft's own
    logs."""
    logs = folder / "session_latest" / "logs"
    if config.logging.to == "files" and config.logging.dir is not None:
        try:
            shutil.copytree(logs, config.logging.dir / "ray", dirs_exist_ok=True)
        except OSError as error:
            logger.warning("the logs of Ray's processes were not all kept: %s", error)


def _answers_ready(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health/ready", timeout=5).close()
    except OSError:  # The router does not listen yet, or it answers 503.
        return False
    return True


def _ask_ready(handle: Any) -> bool:
    return bool(handle.is_ready.remote().result(timeout_s=ANSWER_S))


def wait_ready(cluster: RunningCluster, timeout_s: float) -> None:
    """Polls until the cluster is ready. Raises Unavailable after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if _answers_ready(cluster.url) if cluster.ask_ready is None else cluster.ask_ready():
            return
        time.sleep(0.1)
    raise Unavailable(f"the cluster did not become ready within {timeout_s:g} s; the logs of its members say why")
