"""Implements `weft init`: writes a config for the GPUs of this machine, or for others that are named.

`written` makes the YAML file of a planned cluster, in which a comment says why each number is what it is; what is
written is read again and checked as `weft check` does, before the file is made. The module knows nothing of how devices
are found (`deploy.gpu_devices`) and how a cluster is planned (`deploy.sizing`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy import compose
from deploy.config import ClusterConfig
from deploy.config_file import check_config
from deploy.gpu_devices import GIB, MIB, GpuDevice, find_devices, named_devices
from deploy.sizing import (
    Machine,
    PlannedCluster,
    budget_lines,
    check_budget,
    machine_bytes,
    plan_cluster,
    read_stored_weights,
)
from deploy.topology import run_nvidia_smi
from fabric.contracts import ConfigError
from llm_workers.scheduling import PAGE_TOKENS_MULTIPLE


def init(arguments: argparse.Namespace) -> int:
    """Writes the config. Raises ConfigError if the model does not fit, or the file exists already."""
    path: Path = arguments.output
    is_file = str(path) != "-"
    if is_file and path.exists() and not arguments.force:
        raise ConfigError(f"the file {path} exists already; name another one with --output, or replace it with --force")
    devices = named_devices(arguments.gpus) if arguments.gpus else find_devices(run_nvidia_smi, os.environ)
    machine = Machine(tuple(devices), os.cpu_count() or 1, machine_bytes())
    text, planned = planned_text(machine, None if arguments.demo else arguments.model.absolute())
    if is_file:
        try:
            path.write_text(text)
        except OSError as error:
            raise ConfigError(f"the file {path} can't be written: {error.strerror}") from error
    else:
        print(text, end="")
    said = sys.stderr if not is_file else sys.stdout
    print("\n".join([summary(planned), *budget_lines(planned.budget)]), file=said)
    if is_file:
        print(
            f"{path} is written; its first lines say for which devices. Start it with:\n\n  weft serve --config {path}"
        )
    return 0


def planned_text(machine: Machine, model_dir: Path | None) -> tuple[str, PlannedCluster]:
    """Returns the text of a config for this machine, and the plan. Raises ConfigError if there is none."""
    device = "cuda" if machine.devices else "cpu"
    pool = {"device": device, "gpus_per_replica": 1 if machine.devices else 0}
    asked = ClusterConfig.model_validate({"model": {"path": model_dir}, "encoders": pool, "workers": pool})
    config, model = compose.open_model(asked)
    planned = plan_cluster(machine, config, model, read_stored_weights(model.directory))
    text = written(planned, machine)
    read, problems = check_config(text)
    if read is None:
        raise AssertionError(f"the written config is wrong: {problems}\n{text}")
    budget, why_not = check_budget(read)
    if budget is None or budget.problems:
        raise AssertionError(f"the written config does not pass the check: {why_not or budget}\n{text}")
    return text, planned


# ------------------------------------------------------------ the file


def summary(planned: PlannedCluster) -> str:
    """Returns one sentence for people about the plan."""
    arrangement, config = planned.arrangement, planned.config
    ranks = f" of {arrangement.num_ranks} ranks each" if arrangement.num_ranks > 1 else ""
    workers = f"{arrangement.num_workers} worker{'s' if arrangement.num_workers > 1 else ''}{ranks}"
    encoders = f"{arrangement.num_encoders} encoder{'s' if arrangement.num_encoders != 1 else ''}"
    where = _devices_line(planned.used) if planned.used else "no GPU"
    shared = ", which share a GPU" if arrangement.is_shared else ""
    tokens = config.workers.stated_blocks() * config.workers.block_size
    return f"{where}: {encoders} and {workers}{shared}; each worker holds {tokens:,} tokens"


def _devices_line(devices: Sequence[GpuDevice]) -> str:
    kinds = dict.fromkeys((device.name, device.memory_bytes) for device in devices)
    counted = [
        f"{sum((d.name, d.memory_bytes) == kind for d in devices)} x {kind[0]}, {kind[1] / GIB:.0f} GiB"
        for kind in kinds
    ]
    return "; ".join(counted)


def written(planned: PlannedCluster, machine: Machine) -> str:
    """Returns the YAML text of the planned config. A comment in front of each key says why it has its value."""
    config, arrangement = planned.config, planned.arrangement
    blocks = [_head(planned, machine), _model(config), _encoders(planned), _workers(planned)]
    rest = [
        "# Each encoder and worker computes with so many threads on the processor; all together leave half of the",
        f"# {machine.num_cpus} cores to the routers, to decoding and to the system.",
        f"threads_per_replica: {config.threads_per_replica}",
    ]
    if arrangement.is_shared:
        rest += ["# The encoder and a worker share a GPU: there is no GPU for the encoder alone."]
        rest += ["allow_shared_gpu: true"]
    return "\n".join([*blocks, *rest]) + "\n"


def _head(planned: PlannedCluster, machine: Machine) -> str:
    lines = [
        "# Written by `weft init`. `weft check FILE` prints the memory of each process;",
        "# docs/configuration.md",
    ]
    lines[-1] += " explains every key."
    lines.append(f"# Planned for: {_devices_line(planned.used) or f'{machine.num_cpus} cores without a GPU'}.")
    unused = [device for device in machine.devices if device not in planned.used]
    if unused:
        ids = ",".join(device.device_id for device in planned.used)
        lines.append(f"# Too small for the model: {_devices_line(unused)}.")
        lines.append(f"# Hide these from the cluster: start it with CUDA_VISIBLE_DEVICES={ids}")
    if any(device.is_slice for device in planned.used):
        ids = ",".join(device.device_id for device in planned.used)
        lines += [
            "# Ray counts whole GPUs and no slices, so start Ray yourself, with the slices named:",
            f"#   CUDA_VISIBLE_DEVICES={ids} \\",
            f"#     ray start --head --num-gpus={len(planned.used)}",
            "ray:",
            "  address: auto",
        ]
    return "\n".join(lines)


def _model(config: ClusterConfig) -> str:
    lines = ["model:"]
    if config.model.path is not None:
        lines.append(f"  path: {_quoted(str(config.model.path))}")
    return "\n".join(
        [*lines, "  # Is the checkpoint's own, or what this processor computes fast.", f"  dtype: {config.model.dtype}"]
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _encoders(planned: PlannedCluster) -> str:
    config, arrangement = planned.config.encoders, planned.arrangement
    if not arrangement.num_encoders:
        return "encoders:\n  # The model takes text only.\n  replicas: 0"
    why = "One in four GPUs, and those that no worker can use." if planned.used else "One is enough to try things."
    if arrangement.is_shared:
        why = "There is no GPU for it alone, so it shares one with a worker."
    lines = ["encoders:", f"  # {why} `weft simulate` shows what suits your load."]
    lines += [f"  replicas: {config.replicas}", f"  device: {config.device}"]
    if planned.used:
        lines.append(f"  gpus_per_replica: {config.gpus_per_replica:g}")
        lines.append("  # Patches of one forward pass: as many as fit beside the weights.")
        lines.append(f"  max_batch_cost: {config.max_batch_cost}")
    lines.append("  # Features that wait for workers or for another request, in host memory.")
    lines.append(f"  arena_bytes: {_bytes(config.arena_bytes)}")
    lines.append("  # Half of the cores decode pictures, videos and sounds.")
    lines.append(f"  decode_processes: {config.decode_processes}")
    return "\n".join(lines)


def _workers(planned: PlannedCluster) -> str:
    config, arrangement = planned.config.workers, planned.arrangement
    lines = ["workers:", f"  replicas: {config.replicas}", f"  device: {config.device}"]
    if planned.used:
        if arrangement.num_ranks > 1:
            lines.append("  # One GPU does not hold the language model's weights and a long context.")
        else:
            lines.append("  # One GPU holds the language model: ranks that wait for each other would be slower.")
        lines.append(f"  tensor_parallel: {config.tensor_parallel}")
        lines.append(f"  gpus_per_replica: {config.gpus_per_replica:g}")
    tokens = config.stated_blocks() * config.block_size
    if config.block_size % PAGE_TOKENS_MULTIPLE == 0:
        lines.append("  # The paged kernel reads blocks of this size where they lie.")
    lines.append(f"  block_size: {config.block_size}")
    if config.cuda_graphs == "auto":
        lines.append("  # Decode steps are recorded at the start, where torch can do that.")
        lines.append(f"  cuda_graphs: {config.cuda_graphs}")
    where = "what the weights and a step's workspace leave of each GPU" if planned.used else "modest, for one machine"
    if planned.are_blocks_enough:
        where = "as much as the most sequences of a step can fill"
    lines.append(f"  # KV cache: {where}, {tokens:,} tokens in each worker.")
    if not planned.is_context_whole:
        lines.append("  # That is less than the model's context, so longer requests are refused.")
    lines.append(f"  num_blocks: {config.num_blocks}")
    lines.append("  # Tokens of one step: more prefill faster, and take more workspace.")
    lines.append(f"  max_step_tokens: {config.max_step_tokens}")
    lines.append(f"  max_sequences: {config.max_sequences}")
    if config.inbox_bytes is not None:
        lines.append("  # Features that have arrived from encoders, in host memory.")
        lines.append(f"  inbox_bytes: {_bytes(config.inbox_bytes)}")
    return "\n".join(lines)


def _bytes(nbytes: int | None) -> str:
    """Returns a number of bytes as the config takes it, in MiB where that is exact."""
    assert nbytes is not None
    return f"{nbytes // MIB}MiB" if nbytes % MIB == 0 else str(nbytes)
