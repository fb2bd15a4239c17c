"""Builds the Serve application from data alone, for a Ray whose applications are submitted to Serve: by `serve deploy`,
or by KubeRay, which hands the `serveConfigV2` of a RayService to Serve.

`import_path: deploy.ray.application:build` names the builder, and `args: {config: ...}` holds the config. No process of
Weft runs outside the replicas then: Serve owns them, and they create the directory. What may change without a restart
is given again as the `user_config` of the deployments (`deploy/live_config.py`). A change of `args` makes Serve start
every replica again.

The module knows nothing of how the application is submitted.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from deploy import compose
from deploy.process_setup import set_switches
from deploy.ray.directory import check_unclaimed
from deploy.ray.serve_app import build_app
from deploy.serve_config import config_of
from deploy.sizing import refuse_if_too_small


def build(args: dict[str, Any]) -> Application:
    """Returns the application of the config in `args`. Serve calls it in a task on its Ray, and shows the ConfigError
    that it raises as the state of the application."""
    set_switches()
    config, model = compose.open_model(config_of(args))
    refuse_if_too_small(config, model)
    check_unclaimed(config.ray.cluster_name)
    return build_app(config, has_server=False)
