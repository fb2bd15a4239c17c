"""Implements `weft check`, which says whether a cluster could start from a config file, or from what is submitted to
Ray Serve, and what it would take, and `weft key new`, which makes a line for the file of keys.

Both print for people and start nothing. The module knows nothing of clusters that run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from deploy.compose import resolve_model_dir
from deploy.config import ClusterConfig
from deploy.gpu_devices import GpuDevice, find_devices, named_devices
from deploy.limit_table import check_files, limit_lines
from deploy.serve_config import check_submitted
from deploy.sizing import budget_lines, check_budget, too_few_gpus
from deploy.speech_parts import stage_name
from deploy.topology import run_nvidia_smi
from deploy.vllm_worker import check_options_there, silence_hint
from fabric.contracts import ConfigError
from router.run import NO_TENANT, new_key


def check(arguments: argparse.Namespace) -> int:
    """Prints what is wrong with a config file, or its limits and the memory of each process."""
    try:
        text = arguments.file.read_text()
    except OSError as error:
        print(f"weft: the config file {arguments.file} can't be read: {error.strerror}", file=sys.stderr)
        return 1
    config, problems, is_remote = check_submitted(text)
    for problem in problems:
        print(f"{arguments.file}: {problem}", file=sys.stderr)
    if config is None:
        return 1
    encoders = config.encoders
    parts = {
        "router": str(config.router.replicas),
        "encoder": _span(encoders.first_replicas, encoders.most_replicas),
    }
    for each in config.by_pool():
        parts[each.pool_deployment] = _span(each.workers.first_replicas, each.workers.most_replicas)
    for stage in () if config.stages is None else config.stages.later:
        parts[stage_name(stage)] = str(stage.replicas)
    print("\n".join(limit_lines(config)))
    held, flaws = check_files(config) if not is_remote else (["files that the config names: not looked at"], [])
    unchecked: list[str] = []
    try:
        unchecked = check_options_there(config)
    except ConfigError as error:
        flaws = [*flaws, error.message]
    for line in [*unchecked, *held]:
        print(line)
    for flaw in flaws:
        print(f"{arguments.file}: {flaw}", file=sys.stderr)
    if flaws:
        return 1
    counts = ", ".join(f"{replicas} {name}" for name, replicas in parts.items())
    print(config.media.fetch.summary())
    devices = _devices(config, arguments.gpus, is_remote)
    try:
        budget, why_not = check_budget(config, min((each.memory_bytes for each in devices), default=None))
    except ConfigError as error:
        print(f"{arguments.file}: {error.message}", file=sys.stderr)
        return 1
    if budget is None:
        print(f"{arguments.file}: the config is valid ({counts} replicas)")
        print(f"the memory is not computed, because the model can't be read: {why_not}")
        return 0
    print("\n".join(budget_lines(budget)))
    if hint := silence_hint(config, resolve_model_dir(config, has_weights=False)):
        print(hint)
    shortfalls = [*budget.problems, *(too_few_gpus(config, len(devices)) if arguments.gpus else ())]
    for shortfall in shortfalls:
        print(f"{arguments.file}: {shortfall}", file=sys.stderr)
    if not shortfalls:
        print(f"{arguments.file}: the config is valid ({counts} replicas)")
    return 1 if shortfalls else 0


def _devices(config: ClusterConfig, named: str | None, is_remote: bool) -> Sequence[GpuDevice]:
    """Returns the GPUs that are named, or those of this machine if the cluster runs on this machine. Raises ConfigError
    if they are not named in the right form."""
    if named:
        return named_devices(named)
    return [] if is_remote or config.ray.address is not None else find_devices(run_nvidia_smi, os.environ)


def _span(first: int, most: int) -> str:
    return str(first) if first == most else f"{first} to {most}"


def make_key(arguments: argparse.Namespace) -> int:
    """Prints a new key to standard error and its line to standard output."""
    tenant = arguments.tenant or NO_TENANT
    if tenant == NO_TENANT and not arguments.operator:
        print("weft: name the tenant of the key, or make a key of an operator with --operator", file=sys.stderr)
        return 2
    key, line = new_key(tenant, arguments.name, arguments.operator)
    print(f"weft: this is the key; it is shown only now, and can't be computed from its line\n{key}", file=sys.stderr)
    print(line, flush=True)
    return 0
