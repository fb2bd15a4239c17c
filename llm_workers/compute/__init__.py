"""Holds FIXME."""

from llm_workers.compute.attention import Backend, register_attention, select_backend
from llm_workers.compute.boot_measurements import calibrate, measure_workspace
from llm_workers.compute.cuda_graphs import with_graphs
from llm_workers.compute.paged_kv import PagedKV, SequenceRows, copy_blocks, make_side_rows
from llm_workers.compute.runner import PlacedSplice, ReferencedFeatures, Runner, RunTimes, splice_features

__all__ = [
    "Backend",
    "PagedKV",
    "PlacedSplice",
    "ReferencedFeatures",
    "RunTimes",
    "Runner",
    "SequenceRows",
    "calibrate",
    "copy_blocks",
    "make_side_rows",
    "measure_workspace",
    "register_attention",
    "select_backend",
    "splice_features",
    "with_graphs",
]
