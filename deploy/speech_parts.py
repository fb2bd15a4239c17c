"""Builds what makes speech from the cluster config, in the same way for one process and for Ray: the connectors between
stages, the thinker's sender, and the service of each stage behind it.

The module is a part of the composition root, as `compose` is. It imports torch only where a stage is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from deploy.config import ClusterConfig
from deploy.stages_config import CODE2WAV, TALKER, StageSection, StagesSection
from fabric.contracts import ConfigError, MemberId, MemberStage, SystemClock
from fabric.transport import Plane, StageConnector
from llm_workers.worker_config import WorkerConfig
from modalities.speech_traits import SpeechTraits, read_speech_traits
from router.router_config import SpeechSettings

if TYPE_CHECKING:
    from pathlib import Path

    from llm_workers.stages import ChunkTransferAdapter, NextStageInput, StageModel, StageService

TALKER_ROWS = "talker"
"""Names the side tensor that holds the thinker's rows for the talker."""
DEFAULT_NEXT_INPUTS = {
    "thinker": "llm_workers.speech:thinker_to_talker",
    "talker": "llm_workers.speech:talker_to_code2wav",
}


def speech_settings(config: ClusterConfig, model_dir: Path) -> SpeechSettings | None:
    """Returns how the cluster speaks, or None if it gives text alone. Raises ConfigError if the model can't speak, or
    not with these workers."""
    if config.stages is None:
        return None
    traits = read_speech_traits(model_dir)
    speaking = [each for each in config.by_pool() if each.stages is not None]
    if traits.needs_all_rows and all(each.workers.tensor_parallel > 1 for each in speaking):
        raise ConfigError(
            f"stages is set, but the talker of {model_dir.name} needs rows that workers of several ranks do not store; "
            f"{speaking[0].pool_path}.tensor_parallel must be 1, not {speaking[0].workers.tensor_parallel}"
        )
    return SpeechSettings(
        traits.voices,
        traits.sample_rate,
        len(config.stages.later),
        talker_rows=TALKER_ROWS,
        needs_all_rows=traits.needs_all_rows,
    )


def with_talker_rows(settings: WorkerConfig, traits: SpeechTraits) -> WorkerConfig:
    """Returns the config of workers that store the rows which the talker needs. Workers of several ranks store none, so
    a spoken answer about media needs workers of one rank."""
    if settings.num_ranks > 1:
        return settings
    layers = ((TALKER_ROWS, traits.row_layer),)
    return replace(settings, side_layers=layers, needs_all_rows=traits.needs_all_rows)


def imported(path: str) -> object:
    """Returns what an import path names: `package.module:name`, or with a dot in place of the colon. Raises ConfigError
    if there is no such thing."""
    module_name, colon, name = path.partition(":")
    if not colon:
        module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"stages names {path!r}, which can't be imported: {error}") from error


def next_input(stage: StageSection) -> NextStageInput:
    """Returns the function that makes the next stage's input of this stage's output. Raises ConfigError."""
    path = stage.custom_process_next_stage_input_func or DEFAULT_NEXT_INPUTS.get(stage.model_stage)
    if path is None:
        raise ConfigError(
            f"stage {stage.stage_id} ({stage.model_stage}) needs custom_process_next_stage_input_func, because "
            "another stage follows it"
        )
    found = imported(path)
    if not callable(found):
        raise ConfigError(f"stages names {path!r}, which is no function")
    return cast("NextStageInput", found)


def thinker_sender(config: ClusterConfig, connectors: Mapping[str, StageConnector]) -> ChunkTransferAdapter:
    """Returns what sends the thinker's output to the next stage. Its owner starts and stops it."""
    from llm_workers.stages import ChunkSettings, ChunkTransferAdapter

    stages = config.stages
    assert stages is not None
    settings = ChunkSettings(next_input(stages.thinker), stages.async_chunk, dict(stages.thinker.extra))
    return ChunkTransferAdapter(connectors, SystemClock(), settings)


def connector_names(stages: StagesSection, stage_id: int, has_other_machines: bool) -> tuple[str, ...]:
    """Returns the connectors on which a stage is reached."""
    names = stages.connector_names(stage_id)
    return names or (("shared_memory", "nixl") if has_other_machines else ("shared_memory",))


def open_connectors(config: ClusterConfig, stage_id: int) -> dict[str, StageConnector]:
    """Opens the connectors of a replica: those on which it is reached, and those on which it reaches the next stage.
    Their owner closes them (`close_connectors`). Raises ConfigError if one can't be opened."""
    from fabric.transport import NixlStageConnector, SharedMemoryStageConnector

    stages, has_others = config.stages, config.ray.address is not None
    if stages is None:
        return {}
    neighbours = [each for each in (stage_id, stage_id + 1) if 1 <= each < len(stages.stage_args)]
    names = dict.fromkeys(name for each in neighbours for name in connector_names(stages, each, has_others))
    return {name: SharedMemoryStageConnector() if name == "shared_memory" else NixlStageConnector() for name in names}


def close_connectors(connectors: Mapping[str, StageConnector]) -> None:
    for connector in connectors.values():
        connector.close()


def member_stage(stage: StageSection, connectors: Mapping[str, StageConnector]) -> MemberStage:
    """Returns how a replica of a stage is described to the other members."""
    inboxes = tuple((name, connector.inbox) for name, connector in connectors.items())
    return MemberStage(stage.stage_id, stage_name(stage), inboxes, stage.max_num_seqs)


def stage_name(stage: StageSection) -> str:
    """Returns what people call the stage: the name of its model, without the path of its import."""
    return stage.model_stage.rpartition(":")[2]


# ------------------------------------------------------------ the stages behind the thinker


def build_stage(
    config: ClusterConfig,
    model_dir: Path,
    stage: StageSection,
    member_id: MemberId,
    plane: Plane,
    connectors: Mapping[str, StageConnector],
) -> StageService:
    """Builds a replica of a stage behind the thinker; it loads the weights of that stage alone. Raises ConfigError."""
    from llm_workers.stages import ChunkPatience, ChunkSettings, StageService, StageSettings

    stages = config.stages
    assert stages is not None
    is_last = stage is stages.later[-1]
    chunks = ChunkSettings(
        None if is_last else next_input(stage),
        stages.async_chunk,
        dict(stage.extra),
        ChunkPatience(stall_s=stages.stall_s),
    )
    traits = read_speech_traits(model_dir)
    settings = StageSettings(
        stage_id=stage.stage_id,
        model_stage=stage_name(stage),
        worker_type=stage.worker_type,
        max_num_seqs=stage.max_num_seqs,
        max_step_units=stage.step_tokens,
        num_blocks=stage.num_blocks,
        block_size=stage.block_size,
        max_states=stage.max_states,
        unit_s=traits.frame_s if is_last else None,
        is_just_in_time=is_last and stage.is_just_in_time,
        fills_steps=stage.fills_steps,
        sample_rate=traits.sample_rate,
        chunks=chunks,
    )
    return StageService(
        member_id, settings, load_stage_model(config, model_dir, stage), connectors, plane, SystemClock()
    )


def load_stage_model(config: ClusterConfig, model_dir: Path, stage: StageSection) -> StageModel:
    """Loads the model of a stage. A stage of your own names a function that takes the model's directory and the stage's
    section, and returns a `StageModel`. Raises ConfigError."""
    from llm_workers.speech import load_code2wav, load_talker

    if stage.model_stage == TALKER:
        pool = (stage.num_blocks, stage.block_size)
        return load_talker(model_dir, stage.devices, config.model.dtype, pool)
    if stage.model_stage == CODE2WAV:
        # A sound shows how its samples are rounded, and this network is small beside the others.
        dtype = "float32" if stage.devices == "cpu" else config.model.dtype
        context = stage.extra.get("left_context_frames")
        return load_code2wav(model_dir, stage.devices, dtype, None if context is None else int(context))
    if ":" not in stage.model_stage and "." not in stage.model_stage:
        raise ConfigError(
            f"stage {stage.stage_id} has the model_stage {stage.model_stage!r}, but it must be `talker`, `code2wav`, "
            "or the import path of a function (`package.module:function`)"
        )
    load = imported(stage.model_stage)
    if not callable(load):
        raise ConfigError(f"stages names {stage.model_stage!r}, which is no function")
    return cast("StageModel", load(model_dir, stage))
