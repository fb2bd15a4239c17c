"""Runs the stages behind the thinker, which make speech from its text.

`stage_model` defines what a stage's engine knows of the model that it runs.
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

__all__ = [
    "ChunkAccumulator",
    "NextStageInput",
    "Payload",
    "StageChunk",
    "StageModel",
    "StageOutput",
    "StageSpan",
    "WorkerType",
]
