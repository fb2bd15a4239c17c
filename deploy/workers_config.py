"""Defines the section of the config that describes workers: `workers`, and each entry of `more_workers`, which is a
further pool of workers in the same cluster.

The module knows nothing of the other sections. What a section of workers may not say beside them, `ClusterConfig`
checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deploy.config_values import Blocks, Bytes, Device, RayResources, Section, Switch, default_of
from deploy.scaling_config import AutoscalingSection
from llm_workers.worker_config import Speculation, WorkerConfig

FIRST_POOL = "main"
"""Names the pool of the workers that the section `workers` describes."""
PoolName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$")]
"""Names a pool. The name becomes a part of names of Ray and Kubernetes, so it is a short DNS label."""


def deployment_name(pool: str) -> str:
    """Returns the name of the deployment of a pool of workers, by which people and metrics know the pool too."""
    return "worker" if pool == FIRST_POOL else f"worker-{pool}"


class SpeculationSection(Section):
    """Configures prompt lookup: workers guess tokens from a request's own text and check them in the same step. It
    changes no answer."""

    max_tokens: int = Field(default_of(Speculation, "max_tokens"), ge=0, le=64)
    """Limits the guesses per sequence and step; 0 turns prompt lookup off."""
    min_ngram: int = Field(default_of(Speculation, "min_ngram"), ge=1)
    """Sets the smallest number of last tokens for which prompt lookup searches an earlier copy in the text."""
    max_ngram: int = Field(default_of(Speculation, "max_ngram"), ge=1)
    """Sets the largest number of these tokens. Prompt lookup uses the longest copy that it finds."""

    @model_validator(mode="after")
    def _check_order(self) -> SpeculationSection:
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram is {self.min_ngram}, but it must be at most max_ngram, which is {self.max_ngram}"
            )
        return self


class WorkerSection(Section):
    replicas: int = Field(1, ge=1)
    """Sets the number of workers."""
    autoscaling: AutoscalingSection = AutoscalingSection()
    slo_tpot_s: float = Field(0.1, gt=0)
    """Holds the time between tokens that requests should meet. Autoscaling counts as a worker's capacity what a step
    leaves of it beside its fixed part."""
    engine: Literal["weft", "vllm"] = "weft"
    """Says which engine computes: Weft's own, or vLLM in an environment of its own (docs/vllm.md)."""
    vllm: dict[str, Any] = Field({})
    """Holds further options for vLLM, by the names of its `AsyncEngineArgs`, for `engine: vllm`."""
    python: Path | None = None
    """Names the Python interpreter of workers with vLLM, the same on every node. None means that of the environment
    whose folder is named like Weft's own, with `-vllm` behind."""
    device: Device = "cpu"
    """Says where the workers compute."""
    tensor_parallel: int = Field(default_of(WorkerConfig, "num_ranks"), ge=1)
    """Sets the number of ranks of each replica; each rank is a process with a device of its own. The ranks share the
    layers and KV heads."""
    gpus_per_replica: float = Field(0, ge=0)
    """Sets the number of GPUs of each rank."""
    ray_resources: RayResources = Field({})
    """Maps custom resources of Ray to the amount that each rank takes, so that workers run only on nodes that have
    them."""
    cpus_per_replica: float = Field(0, ge=0)
    """Sets the number of CPUs that Ray reserves for each rank; 0 reserves none."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Each rank of a replica waits this many seconds for the others in a step; then the replica counts as lost."""
    block_size: int = Field(default_of(WorkerConfig, "block_size"), ge=1)
    num_blocks: Blocks = default_of(WorkerConfig, "num_blocks")
    """Sets the number of KV blocks of each worker. Together they hold `num_blocks * block_size` tokens, which all
    requests of the worker share with the prefix cache. With `auto`, a worker on a GPU takes as many as its memory
    holds beside the weights and the largest step; on a CPU `auto` is the default."""
    max_step_tokens: int = Field(default_of(WorkerConfig, "max_step_tokens"), ge=1)
    media_chunk_tokens: int | None = Field(default_of(WorkerConfig, "media_chunk_tokens"), ge=0)
    """Limits the tokens of a step while the worker has a request without media, and for two seconds after, by limiting
    prompts with media that are not more urgent. With None, nine in ten steps of texts stay below it; 0 sets none."""
    max_sequences: int = Field(default_of(WorkerConfig, "max_sequences"), ge=1)
    prefix_cache: bool = default_of(WorkerConfig, "is_prefix_cache_enabled")
    """Says whether workers keep the KV blocks of earlier prompts and use them again for prompts that begin the same."""
    inbox_bytes: Bytes | None = None
    """Sets the size of each worker's memory for features. With None, the workers share 4 GB equally,
    or a sixteenth of the machine's memory if that is less; on a device it is 1 GB."""
    inbox_device: Literal["host", "auto", "device"] = "host"
    """Says where features land: in the host's memory, or in that of the worker's GPU. `auto` means the GPU if encoders
    and workers compute on CUDA. A cluster in one process uses the host's memory."""
    keep_features: Literal["auto", "always", "never"] = default_of(WorkerConfig, "keep_features")
    """Says whether features stay in host memory after prefill; `auto` keeps those that were needed before."""
    kept_bytes: Bytes = default_of(WorkerConfig, "kept_bytes")
    grammar_bytes: Bytes = default_of(WorkerConfig, "grammar_bytes")
    """Limits the memory of all compiled grammars of structured output, as they are estimated: those that are kept for
    later requests, and those that running requests follow."""
    pull_timeout_s: float = Field(default_of(WorkerConfig, "pull_timeout_s"), gt=0)
    """Limits the time in which a worker reads one feature from an encoder; after that it asks for the feature again."""
    unit_wait_s: float = Field(default_of(WorkerConfig, "unit_wait_s"), gt=0)
    """A worker waits this many seconds for a feature before it asks the router again."""
    speculation: SpeculationSection = SpeculationSection()
    cuda_graphs: Annotated[Literal["off", "auto"], Switch] = default_of(WorkerConfig, "cuda_graphs")
    """Says whether workers record decode steps as CUDA graphs, which needs a block size that is a multiple of 256
    tokens."""
    overlap: bool = default_of(WorkerConfig, "is_overlap_enabled")
    """Says whether a worker computes a prompt up to the first medium that is not encoded yet. If not, it begins with a
    request when all its media are encoded, and the inbox must have room for all of them; that is for comparisons."""
    step_delay_s: float = Field(default_of(WorkerConfig, "step_delay_s"), ge=0)
    """Makes every step take at least this long. It is for tests and benches, like `encoders.encode_delay_s`."""
    step_delay_s_per_token: float = Field(default_of(WorkerConfig, "step_delay_s_per_token"), ge=0)
    """Adds this to `step_delay_s` for each prompt token of a step; a token after a long context counts for more."""
    step_delay_s_per_decode: float = Field(default_of(WorkerConfig, "step_delay_s_per_decode"), ge=0)
    """Adds this to `step_delay_s` for each sequence that decodes in a step."""

    def are_blocks_fitted(self) -> bool:
        """Returns whether the memory of each worker's GPU decides how many KV blocks it has."""
        return self.num_blocks == "auto" and self.device == "cuda"

    def stated_blocks(self) -> int:
        """Returns the number of KV blocks that the config states, or the default if it is `auto`."""
        return default_of(WorkerConfig, "num_blocks") if self.num_blocks == "auto" else self.num_blocks

    @property
    def first_replicas(self) -> int:
        """Returns the number of workers with which the cluster begins."""
        return self.autoscaling.first_size(self.replicas)

    @property
    def most_replicas(self) -> int:
        """Returns the largest number of workers that the cluster may have."""
        return self.autoscaling.largest_size(self.replicas)

    def unused_by_vllm(self) -> Mapping[str, float]:
        """Maps the keys that mean nothing for vLLM to their values. A value that is not 0 can't have its effect."""
        return {
            "speculation.max_tokens": self.speculation.max_tokens,
            "step_delay_s": self.step_delay_s,
            "step_delay_s_per_token": self.step_delay_s_per_token,
            "step_delay_s_per_decode": self.step_delay_s_per_decode,
        }

    @property
    def shares_gpu(self) -> bool:
        """Returns whether the workers compute on GPUs and leave a part of them to others."""
        return self.device == "cuda" and self.gpus_per_replica < 1

    @model_validator(mode="after")
    def _check_inbox(self) -> WorkerSection:
        if self.inbox_device == "device" and self.device != "cuda":
            raise ValueError(f"inbox_device is device, but device is {self.device}, which has no memory of its own")
        return self
