"""Starts Ray and Serve for `weft serve`, waits until the cluster is ready, stops what it started."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy import compose
from deploy.budget import refuse_if_too_small
from deploy.config import ClusterConfig
from deploy.environment import set_local_switches
from fabric.errors import ConfigError, Unavailable


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that answers."""

    host: str
    port: int
    model_name: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@contextlib.contextmanager
def run_cluster(config: ClusterConfig, ready_timeout_s: float = 300.0) -> Iterator[RunningCluster]:
    """A cluster for the time of the block. Side effects: starts a local Ray unless
    `config.ray.address` names one. Raises ConfigError or Unavailable (with Serve's own message) if it can't start."""
    model_dir = compose.resolve_model_dir(config)
    model = compose.load_model(config, model_dir)
    refuse_if_too_small(config, model)
    if config.server.port and config.ray.address is None:
        _check_port(config.server.host, config.server.port)
    if config.ray.address is None:
        set_local_switches()  # before `import ray`, which reads them once
    with _ray(config):
        from ray import serve

        from deploy.serving.app import APP_NAME, build_app

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        try:
            handle = serve.run(build_app(config, model_dir), name=APP_NAME, route_prefix=None)
            port = handle.port.remote().result(timeout_s=ready_timeout_s)
            host = "127.0.0.1" if config.server.host in ("0.0.0.0", "::") else config.server.host
            cluster = RunningCluster(host, port, model.name)
            wait_ready(cluster, ready_timeout_s)
            yield cluster
        finally:
            _remove_app(APP_NAME)


@contextlib.contextmanager
def _ray(config: ClusterConfig) -> Iterator[None]:
    import ray

    if config.ray.address is not None:
        ray.init(address=config.ray.address, namespace="weft", log_to_driver=False, logging_level="WARNING")
        try:
            yield
        finally:
            ray.shutdown()
        return
    # A short path: Ray puts Unix sockets below it, whose names are limited to 107 bytes.
    temp_dir = config.ray.temp_dir or Path(tempfile.mkdtemp(prefix="weft-"))
    try:
        ray.init(
            address="local",
            namespace="weft",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(temp_dir),
            _node_ip_address="127.0.0.1",
        )
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        if config.ray.temp_dir is None:
            shutil.rmtree(temp_dir, ignore_errors=True)


def _remove_app(name: str) -> None:
    """Drains and removes our application and directory. Serve itself stays: on a shared Ray it may have others', and
    one of our own ends with it."""
    import ray
    from ray import serve

    from deploy.serving.directory import directory_actor

    serve.delete(name)
    ray.kill(directory_actor())


def _check_port(host: str, port: int) -> None:
    """Raises ConfigError if the port is taken: better now than after a minute of loading."""
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror} (choose another with --port)"
            ) from error


def wait_ready(cluster: RunningCluster, timeout_s: float) -> None:
    """Polls /health/ready. Raises Unavailable after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{cluster.url}/health/ready", timeout=5).close()
        except OSError:  # not listening yet, or 503
            time.sleep(0.1)
        else:
            return
    raise Unavailable(f"the cluster did not become ready within {timeout_s:g} s")
