"""Computes the memory of each process from the config and the model.

`plan_budget` adds up the pools of an encoder, of a worker, and of each stage that speaks. `budget_lines` makes a table
of them for people, and `refuse_if_too_small` refuses a config that is too small when a cluster starts. `arena_bytes`
and `inbox_bytes` say how large the arenas for features are, which the plan counts and the replicas allocate: what the
config says, and otherwise a published budget, limited by the memory of the machine.

The module reads config files, the headers of weight files and the size of the machine's memory. It allocates nothing
and knows nothing of processes that run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy import compose
from deploy.config import ClusterConfig
from deploy.sizing.largest_media import largest_items
from deploy.sizing.stored_weights import StoredWeights, read_stored_weights
from deploy.speech_parts import stage_name
from deploy.stages_config import CODE2WAV, TALKER, StageSection
from fabric.contracts import DTYPE_TO_BYTES, ConfigError, Unavailable
from llm_workers.scheduling import (
    NUM_HIDDEN_WIDTHS,
    LargestItem,
    arena_room,
    arena_shortfall,
    feature_bytes,
    shortfalls,
    worker_bytes,
)
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
    """Says why the cluster could never serve some request within the limits; it is empty if the cluster can serve
    all."""


def plan_budget(
    config: ClusterConfig,
    model: compose.Model,
    weights: StoredWeights | None,
    largest: Sequence[LargestItem] | None = None,
) -> Budget:
    """Returns the memory budget of a cluster that serves this model. `largest` are the largest media that the config
    permits, if the caller knows them already: finding them takes longer than all else."""
    family = model.family
    modalities = compose.loaded_modalities(config, family)
    if largest is None:
        largest = largest_items(family, modalities, compose.media_limits(config), compose.video_options(config))
    dtype, shape = config.model.dtype, family.shape
    problems = shortfalls(shape, compose.worker_config(config), inbox_bytes(config), dtype, largest)
    processes = [_worker(config, family, weights, largest)]
    if modalities:
        processes.insert(0, _encoder(config, family, weights, largest))
        for item in largest:
            problems += arena_shortfall("encoders: arena_bytes", shape, arena_bytes(config), dtype, item)
    if config.stages is not None:
        processes += _stages(config, model.directory, family, weights)
    return Budget(model.name, dtype, tuple(largest), tuple(processes), tuple(problems))


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


def check_budget(config: ClusterConfig) -> tuple[Budget | None, str]:
    """Returns the budget for `weft check`, or None and the reason why the model's config can't be read. Reads no
    weights."""
    try:
        config, model = compose.open_model(config)
        return plan_budget(config, model, read_stored_weights(model.directory)), ""
    except (ConfigError, Unavailable) as error:
        return None, error.message


# ------------------------------------------------------------ processes

# ---------------------------------------------------------------- processes


def _worker(
    config: ClusterConfig, family: Family, weights: StoredWeights | None, largest: Sequence[LargestItem]
) -> ProcessBudget:
    section, dtype = config.workers, config.model.dtype
    taken = worker_bytes(family.shape, compose.worker_config(config), inbox_bytes(config), dtype)
    place = _place(section.device)
    return ProcessBudget(
        "worker",
        section.most_replicas,
        (
            _weights_row(weights and weights.num_language, dtype, place, section.tensor_parallel, _whole(family)),
            Row("KV", taken.kv, place, f"{section.stated_blocks()} blocks of {section.block_size} tokens"),
            Row("workspace", taken.workspace, place, f"estimate, steps of {section.max_step_tokens} tokens"),
            *_spoken_rows(config, family),
            Row("inbox", taken.inbox, "host", _room(family, taken.inbox, dtype, largest)),
            Row("kept", _kept_bytes(config), "host", f"at most, keep_features: {section.keep_features}"),
            Row("grammars", section.grammar_bytes, "host", "at most, compiled grammars of structured output"),
        ),
    )


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
            Row("arena", arena_bytes(config), "host", _room(family, arena_bytes(config), dtype, largest)),
            Row("decoding", section.max_decode_bytes, "host", "at most, in its decode processes"),
            Row("decoded", decoded, "host", f"at most, pixels of {compose.DECODED_BATCHES} batches or one item"),
        ),
    )


def _spoken_rows(config: ClusterConfig, family: Family) -> list[Row]:
    """Returns what a worker keeps for the talker: the rows of one hidden layer, beside its KV blocks."""
    section = config.workers
    if config.stages is None or section.tensor_parallel > 1:
        return []
    num_tokens = section.stated_blocks() * section.block_size
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
    return 0 if config.workers.keep_features == "never" else config.workers.kept_bytes


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


def arena_bytes(config: ClusterConfig) -> int:
    """Returns the size of each encoder's arena for features."""
    section = config.encoders
    return section.arena_bytes or _share(FEATURES_BYTES, FEATURES_SHARE, section.most_replicas)


def inbox_bytes(config: ClusterConfig) -> int:
    """Returns the size of each worker's inbox, its arena for features."""
    section = config.workers
    return section.inbox_bytes or _share(STAGING_BYTES, STAGING_SHARE, section.most_replicas)


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

# ---------------------------------------------------------------- the table


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
    return lines


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "?"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
