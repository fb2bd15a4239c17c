"""Defines the section of the configuration that describes the stages of a pipeline, which make speech of the thinker's
text. Its keys are those of the documentation on async chunks (`docs/references.md`).

Stage 0 is the thinker, whose replicas the section `workers` describes; only its function of the next stage's input may
be set here. The module knows nothing of how a stage computes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from deploy.config_values import Device, RayResources, Section

Setting = int | float | str
TALKER, CODE2WAV = "talker", "code2wav"
AR_STEP_TOKENS, GENERATION_STEP_FRAMES, CPU_STEP_FRAMES = 512, 3200, 50
CONNECTOR_NAMES = {"SharedMemoryConnector": "shared_memory", "NixlConnector": "nixl"}
"""Maps the names of connectors in vLLM-Omni's files to those of Weft."""


class StageSection(Section):
    """Describes one stage."""

    stage_id: int = Field(ge=0)
    """Is the place of the stage in the pipeline, from 0."""
    model_stage: str = Field(min_length=1)
    """Names what the stage computes: `thinker`, `talker` or `code2wav`, or for a stage of your own the import path of
    the function that loads its model (`package.module:function`)."""
    worker_type: Literal["ar", "generation"] = "ar"
    """Says how the stage is scheduled: an `ar` stage computes one position after the other, with KV blocks; a
    `generation` stage computes what has come in one pass."""
    replicas: int = Field(1, ge=1)
    """Sets the number of replicas of the stage."""
    devices: Device = "cpu"
    """Says where the replicas compute."""
    gpus_per_replica: float = Field(0, ge=0)
    """Sets the number of GPUs of each replica."""
    ray_resources: RayResources = Field({})
    """Maps custom resources of Ray to the amount that each replica takes."""
    cpus_per_replica: float = Field(0, ge=0)
    """Sets the number of CPUs that Ray reserves for each replica; 0 reserves none."""
    max_num_seqs: int = Field(32, ge=1)
    """Limits the requests in one batch."""
    max_step_tokens: int | None = Field(None, ge=1)
    """Limits the positions, or the codec frames, that one step computes. By default an `ar` stage computes 512, and a
    `generation` stage 3,200, but code2wav on a CPU 50: what becomes urgent waits for the step under way, and a core
    gains nothing from larger batches."""
    just_in_time: bool | None = None
    """Says that the last stage computes a chunk only when its listener needs it soon or when the answer is complete,
    which leaves the processor to the stage before it. By default it does so with a share of a GPU."""
    num_blocks: int = Field(1024, ge=2)
    """Sets the number of KV blocks of an `ar` stage."""
    block_size: int = Field(16, ge=1)
    """Sets the positions of one KV block."""
    max_states: int = Field(256, ge=1)
    """Limits the requests whose state a `generation` stage holds."""
    custom_process_next_stage_input_func: str | None = None
    """Names, by import path, the function that makes the next stage's input of this stage's output; None means that of
    the model."""
    extra: dict[str, Setting] = Field({})
    """Holds settings of the stage's own functions, such as `codec_chunk_frames`."""

    @property
    def step_tokens(self) -> int:
        """Returns `max_step_tokens`, or its default."""
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        if self.worker_type == "ar":
            return AR_STEP_TOKENS
        return GENERATION_STEP_FRAMES if self.fills_steps else CPU_STEP_FRAMES

    @property
    def fills_steps(self) -> bool:
        """Says whether a step takes hardly longer with more requests in it, as code2wav does not on a CPU."""
        return self.model_stage != CODE2WAV or self.devices != "cpu"

    @property
    def is_just_in_time(self) -> bool:
        """Returns `just_in_time`, or its default."""
        return 0 < self.gpus_per_replica < 1 if self.just_in_time is None else self.just_in_time


class StageLinkSection(Section):
    """Describes how the output of one stage reaches the next."""

    from_stage: int = Field(ge=0)
    """Is the stage that sends."""
    to_stage: int = Field(ge=1)
    """Is the stage that receives, which is the next one."""
    name: Literal["auto", "shared_memory", "nixl", "SharedMemoryConnector", "NixlConnector"] = "auto"
    """Names the connector; `auto` means shared memory between processes of one machine and NIXL between machines."""
    extra: dict[str, Setting] = Field({})
    """Holds settings of the connector."""

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the connectors that may be used, or none for `auto`."""
        return () if self.name == "auto" else (CONNECTOR_NAMES.get(self.name, self.name),)


DEFAULT_STAGES = (
    StageSection(stage_id=0, model_stage="thinker"),
    StageSection(stage_id=1, model_stage=TALKER),
    StageSection(stage_id=2, model_stage=CODE2WAV, worker_type="generation", max_num_seqs=64),
)
"""Describes the pipeline of Qwen3-Omni, and that of Qwen2.5-Omni, whose code2wav is called token2wav there."""


class StagesSection(Section):
    """Describes the pipeline that speaks. An empty section means that of the model, with one replica of each
    stage."""

    async_chunk: bool = True
    """Says whether a stage sends what it has made in chunks. If not, it sends everything at its end; that is for
    comparisons."""
    stage_args: tuple[StageSection, ...] = Field(DEFAULT_STAGES, min_length=2)
    """Lists the stages, the thinker first."""
    connectors: tuple[StageLinkSection, ...] = ()
    """Describes the links between stages; a link that is not listed is `auto`."""
    stall_s: float = Field(30.0, gt=0)
    """Limits how long a request waits for its next chunk; then it ends with an error."""

    @property
    def thinker(self) -> StageSection:
        return self.stage_args[0]

    @property
    def later(self) -> tuple[StageSection, ...]:
        """Returns the stages behind the thinker."""
        return self.stage_args[1:]

    def connector_names(self, to_stage: int) -> tuple[str, ...]:
        """Returns the connectors on which a stage may be reached, or none if the place decides."""
        return next((each.names for each in self.connectors if each.to_stage == to_stage), ())

    @model_validator(mode="after")
    def _check_order(self) -> StagesSection:
        ids = [each.stage_id for each in self.stage_args]
        if ids != list(range(len(ids))):
            raise ValueError(f"stage_args has the stage ids {ids}, but they must be 0, 1, 2 and so on, in this order")
        for link in self.connectors:
            if link.to_stage != link.from_stage + 1 or link.to_stage >= len(ids):
                raise ValueError(
                    f"connectors has a link from stage {link.from_stage} to stage {link.to_stage}, "
                    f"but each stage leads to the next one, and the last one is {len(ids) - 1}"
                )
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> StagesSection:
        for stage in self.later:
            if stage.devices == "cuda" and stage.gpus_per_replica == 0:
                raise ValueError(f"stage {stage.stage_id} has devices: cuda, but its gpus_per_replica is 0; set both")
            if stage.devices == "cpu" and stage.gpus_per_replica > 0:
                raise ValueError(f"stage {stage.stage_id} has gpus_per_replica, but devices: cpu; set both for a GPU")
        return self
