"""Removes what a cluster leaves on a Ray that outlives it: its Serve application, whose replicas belong to Serve and
outlive the process that started them.

The directory is no part of this: it belongs to the process that serves and ends with it (`directory.claim_name`). The
module knows nothing of what is served.
"""

from __future__ import annotations

import contextlib
import time

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from fabric.contracts import Unavailable

REPLICA_PREFIX = "SERVE_REPLICA::"
"""Serve names the actors of its replicas `SERVE_REPLICA::APPLICATION#DEPLOYMENT#ID`; this is the prefix."""
SERVE_NAMESPACE = "serve"
_POLL_S = 0.2


def has_application(name: str) -> bool:
    """Returns whether Serve runs on this Ray and has an application with that name, in any state."""
    try:
        return name in serve.status().applications
    except RayServeException:  # Serve does not run.
        return False


def remove_at_once(name: str, limit_s: float) -> None:
    """Deletes an application without draining it: its replicas are killed. The caller must have claimed the name.
    Raises Unavailable if Serve still has the application, or one of its replicas lives, after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    if has_application(name):
        serve.delete(name, _blocking=False)
    while (replicas := replica_names(name)) or has_application(name):
        if time.monotonic() > deadline_s:
            raise Unavailable(f"the application {name!r} could not be removed from Ray within {limit_s:g} s")
        for replica in replicas:
            with contextlib.suppress(ValueError):  # The replica has ended in the meantime.
                ray.kill(ray.get_actor(replica, namespace=SERVE_NAMESPACE))
        time.sleep(_POLL_S)


def replica_names(application: str) -> list[str]:
    """Returns the names of the actors of an application's replicas, including replicas that are still starting."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    prefix = f"{REPLICA_PREFIX}{application}#"
    return [actor["name"] for actor in actors if actor["name"].startswith(prefix)]
