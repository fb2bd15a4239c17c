"""Builds what makes speech from the cluster config, in the same way for one process and for Ray: the connectors between
stages, the thinker's sender, and the service of each stage behind it.

The module is a part of the composition root, as `compose` is. It imports torch only where a stage is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from deploy.config import ClusterConfig
from deploy.stages_config import StageSection, StagesSection
from fabric.contracts import ConfigError, MemberStage, SystemClock
from fabric.transport import StageConnector
from modalities.speech_traits import SpeechTraits, read_speech_traits
from router.router_config import SpeechSettings

if TYPE_CHECKING:
    from pathlib import Path

    from llm_workers.stages import ChunkTransferAdapter, NextStageInput

MEDIA_ROWS = "talker"
"""Names the side tensor that holds the rows of media for the talker."""
DEFAULT_NEXT_INPUTS = {
    "thinker": "llm_workers.speech:thinker_to_talker",
    "talker": "llm_workers.speech:talker_to_code2wav",
}


def speech_settings(config: ClusterConfig, model_dir: Path) -> SpeechSettings | None:
    """Returns how the cluster speaks, or None if it gives text alone. Raises ConfigError if the model can't speak."""
    if config.stages is None:
        return None
    traits = read_speech_traits(model_dir)
    return SpeechSettings(traits.voices, traits.sample_rate, len(config.stages.later), MEDIA_ROWS)


def side_layers(config: ClusterConfig, traits: SpeechTraits | None) -> tuple[tuple[str, int], ...]:
    """Returns the side tensors of the workers. Workers of several ranks store none, so a spoken answer about media
    needs workers of one rank."""
    if traits is None or config.workers.tensor_parallel > 1:
        return ()
    return ((MEDIA_ROWS, traits.media_layer),)


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


def member_stage(stage: StageSection, connectors: Mapping[str, StageConnector]) -> MemberStage:
    """Returns how a replica of a stage is described to the other members."""
    inboxes = tuple((name, connector.inbox) for name, connector in connectors.items())
    return MemberStage(stage.stage_id, stage.model_stage.rpartition(":")[2], inboxes, stage.max_num_seqs)


OpenConnector = Callable[[str], StageConnector]
"""Opens the connector of the given name."""
