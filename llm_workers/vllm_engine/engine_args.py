"""Makes vLLM's config out of Weft's settings and the options that the operator hands through.

Options of `workers.vllm` go to vLLM's `AsyncEngineArgs` as they are. Those that Weft decides itself, because routing,
hashes or features depend on them, are refused here by name, with the key of Weft that decides. This module is imported
in the environment in which vLLM is installed, and imports vLLM only when it is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from fabric.contracts import ConfigError
from llm_workers.vllm_engine.model_overrides import CompleteConfig, needs_completion
from llm_workers.vllm_engine.patient_waits import wait_patiently
from llm_workers.vllm_engine.rank_inboxes import RankedSink
from llm_workers.vllm_engine.shared_names import remove_shared_names

_PACKAGE = "llm_workers.vllm_engine"
RESERVED_TO_REASON: Mapping[str, str] = {
    "model": "model.path names the model",
    "tokenizer": "the router tokenises",
    "dtype": "model.dtype says it",
    "tensor_parallel_size": "workers.tensor_parallel says it",
    "data_parallel_size": "workers.replicas says it: each replica is a worker of its own to the router",
    "block_size": "workers.block_size says it",
    "max_num_seqs": "workers.max_sequences says it",
    "max_num_batched_tokens": "workers.max_step_tokens says it",
    "enable_prefix_caching": "workers.prefix_cache says it",
    "scheduling_policy": "requests are served by priority and age",
    "worker_extension_cls": "requests carry the positions of their media",
    "scheduler_cls": "the doorstep needs a scheduler of its own",
    "ec_transfer_config": "features come from the encoder pool",
    "ec_manager_config": "features come from the encoder pool",
    "kv_events_config": "the worker reports its blocks itself",
    "limit_mm_per_prompt": "media.limit_mm_per_prompt says it",
    "enable_mm_embeds": "features come from the encoder pool",
    "runner": "a worker generates",
    "enable_lora": "model.adapters names the adapters",
    "lora_target_modules": "an adapter is served whole",
    "enable_tower_connector_lora": "all adapters share the features of the encoder pool",
    "default_mm_loras": "clients choose an adapter by its name",
}
"""Maps each option that Weft decides to the reason that the error gives."""
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # Events name blocks by their whole hashes.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # A fork would copy NIXL's threads' locks.
    "VLLM_HOST_IP": "127.0.0.1",  # The ranks of a worker are processes of one machine.
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # Weft has downloaded the model.
}
"""Holds the variables that the process of a vLLM worker needs before vLLM is imported."""


HELLO_TIMEOUT_S = 60.0
"""Limits how long the inboxes of the ranks may take to say that they are there, after vLLM has started the ranks."""


@dataclass(frozen=True)
class VllmSettings:
    """Holds what Weft decides of a vLLM worker, and the operator's options."""

    model_dir: str
    dtype: str
    block_size: int
    """Counts the tokens of a KV block."""
    max_sequences: int
    max_step_tokens: int
    is_prefix_cache_enabled: bool
    num_ranks: int = 1
    """Counts the ranks of tensor parallelism."""
    has_towers: bool = True
    """Says whether vLLM loads the model's vision tower although it never runs it: it has to for models with
    DeepStack."""
    modalities: tuple[str, ...] = ("image", "video")
    """Lists the modalities that the model takes."""
    num_adapters: int = 0
    """Counts the LoRA adapters."""
    max_adapter_rank: int = 0
    """Is the largest rank of an adapter."""
    is_on_cpu: bool = False
    """Says whether the ranks compute on a CPU."""
    options: Mapping[str, Any] = field(default_factory=dict)


def check_reserved(options: Mapping[str, Any], path: str = "workers") -> None:
    """Raises ConfigError for an option that Weft decides itself. `path` names the section of the config that has the
    options. It needs no vLLM."""
    for key in options:
        if key in RESERVED_TO_REASON:
            raise ConfigError(f"{path}.vllm.{key} can't be set, because {RESERVED_TO_REASON[key]}")


def check_options(options: Mapping[str, Any], path: str = "workers") -> None:
    """Raises ConfigError for an option that Weft decides itself or that vLLM does not know."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    check_reserved(options, path)
    known = {each.name for each in fields(AsyncEngineArgs)}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"{path}.vllm has keys that vLLM does not know: {', '.join(unknown)}")


def engine_config(settings: VllmSettings, inbox: Mapping[str, Any], folder: Path) -> Any:
    """Returns vLLM's config for a worker whose ranks have inboxes like `inbox` (`feature_connector.InboxPlace`, as a
    mapping). Side effect: vLLM keeps the sockets of its ranks in `folder`, and not in the folder for temporary files,
    where it would leave them. Raises ConfigError if vLLM refuses an option."""
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    from vllm.config import ECTransferConfig, KVEventsConfig
    from vllm.config.ec_manager_config import EncoderCacheManagerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    check_options(settings.options)
    own: dict[str, Any] = {
        "model": settings.model_dir,
        "dtype": settings.dtype,
        "block_size": settings.block_size,
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": settings.max_step_tokens,
        "tensor_parallel_size": settings.num_ranks,
        # A single rank would otherwise run in this process, and its launches of kernels would wait for the interpreter
        # lock, which the worker's event loop holds while it sends tokens.
        "distributed_executor_backend": "mp",
        "enable_prefix_caching": settings.is_prefix_cache_enabled,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "generation_config": "vllm",
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        "ec_transfer_config": ECTransferConfig(
            ec_connector="FeatureConnector",
            ec_connector_module_path=f"{_PACKAGE}.feature_connector",
            ec_role="ec_consumer",
            ec_connector_extra_config=dict(inbox),
        ),
        "worker_extension_cls": f"{_PACKAGE}.rank_extension.RankExtension",
        "ec_manager_config": EncoderCacheManagerConfig(
            encoder_cache_manager_cls=f"{_PACKAGE}.doorstep_scheduler.DoorstepCacheManager"
        ),
    }
    if settings.modalities:
        own["skip_mm_profiling"] = True
        # vLLM loads no tower whose modalities have the limit 0.
        unloaded = [each for each in settings.modalities if not settings.has_towers or each == "audio"]
        if unloaded:
            own |= {"limit_mm_per_prompt": dict.fromkeys(unloaded, 0), "enable_mm_embeds": True}
    if settings.num_adapters:
        own |= _lora_options(settings)
    options = dict(settings.options)
    if needs_completion(settings.model_dir):
        options["hf_overrides"] = CompleteConfig(options.get("hf_overrides") or {})
    try:
        config = AsyncEngineArgs(**{**own, **options}).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM refuses its config: {error}") from error
    is_overlapping = config.scheduler_config.async_scheduling
    kind = "OverlappingDoorstepScheduler" if is_overlapping else "DoorstepScheduler"
    config.scheduler_config.scheduler_cls = f"{_PACKAGE}.doorstep_scheduler.{kind}"
    return config


def _lora_options(settings: VllmSettings) -> dict[str, Any]:
    """Returns vLLM's options for the adapters: all of them may be in one step, and stay in memory, unless the operator
    says otherwise. `deploy` has compared the operator's options with the adapters.

    On a CPU there is one place more than adapters, which stays empty: vLLM's operators there compute the rows of
    requests without an adapter with the last place, where the kernels for GPUs leave them out."""
    from vllm.config.lora import MaxLoRARanks

    taken = sorted(get_args(MaxLoRARanks))
    most_at_once = int(settings.options.get("max_loras", settings.num_adapters + settings.is_on_cpu))
    return {
        "enable_lora": True,
        "max_loras": most_at_once,
        "max_cpu_loras": max(most_at_once, settings.num_adapters),
        "max_lora_rank": next(rank for rank in taken if rank >= settings.max_adapter_rank),
    }


def core_maker(config: Any, sink: RankedSink) -> Callable[[Callable[[], None]], Any]:
    """Returns what creates the engine core of this config (`core_engine.MakeCore`)."""

    def make_core(on_rank_lost: Callable[[], None]) -> Any:
        from vllm import envs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        envs.disable_envs_cache()  # An earlier core of this process may have read the environment for good.
        core = EngineCore(config, Executor.get_class(config), log_stats=False, executor_fail_callback=on_rank_lost)
        if not sink.wait_for_ranks(HELLO_TIMEOUT_S):
            core.shutdown()
            raise ConfigError("the ranks of vLLM have opened no inbox")
        core.collective_rpc("remove_shared_names")  # All processes of the worker have mapped their memory by now.
        remove_shared_names()
        if config.device_config.device_type == "cpu":
            for answers in getattr(core.model_executor, "response_mqs", ()):
                wait_patiently(answers._spin_condition)
        return core

    return make_core
