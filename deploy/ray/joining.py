"""Joins a Ray that Weft did not start, and deploys on it, with errors that say what to do.

Ray retries for minutes where nothing answers, and tells a wrong token only in its log; Serve keeps the reason why a
replica can't start in the status of its deployment. The module knows nothing of what is deployed.
"""

from __future__ import annotations

import re
import socket
from typing import Any

import ray
from ray import serve
from ray.exceptions import AuthenticationError

from fabric.contracts import ConfigError, Unavailable

ANSWER_S = 5.0
"""The head of a Ray may take this many seconds to accept a connection."""
MAX_REASON_CHARS = 2000


def join_ray(address: str, namespace: str, log_to_driver: bool) -> None:
    """Joins the Ray at an address. Raises Unavailable if nothing answers there, and ConfigError if the Ray refuses this
    process's token or has another version."""
    check_answers(address)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=log_to_driver, logging_level="WARNING")
    except (AuthenticationError, ConnectionError) as error:
        raise ConfigError(
            f"the Ray at {address} does not accept this process ({_first_line(error)}). Every node and `weft serve` "
            "need the same token and RAY_AUTH_MODE: name the file of the token in ray.token_file, or set RAY_AUTH_TOKEN"
        ) from error
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise ConfigError(f"the Ray at {address} has other versions than this process: {error}") from error


def check_answers(address: str) -> None:
    """Raises Unavailable if the address names a host and a port, and nothing accepts a connection there."""
    match = re.fullmatch(r"\[?([^\[\]]+)\]?:(\d+)", address)
    if match is None or "://" in address:
        return
    try:
        socket.create_connection((match[1], int(match[2])), ANSWER_S).close()
    except OSError as error:
        raise Unavailable(
            f"no Ray answers at {address} (ray.address): {error.strerror or error}; "
            "start its head with `weft node start --head`, and open its ports to this machine"
        ) from error


def deploy_app(app: Any, name: str) -> Any:
    """Deploys an application and returns the handle of its ingress. Raises Unavailable, with what the replicas said, if
    it can't be deployed."""
    try:
        return serve.run(app, name=name, route_prefix=None)
    except RuntimeError as error:
        reasons = _reasons(name)
        raise Unavailable("\n".join([str(error), *reasons])) from error


def _reasons(name: str) -> list[str]:
    """Returns what Serve's status says of each deployment that is not healthy: the last lines of a traceback."""
    application = serve.status().applications.get(name)
    if application is None:
        return []
    found = []
    for deployment, status in application.deployments.items():
        if status.status != "HEALTHY" and status.message:
            found.append(f"{deployment}: {told(status.message)}")
    return found


def told(message: str) -> str:
    """Returns the error in the message of a deployment: from the last line that names an exception on. All of it is
    returned if no line does."""
    lines = message.strip().splitlines()
    starts = [
        index for index, line in enumerate(lines) if re.match(r"\s*[\w.]+(Error|Exception|Lost|Unavailable)\b: ", line)
    ]
    return "\n".join(lines[starts[-1] :] if starts else lines)[:MAX_REASON_CHARS].strip()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
