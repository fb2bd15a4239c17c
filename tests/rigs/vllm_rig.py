"""Builds workers with vLLM for the checks of `engine_contract`: features travel over NIXL, because vLLM's ranks are
processes of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contract_model import ContractModel
from engine_contract import WorkerParts
from worker_rig import WORKER

from fabric.contracts import SystemClock
from fabric.transport import LocalPlane, NixlFeatureSource
from llm_workers.vllm_engine.core_engine import VllmEngine
from llm_workers.vllm_engine.engine_args import VllmSettings, core_maker, engine_config
from llm_workers.vllm_engine.rank_inboxes import RankedSink
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_service import WorkerService
from modalities.adapter_files import read_adapter

MAX_MODEL_LEN = 1024
OVERLAPPING = "llm_workers.vllm_engine.doorstep_scheduler.OverlappingDoorstepScheduler"


def make_vllm_worker(
    model: ContractModel,
    plane: LocalPlane,
    inbox_bytes: int,
    num_blocks: int = 512,
    num_ranks: int = 1,
    num_stages: int = 1,
    max_model_len: int = MAX_MODEL_LEN,
    dtype: str = "float32",
    options: dict[str, Any] | None = None,
    *,
    is_overlapping: bool = False,
    adapters: Mapping[str, Path] | None = None,
    **config: Any,
) -> WorkerParts:
    """Builds a worker of `num_ranks` ranks with `num_blocks` blocks of 32 tokens, or of `num_stages` pipeline stages.
    `options` go to vLLM. `is_overlapping` plans each step while the last one is computed, as vLLM does on GPUs.
    `adapters` maps the names of LoRA adapters to their directories."""
    opened = {name: read_adapter(each, model.directory) for name, each in (adapters or {}).items()}
    settings = WorkerConfig(block_size=32, num_blocks=num_blocks, max_sequences=16, keep_features="never", **config)
    shape = model.family.shape
    sink = RankedSink(inbox_bytes, num_ranks)
    vllm = VllmSettings(
        model_dir=str(model.directory),
        dtype=dtype,
        block_size=settings.block_size,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens,
        is_prefix_cache_enabled=True,
        num_ranks=num_ranks,
        has_towers=shape.num_levels > 1,
        modalities=tuple(model.family.max_items),
        num_adapters=len(opened),
        max_adapter_rank=max((each.max_rank for each in opened.values()), default=0),
        is_on_cpu=True,
        options={
            "enforce_eager": True,
            "pipeline_parallel_size": num_stages,
            "max_model_len": max_model_len,
            "kv_cache_memory_bytes": num_blocks * 32 * 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim,
        }
        | (options or {}),
    )
    inbox = {
        "address": sink.address,
        "name": "worker-0",
        "inbox_bytes": inbox_bytes,
        "staging_bytes": 0,
        "device": "cpu",
        "is_on_device": False,
    }
    made = engine_config(vllm, inbox, sink.folder)
    if is_overlapping:
        made.scheduler_config.async_scheduling = True
        made.scheduler_config.scheduler_cls = OVERLAPPING
    make_core = core_maker(made, sink)
    if num_stages > 1:
        make_core = with_room_between_stages(make_core)
    clock = SystemClock()
    folders = {name: str(each.directory) for name, each in opened.items()}
    make_engine = functools.partial(VllmEngine, settings, model.family, make_core, clock, adapters=folders)
    service = WorkerService(WORKER, settings, model.family, make_engine, plane, sink, clock)
    return WorkerParts(service, sink, NixlFeatureSource("encoder-0", 1 << 24))


def with_room_between_stages(make_core: Callable[[Callable[[], None]], Any]) -> Callable[[Callable[[], None]], Any]:
    """Returns what creates a core whose later pipeline stages have room for what the stage ahead sends. On GPUs vLLM
    makes this room when it measures the memory of a step, and it leaves that out on CPUs."""

    def make_room(rank: Any) -> None:
        runner = rank.model_runner
        if rank.rank > 0:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def make(on_rank_lost: Callable[[], None]) -> Any:
        core = make_core(on_rank_lost)
        core.collective_rpc(make_room)
        return core

    return make
