"""Defines the settings of one replica of a stage, and makes its scheduler from them. They are plain values; this module
reads no file and no environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fabric.contracts import Clock, ConfigError, StageKey
from llm_workers.stages.chunk_adapter import ChunkSettings
from llm_workers.stages.generation_scheduler import GenerationStageScheduler, Pacing
from llm_workers.stages.stage_model import WorkerType
from llm_workers.stages.stage_scheduler import (
    ArStageScheduler,
    ChunkSource,
    StageScheduler,
)


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Holds the settings of one replica of a stage. Raises ConfigError for settings that allow no step."""

    stage_id: int
    model_stage: str
    """Names what the stage computes, for example `talker`."""
    worker_type: WorkerType
    max_num_seqs: int = 32
    """Limits the requests in one batch."""
    max_step_units: int = 512
    """Limits the rows, or the codec frames, that one step computes."""
    num_blocks: int = 1024
    """Sets the number of KV blocks of an autoregressive stage."""
    block_size: int = 16
    max_rows: int | None = None
    """Limits the rows of one request of an autoregressive stage; None means that only the blocks do."""
    max_states: int = 256
    """Limits the requests whose state a generation stage holds."""
    unit_s: float | None = None
    """Is how long the output of one unit of a generation stage plays, in seconds; None means that nobody listens to its
    outputs while they are made."""
    is_just_in_time: bool = False
    """Says that a generation stage computes what no listener needs yet only once a request is complete."""
    fills_steps: bool = True
    """Says that a step of a generation stage takes hardly longer with more requests in it."""
    sample_rate: int = 24_000
    """Is the rate of the samples that the last stage makes, in Hz."""
    report_interval_s: float = 0.2
    chunks: ChunkSettings = field(default_factory=ChunkSettings)

    def __post_init__(self) -> None:
        names = ("max_num_seqs", "max_step_units", "num_blocks", "block_size", "max_states", "sample_rate")
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"stage {self.stage_id}: {name} must be at least 1, not {getattr(self, name)}")
        if self.worker_type not in ("ar", "generation"):
            raise ConfigError(
                f"stage {self.stage_id}: worker_type must be `ar` or `generation`, not {self.worker_type}"
            )

    def make_scheduler(
        self, source: ChunkSource, num_units_ready: Callable[[StageKey], int], clock: Clock
    ) -> StageScheduler:
        """Returns the scheduler of the stage's kind."""
        if self.worker_type == "ar":
            return ArStageScheduler(
                source,
                num_units_ready,
                self.max_num_seqs,
                self.num_blocks,
                self.block_size,
                self.max_step_units,
                self.max_rows,
            )
        pacing = None if self.unit_s is None else Pacing(self.unit_s, clock, self.is_just_in_time, self.fills_steps)
        return GenerationStageScheduler(
            source, num_units_ready, self.max_num_seqs, self.max_states, self.max_step_units, pacing
        )
