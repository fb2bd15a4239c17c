"""Computes the memory of each process from the config and the model.

`plan_budget` adds up the pools of an encoder, of a worker, and of each stage that speaks, and of all that share a GPU.
Where the size of the GPUs is known, it says what does not fit, and how many KV blocks a worker has whose config leaves
that to the device, or vLLM. `budget_lines` makes a table for people, and `refuse_if_too_small` refuses a config that is
too small when a cluster starts. `arena_bytes` and `inbox_bytes` say how large the arenas for features are, which the
plan counts and the replicas allocate: what the config says, and otherwise a published budget, limited by the memory of
the machine. `spill_bytes` and `staging_bytes` say the same of the host's memory beside arenas on a device.

The module reads config files, the headers of weight files and the size of the machine's memory. It allocates nothing,
asks no device and knows nothing of processes that run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from deploy import compose
from deploy.config import ClusterConfig
from deploy.lora_adapters import find_adapters
from deploy.sizing.device_use import (
    CONTEXT_BYTES,
    VLLM_UTILIZATION,
    DeviceUse,
    gpu_needs,
    misfits,
    shared_kinds,
    shared_utilization,
)
from deploy.sizing.largest_media import largest_items
from deploy.sizing.stored_weights import StoredWeights, read_stored_weights
from deploy.speech_parts import stage_name
from deploy.stages_config import CODE2WAV, TALKER, StageSection
from deploy.worker_pools import pipeline_stages, ranks_per_worker
from fabric.contracts import DTYPE_TO_BYTES, ConfigError, Unavailable
from llm_workers.scheduling import (
    NUM_HIDDEN_WIDTHS,
    DeviceRoom,
    LargestItem,
    arena_room,
    arena_shortfall,
    block_bytes,
    feature_bytes,
    fitting_blocks,
    most_blocks,
    reads_in_place,
    shortfalls,
    worker_bytes,
)
from llm_workers.worker_config import WorkerConfig
from modalities.family import Family
from modalities.speech_traits import QWEN2_5_OMNI, read_speech_traits

PATCH_BYTES = 6 * 1024
"""Estimates the size of a decoded patch: float32, 3 colours, 2 frames, 16 x 16 pixels."""


class Row(NamedTuple):
    """A `Row` is one memory pool of a process. `nbytes` is None if its size could not be read. `place` is a device, or
    `host`."""

    name: str
    nbytes: int | None
    place: str
    note: str = ""


class ProcessBudget(NamedTuple):
    """Holds the memory pools of one replica; `num_replicas` processes have the same."""

    kind: str
    num_replicas: int
    rows: tuple[Row, ...]


class Budget(NamedTuple):
    model_name: str
    dtype: str
    largest: tuple[LargestItem, ...]
    processes: tuple[ProcessBudget, ...]
    problems: tuple[str, ...]
    """Says why the cluster could never serve some request within the limits, or does not fit its GPUs; it is empty if
    the cluster can serve all."""
    uses: tuple[DeviceUse, ...] = ()
    """Says what is on a GPU, for each way in which the cluster fills one."""
    device_bytes: int | None = None
    """Holds the memory of the smallest GPU, if it is known."""


def plan_budget(
    config: ClusterConfig,
    model: compose.Model,
    weights: StoredWeights | None,
    largest: Sequence[LargestItem] | None = None,
    device_bytes: int | None = None,
) -> Budget:
    """Returns the memory budget of a cluster that serves this model. `largest` are the largest media that the config
    permits, if the caller knows them already: finding them takes longer than all else. `device_bytes` is the memory of
    the smallest GPU, if it is known."""
    family = model.family
    modalities = compose.loaded_modalities(config, family)
    if largest is None:
        largest = largest_items(family, modalities, compose.media_limits(config), compose.video_options(config))
    dtype, shape = config.model.dtype, family.shape
    processes = [_encoder(config, family, weights, largest)] if modalities else []
    if config.stages is not None:
        processes += _stages(config, model.directory, family, weights)
    pools = [_pool(each, family, weights, largest, processes, device_bytes) for each in config.by_pool()]
    problems = [problem for pool in pools for problem in pool.problems]
    if all(pool.too_small for pool in pools):  # Else the routers leave large requests to a pool that holds them.
        problems += [reason for pool in pools for reason in pool.too_small]
    first = 1 if modalities else 0
    processes[first:first] = [pool.budget for pool in pools]
    if modalities:
        for item in largest:
            largest_arena = max(arena_bytes(config), spill_bytes(config))
            problems += arena_shortfall("encoders: arena_bytes", shape, largest_arena, dtype, item)
    uses = _device_uses(config, processes)
    if device_bytes is not None:
        problems += misfits(uses, device_bytes)
    return Budget(model.name, dtype, tuple(largest), tuple(processes), tuple(problems), uses, device_bytes)


def refuse_if_too_small(config: ClusterConfig, model: compose.Model) -> None:
    """Raises ConfigError if the cluster could never serve some request within the limits. The message contains the
    table."""
    budget = plan_budget(config, model, read_stored_weights(model.directory))
    if budget.problems:
        raise ConfigError(
            "\n".join(
                [
                    "the config can't hold the largest request that its limits allow:",
                    *budget.problems,
                    *budget_lines(budget),
                ]
            )
        )


def check_budget(config: ClusterConfig, device_bytes: int | None = None) -> tuple[Budget | None, str]:
    """Returns the budget for `weft check`, or None and the reason why the model or an adapter is not at hand. Reads no
    weights. Raises ConfigError if both are at hand and the cluster can't serve them."""
    try:
        compose.resolve_model_dir(config, has_weights=False)
        find_adapters(config)
    except (ConfigError, Unavailable) as error:
        return None, error.message
    config, model = compose.open_model(config)
    return plan_budget(config, model, read_stored_weights(model.directory), device_bytes=device_bytes), ""


# ------------------------------------------------------------ processes


class _PoolBudget(NamedTuple):
    """Holds the budget of a worker of one pool, why it would not start, and why it could never hold some request."""

    budget: ProcessBudget
    problems: list[str]
    too_small: list[str]


def _pool(
    config: ClusterConfig,
    family: Family,
    weights: StoredWeights | None,
    largest: Sequence[LargestItem],
    others: Sequence[ProcessBudget],
    device_bytes: int | None,
) -> _PoolBudget:
    """Returns the budget of the pool that the config describes. `others` are the budgets of what is no worker."""
    settings, problems = None, list[str]()
    if config.workers.engine == "vllm" and config.workers.device == "cuda":
        worker, problems = _vllm_worker(config, family, weights, others, device_bytes)
    else:
        settings = _settled(config, family, weights, device_bytes)
        worker = _worker(config, family, weights, largest, settings)
    # Without a number of KV blocks, as many count as can be used: then no request is refused for them.
    assumed = settings or replace(compose.worker_config(config), num_blocks=_most_blocks(config, family))
    inbox, path = inbox_bytes(config), config.pool_path
    return _PoolBudget(worker, problems, shortfalls(family.shape, assumed, inbox, config.model.dtype, largest, path))


def _worker(
    config: ClusterConfig,
    family: Family,
    weights: StoredWeights | None,
    largest: Sequence[LargestItem],
    settings: WorkerConfig | None,
) -> ProcessBudget:
    """Returns the budget of a worker with these settings. Without settings, its number of KV blocks is not known."""
    section, dtype = config.workers, config.model.dtype
    asked = settings or compose.worker_config(config)
    is_in_place = reads_in_place(section.device, dtype, section.block_size)
    taken = worker_bytes(family.shape, asked, inbox_bytes(config), dtype, is_in_place=is_in_place)
    place = _place(section.device)
    note = f"{asked.num_blocks} blocks of {section.block_size} tokens"
    if section.are_blocks_fitted():
        note = f"about {note}: what the GPU has left" if settings else "as many blocks as the GPU has room for"
    return ProcessBudget(
        config.pool_deployment,
        section.most_replicas,
        (
            _weights_row(weights and weights.num_language, dtype, place, section.tensor_parallel, _whole(family)),
            Row("KV", taken.kv if settings else None, place, note),
            Row("workspace", taken.workspace, place, f"estimate, steps of {section.max_step_tokens} tokens"),
            *(_spoken_rows(config, family, settings.num_blocks) if settings else ()),
            *_host_rows(config, family, largest),
        ),
    )


def _host_rows(config: ClusterConfig, family: Family, largest: Sequence[LargestItem]) -> tuple[Row, ...]:
    section, inbox = config.workers, inbox_bytes(config)
    place = _place(section.device) if config.is_inbox_on_device else "host"
    return (
        Row("inbox", inbox, place, _room(family, inbox, config.model.dtype, largest)),
        *_beside("staging", staging_bytes(config), "pinned, for features on slow ways to the device"),
        Row("kept", _kept_bytes(config), "host", f"at most, keep_features: {section.keep_features}"),
        Row("grammars", section.grammar_bytes, "host", "at most, compiled grammars of structured output"),
    )


def _settled(
    config: ClusterConfig, family: Family, weights: StoredWeights | None, device_bytes: int | None
) -> WorkerConfig | None:
    """Returns the settings of a worker with the number of KV blocks that it will have, or None if that is not known. A
    worker finds the number in the same way when it starts, with what it measures in place of estimates."""
    section, dtype, shape = config.workers, config.model.dtype, family.shape
    settings = compose.worker_config(config)
    if config.stages is not None and section.tensor_parallel == 1:
        settings = replace(settings, side_layers=(("talker", 0),))  # The number of layers counts, and not which one.
    if not section.are_blocks_fitted():
        return settings
    if device_bytes is None or weights is None:
        return None
    row = _weights_row(weights.num_language, dtype, "cuda", section.tensor_parallel, _whole(family))
    assert row.nbytes is not None
    is_in_place = reads_in_place(section.device, dtype, section.block_size)
    workspace = worker_bytes(shape, replace(settings, num_blocks=2), 0, dtype, is_in_place=is_in_place).workspace
    free_bytes = device_bytes - CONTEXT_BYTES - row.nbytes
    room = DeviceRoom(free_bytes, device_bytes, CONTEXT_BYTES + row.nbytes)
    found = fitting_blocks(
        room, settings.device_share, workspace, block_bytes(shape, settings, dtype, is_in_place=is_in_place)
    )
    return replace(settings, num_blocks=max(1, min(found, most_blocks(shape, settings))))


def _most_blocks(config: ClusterConfig, family: Family) -> int:
    return most_blocks(family.shape, compose.worker_config(config))


def _vllm_worker(
    config: ClusterConfig,
    family: Family,
    weights: StoredWeights | None,
    others: Sequence[ProcessBudget],
    device_bytes: int | None,
) -> tuple[ProcessBudget, list[str]]:
    """Returns the budget of a worker with vLLM on GPUs, and why vLLM would not start. vLLM takes a share of its GPU
    (`gpu_memory_utilization`); its KV blocks get what the weights and a step leave of that."""
    section, dtype, shape = config.workers, config.model.dtype, family.shape
    path, num_parameters, held_bytes, num_ranks = config.pool_path, 0, None, ranks_per_worker(config)
    if weights is not None:
        parts = [(weights.num_language, weights.packed_language)]
        if shape.num_levels > 1:  # With DeepStack, vLLM loads the encoders too, although it never runs them.
            parts.append((weights.num_encoder, weights.packed_encoder))
        num_parameters = sum(count for count, _ in parts)
        held_bytes = sum((count - packed.num_values) * DTYPE_TO_BYTES[dtype] + packed.nbytes for count, packed in parts)
        held_bytes = -(-held_bytes // num_ranks)
    settings = replace(compose.worker_config(config), num_blocks=2)
    workspace = worker_bytes(shape, settings, 0, dtype, is_in_place=True).workspace
    note = f"{num_parameters / 1e6:.1f} M parameters" if weights else "no safetensors files to count"
    note += f", divided by {num_ranks} ranks" if weights and num_ranks > 1 else ""
    problems: list[str] = []
    kv_bytes, said = None, ""
    try:
        share = vllm_utilization(config, others, device_bytes)
        if share is None:
            said = "what gpu_memory_utilization leaves, which follows from what shares the GPU"
        else:
            said = f"what gpu_memory_utilization {share:g} leaves"
    except ConfigError as error:
        share = None
        problems.append(error.message)
    if share is not None and device_bytes is not None and held_bytes is not None:
        kv_bytes = int(device_bytes * share) - held_bytes - workspace - CONTEXT_BYTES
        num_layers = -(-shape.num_layers // pipeline_stages(config))  # A stage keeps nothing of other layers.
        per_token = block_bytes(shape._replace(num_layers=num_layers), settings, dtype) // settings.block_size
        num_tokens = max(0, kv_bytes) // per_token
        said += f": {num_tokens} tokens"
        longest = min(int(section.vllm.get("max_model_len") or shape.max_model_len), shape.max_model_len)
        if num_tokens < longest:
            problems.append(
                f"{path}: vLLM has room for {num_tokens} tokens in its KV blocks, and does not start with fewer than "
                f"the {longest} of the longest request; set {path}.vllm.max_model_len, spread each worker over more "
                "GPUs (tensor_parallel), or use larger ones"
            )
    rows = (
        Row("weights", held_bytes, "cuda", note),
        Row("KV", None if kv_bytes is None else max(0, kv_bytes), "cuda", said),
        Row("workspace", workspace, "cuda", f"estimate, steps of {section.max_step_tokens} tokens"),
        *_host_rows(config, family, ()),
    )
    return ProcessBudget(config.pool_deployment, section.most_replicas, rows), problems


def worker_utilization(config: ClusterConfig, model: compose.Model, device_bytes: int | None) -> float | None:
    """Returns the `gpu_memory_utilization` of a worker with vLLM that shares a GPU of this size, or None if the config
    or vLLM's default says it: the worker has its GPU alone, or the operator has set how much it takes. Raises
    ConfigError if the others leave nothing, or if the size of the GPU is not known."""
    section = config.workers
    is_stated = {"gpu_memory_utilization", "kv_cache_memory_bytes"} & section.vllm.keys()
    if section.device != "cuda" or section.gpus_per_replica >= 1 or is_stated:
        return None
    if device_bytes is None:
        raise ConfigError(
            "workers with vLLM share a GPU, but nvidia-smi does not say how large it is; set "
            f"{config.pool_path}.vllm.gpu_memory_utilization"
        )
    modalities = compose.loaded_modalities(config, model.family)
    largest = largest_items(model.family, modalities, compose.media_limits(config), compose.video_options(config))
    others = [_encoder(config, model.family, read_stored_weights(model.directory), largest)] if modalities else []
    return vllm_utilization(config, others, device_bytes)


def vllm_utilization(config: ClusterConfig, others: Sequence[ProcessBudget], device_bytes: int | None) -> float | None:
    """Returns the share of its GPU that a rank with vLLM takes, or None if that depends on a GPU of unknown size.
    `others` are the budgets of the other processes. Raises ConfigError if those that share the GPU leave nothing."""
    stated = config.workers.vllm.get("gpu_memory_utilization")
    if stated is not None:
        return float(stated)
    needs, worker = gpu_needs(config), config.pool_deployment
    if needs[worker].gpus_each >= 1:
        return VLLM_UTILIZATION
    if device_bytes is None:
        return None
    (shared,) = (each for each in shared_kinds(needs) if worker in each)
    kind_to_bytes = {each.kind: _device_bytes(each) for each in others}
    taken = sum(count * kind_to_bytes.get(kind, 0) for kind, count in shared.items() if kind != worker)
    return shared_utilization(device_bytes, taken, shared[worker])


def _device_bytes(process: ProcessBudget) -> int:
    """Returns what one process takes of its GPU, with CUDA's own part."""
    return sum(row.nbytes or 0 for row in process.rows if row.place == "cuda") + CONTEXT_BYTES


def _device_uses(config: ClusterConfig, processes: Sequence[ProcessBudget]) -> tuple[DeviceUse, ...]:
    kind_to_process = {each.kind: each for each in processes}
    uses = []
    for shared in shared_kinds({kind: need for kind, need in gpu_needs(config).items() if kind in kind_to_process}):
        taken = sum(count * _device_bytes(kind_to_process[kind]) for kind, count in shared.items())
        unknown = tuple(
            f"{row.name} of the {kind}"
            for kind in shared
            for row in kind_to_process[kind].rows
            if row.place == "cuda" and row.nbytes is None
        )
        uses.append(DeviceUse(shared, taken, unknown))
    return tuple(uses)


def _encoder(
    config: ClusterConfig, family: Family, weights: StoredWeights | None, largest: Sequence[LargestItem]
) -> ProcessBudget:
    """Returns the budget of an encoder. The estimate of its workspace assumes that the encoder is as wide as the
    language model, because the shape does not contain the encoder's own width."""
    section, dtype = config.encoders, config.model.dtype
    place = _place(section.device)
    num_patches = max([section.max_batch_cost, *(item.max_unit_cost for item in largest)])
    workspace = num_patches * family.shape.hidden_size * NUM_HIDDEN_WIDTHS * DTYPE_TO_BYTES[dtype]
    decoded = max([compose.DECODED_BATCHES * section.max_batch_cost, *(item.cost for item in largest)]) * PATCH_BYTES
    return ProcessBudget(
        "encoder",
        section.most_replicas,
        (
            _weights_row(weights and weights.num_encoder, dtype, place),
            Row("workspace", workspace, place, f"estimate, batches of {num_patches} patches"),
            Row(
                "arena",
                arena_bytes(config),
                place if config.is_arena_on_device else "host",
                _room(family, arena_bytes(config), dtype, largest),
            ),
            *_beside("spill", spill_bytes(config), "pinned, for features without room on the device"),
            Row("decoding", section.max_decode_bytes, "host", "at most, in its decode processes"),
            Row("decoded", decoded, "host", f"at most, pixels of {compose.DECODED_BATCHES} batches or one item"),
        ),
    )


def _beside(name: str, nbytes: int, note: str) -> list[Row]:
    """Returns the row of what lies on the host beside an arena on a device."""
    return [Row(name, nbytes, "host", note)] if nbytes else []


def _spoken_rows(config: ClusterConfig, family: Family, num_blocks: int) -> list[Row]:
    """Returns what a worker keeps for the talker: the rows of one hidden layer, beside its KV blocks."""
    section = config.workers
    if config.stages is None or section.tensor_parallel > 1:
        return []
    num_tokens = num_blocks * section.block_size
    nbytes = num_tokens * family.shape.hidden_size * DTYPE_TO_BYTES[config.model.dtype]
    return [Row("for speech", nbytes, _place(section.device), "at most, rows of a hidden layer for the talker")]


def _stages(
    config: ClusterConfig, model_dir: Path, family: Family, weights: StoredWeights | None
) -> list[ProcessBudget]:
    """Returns the budgets of the stages behind the thinker. Of a stage of one's own nothing is known. Raises
    ConfigError if the model can't speak."""
    assert config.stages is not None
    read_speech_traits(model_dir)
    found = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    budgets = []
    for stage in config.stages.later:
        place, dtype = _place(stage.devices), config.model.dtype
        rows: tuple[Row, ...]
        if stage.model_stage == TALKER:
            embeddings = family.shape.vocab_size * family.shape.hidden_size * DTYPE_TO_BYTES[dtype]
            rows = (
                _weights_row(weights and weights.num_talker, dtype, place),
                Row("embeddings", embeddings, place, "the thinker's, through which it reads text"),
                Row("KV", _talker_kv_bytes(found, stage, dtype), place, _blocks(stage)),
            )
        elif stage.model_stage == CODE2WAV:
            # Code2wav rounds on a device only, and token2wav nowhere (`llm_workers.speech.load_code2wav`).
            is_exact = stage.devices == "cpu" or found["model_type"] == QWEN2_5_OMNI
            dtype = "float32" if is_exact else dtype
            states = Row("states", None, place, f"of up to {stage.max_states} requests")
            rows = (_weights_row(weights and weights.num_code2wav, dtype, place), states)
        else:
            rows = (Row("weights", None, place, "a stage of your own"),)
        budgets.append(ProcessBudget(stage_name(stage), stage.replicas, rows))
    return budgets


def _talker_kv_bytes(model: dict[str, Any], stage: StageSection, dtype: str) -> int | None:
    """Returns the bytes of the talker's KV blocks, or None if the checkpoint does not say how large a position is."""
    talker = model["talker_config"]
    text = talker.get("text_config", talker)
    try:
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        per_position = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head_dim
    except KeyError:
        return None
    return int(stage.num_blocks * stage.block_size * per_position * DTYPE_TO_BYTES[dtype])


def _blocks(stage: StageSection) -> str:
    return f"{stage.num_blocks} blocks of {stage.block_size} positions"


def _kept_bytes(config: ClusterConfig) -> int:
    # Features of a worker with vLLM lie in the processes of its ranks, so it keeps none behind the prefill.
    keeps_none = config.workers.keep_features == "never" or config.workers.engine == "vllm"
    return 0 if keeps_none else config.workers.kept_bytes


def _place(device: str) -> str:
    return "host" if device == "cpu" else device


def _whole(family: Family) -> int:
    """Returns the number of parameters that every rank keeps: embeddings and head. The real number is
    lower if the model ties them."""
    return 2 * family.shape.vocab_size * family.shape.hidden_size


def _weights_row(num_parameters: int | None, dtype: str, place: str, num_ranks: int = 1, num_whole: int = 0) -> Row:
    if num_parameters is None:
        return Row("weights", None, place, "no safetensors files to count")
    note = f"{num_parameters / 1e6:.1f} M parameters"
    if num_ranks > 1:
        num_whole = min(num_whole, num_parameters)
        num_parameters = num_whole + -(-(num_parameters - num_whole) // num_ranks)
        note += f", at most {num_parameters / 1e6:.1f} M on each of {num_ranks} ranks"
    return Row("weights", num_parameters * DTYPE_TO_BYTES[dtype], place, note)


def _room(family: Family, arena_bytes: int, dtype: str, largest: Sequence[LargestItem]) -> str:
    rooms = []
    for item in largest:
        count = arena_room(arena_bytes, feature_bytes(family.shape, item.max_unit_tokens, dtype, item.num_levels))
        units = "units " if item.num_tokens > item.max_unit_tokens else ""
        rooms.append(f"room for {count} {units}of the largest {item.modality}")
    return ", ".join(rooms)


# ------------------------------------------------------------ arenas for features

FEATURES_BYTES = 16 * 10**9
STAGING_BYTES = 4 * 10**9
"""The OmniConnector article (docs/references.md) sets 16 GB of host memory for encoded features, and 4 GB for features
staged to language models, for all processes on a machine together."""
FEATURES_SHARE, STAGING_SHARE = 8, 16
"""A budget takes at most one part in this many of the machine's memory, because weights, KV blocks and decoded media
need room too."""


DEVICE_FEATURES_BYTES, DEVICE_STAGING_BYTES = 2 * 10**9, 10**9
"""The memory of a device is scarcer, and weights and KV blocks need it: an arena there is for features that workers are
about to read, and what is kept longer lies on the host."""
PINNED_STAGING_BYTES = 64 * 2**20
"""A worker stages features in at most this much memory: each lies there only while it is copied to the device."""


def arena_bytes(config: ClusterConfig) -> int:
    """Returns the size of each encoder's arena for features."""
    default_bytes = DEVICE_FEATURES_BYTES if config.is_arena_on_device else _default_arena_bytes(config)
    return config.encoders.arena_bytes or default_bytes


def spill_bytes(config: ClusterConfig) -> int:
    """Returns the size of each encoder's memory of the host for features without room on the device. It is 0 if the
    arena is on the host."""
    return (config.encoders.spill_bytes or _default_arena_bytes(config)) if config.is_arena_on_device else 0


def _default_arena_bytes(config: ClusterConfig) -> int:
    return _share(FEATURES_BYTES, FEATURES_SHARE, config.encoders.most_replicas)


def inbox_bytes(config: ClusterConfig) -> int:
    """Returns the size of the inbox, its arena for features, of each worker of the pool that the config describes."""
    section = config.workers
    if config.is_inbox_on_device:
        return section.inbox_bytes or DEVICE_STAGING_BYTES
    return section.inbox_bytes or _share(STAGING_BYTES, STAGING_SHARE, config.most_workers)


def staging_bytes(config: ClusterConfig) -> int:
    """Returns the size of each worker's pinned memory through which features may reach its device. It is 0 if the inbox
    is on the host."""
    return min(inbox_bytes(config), PINNED_STAGING_BYTES) if config.is_inbox_on_device else 0


def machine_bytes() -> int:
    """Returns the physical memory of this machine, or the limit of the process's control group if that is lower."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(total_bytes, int(limit.read()))
    except (OSError, ValueError):  # There is no such group, or the limit is "max".
        return total_bytes


def _share(budget_bytes: int, share: int, replicas: int) -> int:
    return min(budget_bytes, machine_bytes() // share) // max(replicas, 1)


# ------------------------------------------------------------ the table


def budget_lines(budget: Budget) -> list[str]:
    """Returns the table: one line per pool, and one sum per place."""
    lines = [f"memory of one replica ({budget.model_name}, {budget.dtype}):"]
    lines += [f"  largest {item.modality}: {item.num_tokens} tokens, {item.cost} patches" for item in budget.largest]
    for process in budget.processes:
        lines.append(f"  {process.kind} (x{process.num_replicas})")
        for row in process.rows:
            lines.append(f"    {row.name:<12}{_size(row.nbytes):>12}  {row.place:<5} {row.note}".rstrip())
        for place in dict.fromkeys(row.place for row in process.rows):
            here = [row for row in process.rows if row.place == place]
            uncounted = ", ".join(row.name for row in here if row.nbytes is None)
            note = f"without {uncounted}" if uncounted else ""
            lines.append(
                f"    {'sum':<12}{_size(sum(row.nbytes or 0 for row in here)):>12}  {place:<5} {note}".rstrip()
            )
    return lines + _device_lines(budget)


def _device_lines(budget: Budget) -> list[str]:
    """Returns what is on a GPU, with CUDA's own part, beside the size of the GPUs where that is known."""
    if not budget.uses:
        return []
    known = budget.device_bytes
    size = "of a size that is not known; name it with --gpus, for example 8x80GB" if known is None else _size(known)
    lines = [f"one GPU ({size}), with {_size(CONTEXT_BYTES)} for CUDA itself in each process:"]
    for use in budget.uses:
        note = f"without {', '.join(use.unknown)}" if use.unknown else ""
        if known is not None and not use.unknown:
            note = "fits" if use.taken_bytes <= known else "does not fit"
        lines.append(f"    {use.name:<20}{_size(use.taken_bytes):>12}  {note}".rstrip())
    return lines


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "?"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
