"""Builds workers with vLLM for the checks of `engine_contract`: features travel over NIXL, because vLLM's ranks are
processes of their own."""

from __future__ import annotations

import functools
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

MAX_MODEL_LEN = 1024


def make_vllm_worker(
    model: ContractModel,
    plane: LocalPlane,
    inbox_bytes: int,
    num_blocks: int = 512,
    num_ranks: int = 1,
    max_model_len: int = MAX_MODEL_LEN,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> WorkerParts:
    """Builds a worker of `num_ranks` ranks with `num_blocks` blocks of 32 tokens. `options` go to vLLM."""
    settings = WorkerConfig(block_size=32, num_blocks=num_blocks, max_sequences=16, keep_features="never", **config)
    shape = model.family.shape
    sink = RankedSink(inbox_bytes, num_ranks)
    vllm = VllmSettings(
        model_dir=str(model.directory),
        dtype="float32",
        block_size=settings.block_size,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens,
        is_prefix_cache_enabled=True,
        num_ranks=num_ranks,
        has_towers=shape.num_levels > 1,
        modalities=tuple(model.family.max_items),
        options={
            "enforce_eager": True,
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
    make_core = core_maker(engine_config(vllm, inbox, sink.folder), sink)
    clock = SystemClock()
    make_engine = functools.partial(VllmEngine, settings, model.family, make_core, clock)
    service = WorkerService(WORKER, settings, model.family, make_engine, plane, sink, clock)
    return WorkerParts(service, sink, NixlFeatureSource("encoder-0", 1 << 24))
