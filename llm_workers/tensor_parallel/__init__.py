"""Runs one worker on several ranks (docs/adr/0003).

Rank 0 is the worker that all other components know: it has the scheduler, the inbox, the splice of features, sampling
and the message plane. The other ranks, each in a rank process, hold their share of each layer's weights and KV heads
and run the same forward pass. `process_group` joins the ranks and defines what they send each other; `rank_group`
starts the rank processes, announces steps to them and notices when one is gone; `rank_model` computes the forward
passes on rank 0 and on the others.

The deployment opens a `RankGroup` for a worker with several ranks and gives it a `ParallelLanguageModel`; it also runs
`follow` in each rank process. This package knows nothing of requests, features and sampling.
"""

from llm_workers.tensor_parallel.process_group import START_TIMEOUT_S, Invitation, smallest_of_ranks
from llm_workers.tensor_parallel.rank_group import RankGroup, RankProcess
from llm_workers.tensor_parallel.rank_model import ParallelLanguageModel, Share, follow

__all__ = [
    "START_TIMEOUT_S",
    "Invitation",
    "ParallelLanguageModel",
    "RankGroup",
    "RankProcess",
    "Share",
    "follow",
    "smallest_of_ranks",
]
