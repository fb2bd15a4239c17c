"""Runs the stages behind the thinker, which make speech from its text.

`stage_model` defines what a stage's engine knows of the model that it runs. `thinker_outlet` hands what the thinker's
engine makes to the next stage.
"""

from llm_workers.stages.stage_model import (
    ChunkAccumulator,
    NextStageInput,
    Payload,
    StageChunk,
    StageModel,
    StageOutput,
    StageSpan,
    WorkerType,
)
from llm_workers.stages.thinker_outlet import ChunkSender, ThinkerOutlet

__all__ = [
    "ChunkAccumulator",
    "ChunkSender",
    "NextStageInput",
    "Payload",
    "StageChunk",
    "StageModel",
    "StageOutput",
    "StageSpan",
    "ThinkerOutlet",
    "WorkerType",
]
