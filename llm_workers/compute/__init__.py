"""Computes steps on the device: everything of a worker that touches the model's tensors, except for sampling.

`runner` executes one `StepPlan`. `paged_kv` stores keys and values in pages and maps the rows of a step to them.
`attention` is what the model's attention layers call; it attends on any device, with C code on a CPU
(`native_attention`), or with torch's variable-length kernel on CUDA (`varlen_attention`). `cuda_graphs` records and
replays decode steps. `boot_measurements` runs made-up steps, for their costs and their memory, which `device_memory`
measures.

The service builds these parts and hands the `Runner` to the engine; each rank of a worker has its own `PagedKV` and
backend. This package knows nothing of requests, queues, messages and the origin of features, and decides nothing: the
plan says what to compute and where.
"""

from llm_workers.compute.attention import Backend, register_attention, select_backend
from llm_workers.compute.boot_measurements import calibrate, fit_blocks, measure_workspace, record_decodes
from llm_workers.compute.cuda_graphs import SIZES, GraphedModel, with_graphs
from llm_workers.compute.paged_kv import PagedKV, SequenceRows, SideRows, copy_blocks, make_side_rows
from llm_workers.compute.runner import PlacedSplice, ReferencedFeatures, Runner, splice_features

__all__ = [
    "SIZES",
    "Backend",
    "GraphedModel",
    "PagedKV",
    "PlacedSplice",
    "ReferencedFeatures",
    "Runner",
    "SequenceRows",
    "SideRows",
    "calibrate",
    "copy_blocks",
    "fit_blocks",
    "make_side_rows",
    "measure_workspace",
    "record_decodes",
    "register_attention",
    "select_backend",
    "splice_features",
    "with_graphs",
]
