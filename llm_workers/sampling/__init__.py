"""Holds FIXME."""

from llm_workers.sampling.grammar import GrammarCompiler
from llm_workers.sampling.step_sampling import rows_to_finish, sample_step

__all__ = [
    "GrammarCompiler",
    "rows_to_finish",
    "sample_step",
]
