"""The cluster's configuration: YAML in, one frozen tree out. Unknown keys are refused; nothing reads it from the
environment. What each part needs is handed to it as that part's own small config (see `compose.py`)."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deploy.yaml_marks import Mark, locate, parse_with_marks
from encoder_pool.config import EncoderConfig
from encoder_pool.decode_limits import DecodeLimits
from fabric.errors import ConfigError
from llm_workers.config import Speculation, WorkerConfig
from modalities.family import MediaOptions
from modalities.plugin import MediaLimits
from modalities.probing import ProbeLimits
from modalities.registry import REGISTRY
from router.config import RouterConfig
from router.planning.cluster import PlannerSettings

PROBE_LIMITS = ProbeLimits()
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(value: object) -> object:
    """`512MiB` -> 536870912; integers pass. Raises ValueError for another unit."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"not a size: {value!r} (write a number of bytes or e.g. 512MiB)")
    return int(float(match[1]) * _UNITS[match[2]])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Device = Literal["cpu", "cuda"]


def _parse_switch(value: object) -> object:
    """YAML 1.1 reads a bare `on` or `off` as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = BeforeValidator(_parse_switch)


def default_of(owner: type, name: str) -> Any:
    """The default of a field of `owner`, the config of the part that a key is handed to: stated there alone."""
    default = next(field.default for field in dataclasses.fields(owner) if field.name == name)
    assert default is not dataclasses.MISSING, f"{owner.__name__}.{name} has no default"
    return default


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    path: Path | None = None
    """A transformers model directory; none means the demo model."""
    name: str | None = None
    """What clients call it; default: the directory's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Of weights, KV pages and features. `auto`: the checkpoint's own, or float32 where all runs on CPUs that have no
    products of that (`deploy/compute_dtype.py`)."""


class ServerSection(_Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    max_body_bytes: Bytes = default_of(RouterConfig, "max_body_bytes")
    drain_s: float = Field(30.0, ge=0)
    """How long accepted requests may take to end once the cluster is told to stop; new ones are answered 503."""


class RouterSection(_Section):
    replicas: int = Field(1, ge=1)
    max_in_flight: int = Field(default_of(RouterConfig, "max_in_flight"), ge=1)
    max_bodies_bytes: Bytes = default_of(RouterConfig, "max_bodies_bytes")
    """Bodies of all requests in flight together, of each router."""
    max_index_blocks: int = Field(default_of(PlannerSettings, "max_index_blocks"), ge=1)
    """KV blocks whose places each router knows; about 150 bytes each."""
    max_index_items: int = Field(default_of(PlannerSettings, "max_index_items"), ge=1)
    """Media whose encoders each router knows."""
    max_num_choices: int = Field(default_of(RouterConfig, "max_num_choices"), ge=1)
    min_priority: int = Field(default_of(RouterConfig, "min_priority"), ge=-(2**31), lt=2**31)
    """Most urgent `priority` of a request. Lower numbers go first at encoders and workers, always, and starve others;
    with 0 no request goes before those that ask for nothing."""
    heartbeat_s: float = Field(default_of(RouterConfig, "heartbeat_s"), gt=0)
    lease_s: float = Field(default_of(RouterConfig, "lease_s"), gt=0)
    dispatch_timeout_s: float = Field(
        default_of(RouterConfig, "dispatch_timeout_s"), gt=default_of(RouterConfig, "encode_grace_s")
    )
    """Of one attempt. Of it, `encode_grace_s` are for media on their way to an encoder, and no encoder's time."""
    capacity_wait_s: float = Field(120.0, ge=0)
    """How long a request waits for a worker, or an encoder of its media, to come back; then it is answered 503."""


def _check_modality(name: str) -> str:
    if not REGISTRY.has_modality(name):
        raise ValueError(f"unknown modality {name!r}; known are {', '.join(REGISTRY.modalities)}")
    return name


Modality = Annotated[str, AfterValidator(_check_modality)]


class MediaSection(_Section):
    """What clients may send, how it is sampled where a request does not say, and what happens when it fails."""

    limit_mm_per_prompt: dict[Modality, Annotated[int, Field(ge=0)]] = {}
    """Most items of a modality in one request, where it is less than what the model takes; 0 refuses it."""
    sampling: Literal["fps", "uniform", "keyframe"] = default_of(MediaOptions, "sampling")
    fps: float = Field(default_of(MediaOptions, "fps"), gt=0)
    max_frames: int = Field(default_of(MediaOptions, "max_frames"), ge=1)
    max_video_tokens: int = Field(default_of(MediaOptions, "max_tokens"), ge=1)
    """Of all videos of a request together."""
    num_pooled_frames: int = Field(default_of(MediaOptions, "num_pooled_frames"), ge=1)
    """So many temporal patches are averaged into one; 1 is off."""
    keep_fraction: float = Field(default_of(MediaOptions, "keep_fraction"), gt=0, le=1)
    """Of a temporal patch's rows, so many are kept, evenly spread."""
    max_bytes_per_item: Bytes = default_of(MediaLimits, "max_bytes_per_item")
    max_image_pixels: int = Field(default_of(MediaLimits, "max_image_pixels"), ge=1)
    max_video_pixels: int = Field(default_of(MediaLimits, "max_video_pixels"), ge=1)
    """Of one frame."""
    max_video_seconds: float = Field(default_of(MediaLimits, "max_video_seconds"), gt=0)
    max_video_frames: int = Field(default_of(MediaLimits, "max_video_frames"), ge=1)
    max_audio_seconds: float = Field(default_of(MediaLimits, "max_audio_seconds"), gt=0)
    """Of a sound, and of a video's sound track that the model hears."""
    probe_processes: int = Field(2, ge=0)
    """Helpers of each router that read the headers of videos, of sounds, and of pictures whose first bytes do not say
    it all; 0: a thread of the router itself."""
    probe_cpu_s: dict[Modality, Annotated[float, Field(gt=0)]] = {}
    """Processor time that reading a header may take; by default 1 s of a picture, 5 s of others."""
    probe_timeout_s: float = Field(PROBE_LIMITS.timeout_s, gt=0)
    """By the clock: a file that is later than this meets a machine that is too busy (503)."""
    probe_memory_bytes: Bytes = PROBE_LIMITS.memory_bytes
    """Most memory of each of these helpers."""
    on_encode_failure: Literal["error", "reduce", "text_only"] = default_of(RouterConfig, "on_encode_failure")
    """`reduce`: once more with every other frame, or half the sides; `text_only`: and then without the medium."""
    encode_timeout_ms: dict[Modality, Annotated[int, Field(ge=1)]] = {}
    """How long encoding an item may take, its wait at the encoder included; by default 10 s of a picture, 20 s of a
    sound, 60 s of a video. An encoder that is too busy says so by then, and another is tried."""


Seconds = Annotated[float, Field(gt=0)]


def _for_all(value: object) -> object:
    """A number is every modality's."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return dict.fromkeys(REGISTRY.modalities, value) if is_number else value


class EncoderSection(_Section):
    replicas: int = Field(1, ge=0)
    modalities: tuple[Modality, ...] | None = Field(None, min_length=1)
    """What each of them loads; none: all that the model takes."""
    device: Device = "cpu"
    gpus_per_replica: float = Field(0, ge=0)
    arena_bytes: Bytes | None = None
    """For features, of each encoder; none: 16 GB over the encoders, or an eighth of the machine's memory."""
    max_batch_cost: int = Field(default_of(EncoderConfig, "max_batch_cost"), ge=1)
    """Patches (or mel frames) of one forward: 16 pictures of 448 x 448. Four times as many may lie decoded."""
    max_items_in_flight: int = Field(default_of(EncoderConfig, "max_items_in_flight"), ge=1)
    """Items decoded, or being decoded, that wait for their forward."""
    max_queue_cost: int = Field(default_of(EncoderConfig, "max_queue_cost"), ge=1)
    feature_lease_s: float = Field(default_of(EncoderConfig, "lease_s"), gt=0)
    decode_processes: int = Field(default_of(EncoderConfig, "num_decode_processes"), ge=0)
    """With more than one, a long video never holds up the decoding of a picture."""
    decode_cpu_s: Annotated[dict[Modality, Seconds], BeforeValidator(_for_all)] = {}
    """Processor time: an item that takes a decode process more is refused (400). By default 8 s of a picture, 16 s of a
    sound, 48 s of a video; one number is for all."""
    decode_timeout_s: Annotated[dict[Modality, Seconds], BeforeValidator(_for_all)] = {}
    """By the clock: an item that is later than this meets a machine that is too busy (503). By default 9 s of a
    picture, 18 s of a sound, 54 s of a video: less than `media.encode_timeout_ms`."""
    decode_memory_bytes: Bytes = default_of(DecodeLimits, "memory_bytes")
    """Most memory of each decode process; an item that takes more is refused."""
    max_decode_bytes: Bytes = default_of(DecodeLimits, "total_bytes")
    """Most memory that items take together while they are decoded, by their headers: others wait."""
    mel_on_device: Annotated[Literal["auto", "on", "off"], Switch] = "auto"
    """Whether sounds are resampled and transformed on the encoder's device, not in decode processes; `auto`: on CUDA.
    Sounds of more than max_batch_cost mel frames never are."""
    encode_delay_s: float = Field(default_of(EncoderConfig, "encode_delay_s"), ge=0)
    """Fault injection for tests: every forward is preceded by this pause."""


class SpeculationSection(_Section):
    """Prompt lookup: guesses from a request's own text, checked in the same step. It changes no answer."""

    max_tokens: int = Field(default_of(Speculation, "max_tokens"), ge=0, le=64)
    """Guesses per sequence and step, at most; 0 is off."""
    min_ngram: int = Field(default_of(Speculation, "min_ngram"), ge=1)
    max_ngram: int = Field(default_of(Speculation, "max_ngram"), ge=1)
    """How many of the last tokens must be found again: at least and at most."""

    @model_validator(mode="after")
    def _check_order(self) -> SpeculationSection:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram is {self.min_ngram}, max_ngram {self.max_ngram}")
        return self


class WorkerSection(_Section):
    replicas: int = Field(1, ge=1)
    device: Device = "cpu"
    tensor_parallel: int = Field(default_of(WorkerConfig, "num_ranks"), ge=1)
    """Ranks of each replica, a process and a device each; they share its layers and KV heads."""
    gpus_per_replica: float = Field(0, ge=0)
    """Of each rank."""
    step_timeout_s: float = Field(60.0, gt=0)
    """How long the ranks of a replica wait for each other in a step before they give the replica up."""
    block_size: int = Field(default_of(WorkerConfig, "block_size"), ge=1)
    num_blocks: int = Field(default_of(WorkerConfig, "num_blocks"), ge=2)
    max_step_tokens: int = Field(default_of(WorkerConfig, "max_step_tokens"), ge=1)
    max_sequences: int = Field(default_of(WorkerConfig, "max_sequences"), ge=1)
    prefix_cache: bool = default_of(WorkerConfig, "is_prefix_cache_enabled")
    inbox_bytes: Bytes | None = None
    """For features, of each worker; none: 4 GB over the workers, or a sixteenth of the machine's memory."""
    keep_features: Literal["auto", "always", "never"] = default_of(WorkerConfig, "keep_features")
    """Whether features stay in host memory after prefill: `auto` keeps those that were needed before."""
    kept_bytes: Bytes = default_of(WorkerConfig, "kept_bytes")
    pull_timeout_s: float = Field(default_of(WorkerConfig, "pull_timeout_s"), gt=0)
    unit_wait_s: float = Field(default_of(WorkerConfig, "unit_wait_s"), gt=0)
    """How long a worker awaits a feature before it asks the router again."""
    speculation: SpeculationSection = SpeculationSection()
    cuda_graphs: Annotated[Literal["off", "auto"], Switch] = default_of(WorkerConfig, "cuda_graphs")
    """Whether decode steps are recorded as CUDA graphs; needs blocks of a multiple of 256 tokens."""


LogLevel = Literal["debug", "info", "warning", "error"]


class LoggingSection(_Section):
    level: LogLevel = "info"
    """Of Weft's own modules; libraries are heard from `warning` on."""
    levels: dict[str, LogLevel] = {}
    """Of single loggers, by name: `router`, `llm_workers.engine`, `uvicorn`."""
    format: Literal["text", "json"] = "text"
    to: Literal["files", "terminal"] = "files"
    """A file for each process in a folder of this run, which `weft serve` names when it starts; or the standard error
    of `weft serve`, where lines of all processes meet."""
    dir: Path | None = None
    """Above the folders of runs, on each machine; none: weft/logs in the user's folder for state."""
    max_file_bytes: Bytes = 64 * 2**20
    """A file that grows beyond it is put aside; the last three are kept."""


class RaySection(_Section):
    address: str | None = None
    """An existing cluster; none starts one on this machine for as long as `weft serve` runs."""
    cluster_name: str = Field("weft", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Of this cluster on that Ray, where it names the Serve application and the directory. Each cluster has its own."""
    temp_dir: Path | None = None


class ClusterConfig(_Section):
    """One model, its router, encoders and workers."""

    model: ModelSection = ModelSection()
    server: ServerSection = ServerSection()
    router: RouterSection = RouterSection()
    media: MediaSection = MediaSection()
    encoders: EncoderSection = EncoderSection()
    workers: WorkerSection = WorkerSection()
    ray: RaySection = RaySection()
    logging: LoggingSection = LoggingSection()
    allow_shared_gpu: bool = False
    """Encoders and workers take whole GPUs unless this is set."""
    threads_per_replica: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _check_devices(self) -> ClusterConfig:
        for name, section in (("encoders", self.encoders), ("workers", self.workers)):
            gpus = section.gpus_per_replica
            if section.device == "cuda" and gpus == 0:
                raise ValueError(f"{name}: device is cuda but gpus_per_replica is 0")
            if section.device == "cpu" and gpus > 0:
                raise ValueError(f"{name}: gpus_per_replica is {gpus:g} but device is cpu")
            if gpus % 1 and not self.allow_shared_gpu:
                raise ValueError(
                    f"{name}: gpus_per_replica {gpus:g} shares a GPU; set allow_shared_gpu: true to mean it"
                )
        return self


class Problem(_Section):
    """One thing that is wrong with a config file, and where."""

    mark: Mark | None
    key: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.mark.line}, column {self.mark.column}: " if self.mark else ""
        return f"{where}{self.key or '(file)'}: {self.message}"


def check_config(text: str) -> tuple[ClusterConfig | None, list[Problem]]:
    """Parses and validates. Returns the config, or every problem that was found with its line and key."""
    try:
        data, marks = parse_with_marks(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = Mark(line=mark.line + 1, column=mark.column + 1) if mark else None
        return None, [Problem(mark=at, key="", message=error.problem or str(error))]
    if data is None:
        data = {}
    if not isinstance(data, dict):
        return None, [Problem(mark=Mark(line=1, column=1), key="", message="the file must be a mapping")]
    try:
        return ClusterConfig.model_validate(data), []
    except ValidationError as error:
        return None, [_problem(item, marks) for item in error.errors()]


def _problem(item: object, marks: dict[tuple[str | int, ...], Mark]) -> Problem:
    assert isinstance(item, dict)
    location = tuple(item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = _unknown_key(location)
    return Problem(mark=locate(location, marks), key=".".join(map(str, location)), message=message)


def _unknown_key(location: tuple[str | int, ...]) -> str:
    import difflib

    model: type[BaseModel] = ClusterConfig
    for step in location[:-1]:
        annotation = model.model_fields[str(step)].annotation
        assert isinstance(annotation, type)
        model = annotation
    near = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known keys are {', '.join(model.model_fields)}"
    return f"unknown key{hint}"


def load_config(path: Path | None) -> ClusterConfig:
    """From a file, or the laptop default. Raises ConfigError that lists every problem."""
    path = path or Path(__file__).parent / "configs" / "laptop.yaml"
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    config, problems = check_config(text)
    if config is None:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return config
