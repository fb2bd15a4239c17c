"""Runs the stages behind the thinker, which make speech from its text.

`stage_model` defines what a stage's engine knows of the model that it runs. `thinker_outlet` hands what the thinker's
engine makes to the next stage. `transfer_adapter` moves data between a stage and its connectors in the background;
`chunk_adapter` is the adapter for chunks, with the bookkeeping of `chunk_inputs` and the bytes of `chunk_payload`.
`stage_scheduler` decides what each step of an autoregressive stage computes, and `generation_scheduler` that of the
others; `stage_engine` runs the thread that computes it.
`stage_service` is one replica of a stage around that engine, with the `stage_settings`.
"""

from llm_workers.stages.chunk_adapter import ChunkSettings, ChunkTransferAdapter
from llm_workers.stages.chunk_inputs import ChunkInputs, ChunkPatience, Disposition, LoadedChunks
from llm_workers.stages.chunk_payload import ChunkName, ReceivedChunk, decode_chunk, encode_chunk
from llm_workers.stages.generation_scheduler import GenerationStageScheduler, Pacing
from llm_workers.stages.stage_engine import EndedStage, EngineOutput, StageEngine, StageNumbers, StageTally, StageUpdate
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
from llm_workers.stages.stage_scheduler import (
    ArStageScheduler,
    ChunkSource,
    RestoredRequest,
    StageScheduler,
    StageStatus,
    StageStep,
)
from llm_workers.stages.stage_service import StageService, to_int16
from llm_workers.stages.stage_settings import StageSettings
from llm_workers.stages.thinker_outlet import ChunkSender, ThinkerOutlet, ThinkerRows, media_positions
from llm_workers.stages.transfer_adapter import SaveRetries, SaveTask, TransferAdapter

__all__ = [
    "ArStageScheduler",
    "ChunkAccumulator",
    "ChunkInputs",
    "ChunkName",
    "ChunkPatience",
    "ChunkSender",
    "ChunkSettings",
    "ChunkSource",
    "ChunkTransferAdapter",
    "Disposition",
    "EndedStage",
    "EngineOutput",
    "GenerationStageScheduler",
    "LoadedChunks",
    "NextStageInput",
    "Pacing",
    "Payload",
    "ReceivedChunk",
    "RestoredRequest",
    "SaveRetries",
    "SaveTask",
    "StageChunk",
    "StageEngine",
    "StageModel",
    "StageNumbers",
    "StageOutput",
    "StageScheduler",
    "StageService",
    "StageSettings",
    "StageSpan",
    "StageStatus",
    "StageStep",
    "StageTally",
    "StageUpdate",
    "ThinkerOutlet",
    "ThinkerRows",
    "TransferAdapter",
    "WorkerType",
    "decode_chunk",
    "encode_chunk",
    "media_positions",
    "to_int16",
]
