"""Reads a config out of what is submitted to Ray Serve: a Serve config (`serveConfigV2`), alone or in the manifest of a
RayService.

An application of Weft names the builder `IMPORT_PATH`. Its `args` hold the config with which replicas start, and the
`user_config` of its deployments what may change while they serve (`deploy/live_config.py`). The module does not import
Ray, so that `weft check` is fast. It knows nothing of how the application is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from deploy.config import ClusterConfig
from deploy.config_file import Mark, Problem, check_config, flaws_of, locate, parse_with_marks
from deploy.live_config import with_live_values
from fabric.contracts import ConfigError

IMPORT_PATH = "deploy.ray.application:build"
DEPLOYMENTS = ("router", "worker", "encoder")


class SubmittedConfig(NamedTuple):
    """A `SubmittedConfig` is what a file says about the cluster that it would start."""

    config: ClusterConfig | None
    problems: list[Problem]
    is_remote: bool = False
    """Tells whether the cluster runs elsewhere, so that files that the config names need not be here."""


def config_of(args: Mapping[str, Any]) -> ClusterConfig:
    """Returns the config of a builder's arguments. Its replicas join the Ray on which they run. Raises ConfigError with
    every flaw of the config."""
    if unknown := sorted(args.keys() - {"config"}):
        raise ConfigError(f"the builder takes `config` alone, and no argument {', '.join(unknown)}")
    try:
        config = ClusterConfig.model_validate(args.get("config") or {})
    except ValidationError as error:
        raise ConfigError("\n".join(flaws_of(error))) from error
    if config.ray.address is None:
        config = config.model_copy(update={"ray": config.ray.model_copy(update={"address": "auto"})})
    return config


def check_submitted(text: str) -> SubmittedConfig:
    """Returns the config in the text of a file: one for `weft serve`, a Serve config, or manifests of Kubernetes with a
    RayService. What `user_config` says is in the config too. Without a config, the problems say why."""
    try:
        documents = [each for each in yaml.safe_load_all(text) if isinstance(each, dict)]
    except yaml.YAMLError:
        return SubmittedConfig(*check_config(text))  # It says what is wrong, and where.
    services = [each for each in documents if each.get("kind") == "RayService"]
    if len(services) == 1:
        return _of_serve_config(str(services[0].get("spec", {}).get("serveConfigV2", "")), "serveConfigV2")
    if len(services) > 1:
        return _flaw("", f"the file has {len(services)} RayServices; check one at a time")
    if any("applications" in each for each in documents):
        return _of_serve_config(text, "")
    if any("kind" in each and "apiVersion" in each for each in documents):
        return _flaw("", "the file has manifests of Kubernetes, but no RayService among them")
    return SubmittedConfig(*check_config(text))


def _of_serve_config(text: str, where: str) -> SubmittedConfig:
    try:
        data, marks = parse_with_marks(text)
    except yaml.MarkedYAMLError as error:
        return _flaw(where, f"it is not valid YAML: {error.problem or error}")
    applications = data.get("applications") if isinstance(data, dict) else None
    ours = [
        (index, each)
        for index, each in enumerate(applications if isinstance(applications, list) else [])
        if isinstance(each, dict) and each.get("import_path") == IMPORT_PATH
    ]
    if len(ours) != 1:
        return _flaw(where, f"it must have one application with import_path {IMPORT_PATH}, not {len(ours)}")
    index, application = ours[0]
    path = ("applications", index)
    try:
        config = config_of(application.get("args") or {})
        name = application.get("name", "default")
        if name != config.ray.cluster_name:
            raise ConfigError(f"ray.cluster_name is {config.ray.cluster_name}, but the application's name is {name}")
    except ConfigError as error:
        return _flaws(where, locate((*path, "args"), marks), error)
    for number, deployment in enumerate(application.get("deployments") or ()):
        try:
            changed = with_live_values(config, deployment.get("user_config") or {})
        except ConfigError as error:
            return _flaws(where, locate((*path, "deployments", number), marks), error)
        if deployment.get("name") == "router":
            config = changed
    return SubmittedConfig(config, [], is_remote=True)


def _flaws(where: str, mark: Mark | None, error: ConfigError) -> SubmittedConfig:
    problems = [Problem(mark=mark, key=where, message=line) for line in error.message.splitlines()]
    return SubmittedConfig(None, problems)


def _flaw(where: str, message: str) -> SubmittedConfig:
    return SubmittedConfig(None, [Problem(mark=None, key=where, message=message)])
