"""Builds Weft's own engine on a device: KV pages, scheduler, runner and the thread that drives them.

`llm_workers.engine` runs the turns and is free of torch. This module adds what needs torch: it allocates the pages,
chooses the attention and the CUDA graphs, and measures the device before the first request. It knows nothing of calls,
planes or routers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from fabric.contracts import Clock, context_scale_tokens
from llm_workers.compute import (
    SIZES,
    GraphedModel,
    PagedKV,
    ReferencedFeatures,
    Runner,
    SideRows,
    calibrate,
    fit_blocks,
    make_side_rows,
    measure_workspace,
    record_decodes,
    select_backend,
    with_graphs,
)
from llm_workers.engine import Engine
from llm_workers.engine_interface import Update
from llm_workers.scheduling import Scheduler, StepCosts, kv_heads
from llm_workers.stages import ChunkTransferAdapter, ThinkerOutlet, ThinkerRows
from llm_workers.tensor_parallel import START_TIMEOUT_S, smallest_of_ranks
from llm_workers.worker_config import WorkerConfig
from modalities.family import Family, LanguageModel


class OwnEngine(Engine):
    """An `OwnEngine` is Weft's own `WorkerEngine`: the engine thread with a runner on the model's device."""

    def __init__(
        self,
        config: WorkerConfig,
        family: Family,
        model: LanguageModel,
        clock: Clock,
        on_update: Callable[[Update], None],
        sender: ChunkTransferAdapter | None = None,
    ) -> None:
        """Allocates the KV pages on the model's device. The engine calls `on_update` in its own thread. `sender` takes
        what it makes for requests with a next stage; the engine starts and stops it."""
        shape = family.shape
        heads = kv_heads(shape, config.num_ranks)
        kv = PagedKV(shape.num_layers, config.num_blocks, config.block_size, heads, model.dtype, model.device)
        scheduler = Scheduler(config, shape.max_model_len, clock, context_scale_tokens(shape.hidden_size))
        backend = select_backend("auto", kv)
        self._measure = partial(measure_workspace, model, kv, backend, family, config)
        if config.cuda_graphs == "auto" and config.num_ranks == 1 and not config.side_layers:
            model = with_graphs(model, kv, shape.max_model_len)
        self._has_graphs = isinstance(model, GraphedModel)
        features = ReferencedFeatures(scheduler.references)
        least_s = (lambda plan: config.least_step_s(*scheduler.work(plan))) if config.least_step_s(1, 1.0) else None
        side = make_side_rows(model, kv, config.side_layers)
        self._runner = Runner(model, kv, features, backend, side, least_s)
        self._config, self._family, self._sender = config, family, sender
        outlet = None
        if sender is not None:
            rows = None if side is None else partial(read_rows, side)
            outlet = ThinkerOutlet(sender, rows, needs_all_rows=config.needs_all_rows)
        super().__init__(scheduler, self._runner, clock, on_update, outlet)

    def start(self) -> None:
        if self._sender is not None:
            self._sender.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        if self._sender is not None:
            self._sender.stop()

    async def prepare(self, costs: StepCosts) -> None:
        """Fits `costs` to a few forward passes, which run in a separate thread, records the CUDA graphs if there are
        any, and measures the largest step if the config asks for it. Raises ConfigError if the model's numbers are not
        finite or if there is no room for the largest step."""
        await asyncio.to_thread(calibrate, self._runner, self._family, self._config, costs, self._clock)
        if self._has_graphs:
            await asyncio.to_thread(record_decodes, self._runner, self._family, self._config, SIZES)
        if self._config.is_workspace_measured:
            # This runs in the thread that imported torch, because torch's profiler complains in other threads.
            self._measure()

    def seconds_by_part(self) -> Mapping[str, float]:
        """Returns the seconds since the start by the part of a step, in the order of the parts."""
        step, run = self.times, self._runner.times
        return {
            "schedule": step.schedule_s,
            "inputs": run.inputs_s,
            "splice": run.splice_s,
            "forward": run.forward_s,
            "sample": run.sample_s,
            "output": step.commit_s,
        }


def with_fitted_blocks(config: WorkerConfig, family: Family, model: LanguageModel) -> WorkerConfig:
    """Returns the config with the number of KV blocks that the device has room for, if it asks for that. Every rank of
    a worker must call it with the share that it has loaded, because all get the smallest number. Raises ConfigError if
    there is no room."""
    agree = partial(smallest_of_ranks, timeout_s=START_TIMEOUT_S) if config.num_ranks > 1 else int
    return fit_blocks(model, family, config, agree)


def read_rows(side: SideRows, block_ids: npt.NDArray[np.int64], start: int, end: int) -> ThinkerRows:
    """Returns stored rows of a sequence on the host; `thinker_outlet.ReadRows` describes the arguments and the form. A
    worker has one side layer at most."""
    (name,) = side.names
    rows = side.rows(name, block_ids, start, end).cpu()
    if rows.dtype == torch.bfloat16:
        return cast("ThinkerRows", rows.view(torch.uint16).numpy())
    return cast("ThinkerRows", rows.float().numpy())
