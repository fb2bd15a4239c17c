"""Runs one worker on several ranks (docs/adr/0003).

Rank 0 is the worker that all other components know: it has the scheduler, the inbox, the splice of features, sampling
and the message plane. The other ranks, each in a rank process, hold their share of each layer's weights and KV heads
and run the same forward pass.
"""

from llm_workers.tensor_parallel.process_group import Invitation
from llm_workers.tensor_parallel.rank_group import RankGroup, RankProcess
from llm_workers.tensor_parallel.rank_model import ParallelLanguageModel, Share, follow

__all__ = [
    "Invitation",
    "ParallelLanguageModel",
    "RankGroup",
    "RankProcess",
    "Share",
    "follow",
]
