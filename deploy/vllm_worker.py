"""Builds workers whose engine is vLLM: says in which Python they run, opens their sinks, and makes vLLM's settings.

vLLM pins other versions of some libraries than Weft, so these workers run in an environment of their own
(`make install-vllm`). Routers and encoders never import what stands behind the functions of this module.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deploy import compose
from deploy.config import ClusterConfig
from deploy.gpu_devices import find_devices
from deploy.lora_adapters import open_adapters
from deploy.sizing import staging_bytes, worker_utilization
from deploy.topology import run_nvidia_smi
from deploy.worker_pools import pipeline_stages
from fabric.contracts import DTYPE_TO_BYTES, ConfigError, MemberId, SystemClock
from fabric.transport import FeatureSink, Plane
from llm_workers.vllm_engine.engine_args import ENVIRONMENT, VllmSettings, check_reserved, core_maker, engine_config
from llm_workers.vllm_engine.rank_inboxes import RankedSink
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_service import WorkerService
from modalities.family import Family
from modalities.speech_traits import read_speech_traits
from modalities.text import TextCodec

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""Names the variable that says to which cores vLLM binds the threads of a worker on a CPU."""
CPU_BLOCK_TOKENS = 32
"""vLLM's attention on CPUs takes blocks of a multiple of this many tokens."""
CHECK_TIMEOUT_S = 120.0
"""Limits how long vLLM may take to be imported for a check of its options; it takes 10 to 20 s on two cores."""


def worker_python(config: ClusterConfig) -> Path:
    """Returns the interpreter of workers with vLLM: `workers.python`, or that of the environment beside this one whose
    name ends in `-vllm`."""
    return config.workers.python or Path(f"{sys.prefix}-vllm") / "bin" / "python"


def check_environment(config: ClusterConfig) -> None:
    """Raises ConfigError if workers of a pool are to run vLLM and their interpreter is not on this machine."""
    for each in config.by_pool():
        if each.workers.engine == "vllm" and not (python := worker_python(each)).is_file():
            path = each.pool_path
            raise ConfigError(
                f"{path}.engine is vllm, but {python} is not there: `make install-vllm` makes its environment, and "
                f"{path}.python names the interpreter of another one"
            )


_CHECK = """
import json, sys
from fabric.contracts import ConfigError
from llm_workers.vllm_engine.engine_args import check_options
try:
    check_options(*json.load(sys.stdin))
except ConfigError as error:
    print(error.message, file=sys.stderr)
    sys.exit(3)
"""
_REFUSED = 3


def check_options_there(config: ClusterConfig, timeout_s: float = CHECK_TIMEOUT_S) -> list[str]:
    """Asks the interpreter of each pool of workers with vLLM whether vLLM knows the options in its `vllm`, in a process
    that ends after that. Returns one sentence for each pool whose options were not checked. Raises ConfigError for an
    option that Weft decides itself or that vLLM does not know, and if the interpreter can't import vLLM."""
    path_to_reason = {each.pool_path: _check_options_of(each, timeout_s) for each in config.by_pool()}
    return [f"the options in {path}.vllm are not checked: {why}" for path, why in path_to_reason.items() if why]


def _check_options_of(config: ClusterConfig, timeout_s: float) -> str:
    """Returns why the options of one pool were not checked, or an empty text if they are in order."""
    section = config.workers
    if section.engine != "vllm":
        return ""
    check_reserved(section.vllm, config.pool_path)
    if pipeline_stages(config) > 1 and section.device == "cpu":
        key = f"{config.pool_path}.vllm.pipeline_parallel_size"
        raise ConfigError(f"{key} is above 1, and vLLM has pipeline stages on GPUs only")
    python = worker_python(config)
    if not python.is_file():
        return f"{python} is not on this machine (`make install-vllm` makes its environment)"
    if not section.vllm:
        return ""
    try:
        done = subprocess.run(
            [python, "-P", "-c", _CHECK],
            input=json.dumps([section.vllm, config.pool_path]),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=os.environ | process_variables(config),
        )
    except subprocess.TimeoutExpired:
        return f"{python} did not answer within {timeout_s:g} s"
    except OSError as error:
        raise ConfigError(f"the interpreter of workers with vLLM can't run: {python}: {error.strerror}") from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(last if done.returncode == _REFUSED else f"{python} can't import vLLM: {last}")
    return ""


def silence_hint(config: ClusterConfig, model_dir: Path) -> str:
    """Returns a sentence that says that the cluster answers in text alone, if the model can speak and all its workers
    run vLLM, or an empty text."""
    if any(section.engine != "vllm" for section in config.all_workers):
        return ""
    try:
        read_speech_traits(model_dir)
    except ConfigError:
        return ""
    return (
        "the model can speak, but workers with vLLM answer in text alone; spoken answers need workers.engine: weft "
        "and stages"
    )


def process_variables(config: ClusterConfig) -> Mapping[str, str]:
    """Returns the variables that a process needs before it imports vLLM."""
    # vLLM would bind each worker to the same cores of a machine, so no process is bound unless the operator says where.
    bound = os.environ.get(BINDING, "nobind")
    threads = {"OMP_NUM_THREADS": str(config.threads_per_replica), BINDING: bound}
    return dict(ENVIRONMENT) | (threads if config.workers.device == "cpu" else {})


def vllm_worker_config(config: ClusterConfig, family: Family) -> WorkerConfig:
    """Returns the config of a worker with vLLM. On a GPU, vLLM decides how many blocks there are, and refuses to start
    if the longest request does not fit."""
    worker = compose.worker_config(config)
    if config.workers.device == "cpu":
        block_size = -(-worker.block_size // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
        num_blocks = -(-worker.num_blocks * worker.block_size // block_size)
    else:
        block_size = worker.block_size
        num_blocks = -(-family.shape.max_model_len // block_size)
    # The bytes of features lie in the processes of the ranks, so the worker keeps none behind the prefill.
    return replace(worker, block_size=block_size, num_blocks=num_blocks, keep_features="never")


def open_vllm_sink(config: ClusterConfig, total_bytes: int) -> RankedSink:
    """Returns the sink of a worker with vLLM."""
    return RankedSink(total_bytes, config.workers.tensor_parallel)


def build_vllm_worker(
    config: ClusterConfig, model: compose.Model, member_id: MemberId, plane: Plane, sink: FeatureSink
) -> WorkerService:
    """Builds a worker around vLLM. The model is loaded when the service starts. Raises ConfigError for a model or an
    option that can't be served."""
    from llm_workers.sampling import GrammarCompiler
    from llm_workers.vllm_engine.core_engine import VllmEngine

    assert isinstance(sink, RankedSink)
    family, section = model.family, config.workers
    worker = vllm_worker_config(config, family)
    rank_bytes = token_kv_bytes(family, config.model.dtype, section.tensor_parallel)
    if section.device == "cpu":
        room: dict[str, Any] = {"kv_cache_memory_bytes": worker.num_blocks * worker.block_size * rank_bytes}
    else:
        devices = find_devices(run_nvidia_smi, os.environ)
        share = worker_utilization(config, model, min((each.memory_bytes for each in devices), default=None))
        room = {} if share is None else {"gpu_memory_utilization": share}
    adapters = open_adapters(config, model.directory)
    settings = VllmSettings(
        model_dir=str(model.directory),
        dtype=config.model.dtype,
        block_size=worker.block_size,
        max_sequences=worker.max_sequences,
        max_step_tokens=worker.max_step_tokens,
        is_prefix_cache_enabled=worker.is_prefix_cache_enabled,
        num_ranks=section.tensor_parallel,
        has_towers=family.shape.num_levels > 1,
        modalities=tuple(family.max_items),
        num_adapters=len(adapters),
        max_adapter_rank=max((each.max_rank for each in adapters.values()), default=0),
        is_on_cpu=section.device == "cpu",
        options=room | dict(section.vllm),
    )
    inbox = {
        "address": sink.address,
        "name": str(member_id),
        "inbox_bytes": sink.usage().total_bytes,
        "staging_bytes": staging_bytes(config),
        "device": section.device,
        "is_on_device": config.is_inbox_on_device,
    }
    made = engine_config(settings, inbox, sink.folder)
    clock = SystemClock()
    grammars = GrammarCompiler(
        TextCodec.load(model.directory),
        family.shape.vocab_size,
        compose.grammar_limits(config).compiling,
        worker.grammar_bytes,
    )
    folders = {name: str(adapter.directory) for name, adapter in adapters.items()}
    make_engine = partial(VllmEngine, worker, family, core_maker(made, sink), clock, adapters=folders)
    service = WorkerService(member_id, worker, family, make_engine, plane, sink, clock, grammars)
    service.classify_links(compose.link_class_of(config))
    return service


def token_kv_bytes(family: Family, dtype: str, num_ranks: int) -> int:
    """Returns the bytes of the keys and values of one token, in all layers, in each of `num_ranks` ranks of tensor
    parallelism. With more ranks than heads, several ranks have the same head."""
    shape = family.shape
    num_heads = -(-shape.num_kv_heads // num_ranks)
    return 2 * shape.num_layers * num_heads * shape.head_dim * DTYPE_TO_BYTES[dtype]
