"""Makes every decision of the encoder pool, without torch, Ray or a clock of its own.

`encode_job` defines the values that the others work on: jobs, waiters, calls, the interface of the forward pass, and
the shape of features. `encode_jobs` merges requests for the same medium, so that it is encoded once, and ranks the
calls that wait for it. `call_queue` keeps calls in order of rank and limits what one worker may hold. `decode_line`
refuses items that can't be encoded and chooses what is decoded next. `batcher` chooses what goes into a forward pass
and predicts how long the stages take. `feature_table` keeps features, leases and eviction.

The rest of the encoder pool drives these classes from one event loop, and benchmarks and tests drive them without
processes, messages or a model. The folder knows nothing of decoders, of how an encoder computes, of messages, or of
what a router does with features.
"""

from encoder_pool.planning.batcher import (
    CostEstimate,
    ForwardCosts,
    QueuedSound,
    QueuedUnit,
    StageCosts,
    choose_batch,
    choose_sounds,
    split_cost,
)
from encoder_pool.planning.call_queue import FirstRefused
from encoder_pool.planning.decode_line import DecodeLine, check_budget, refusal
from encoder_pool.planning.encode_job import (
    DecodeRoom,
    EncodeJob,
    EncodeWaiter,
    FeatureSpec,
    Forward,
    ForwardResult,
    ForwardUnit,
    SoundJob,
    SoundResult,
    waiter_of,
)
from encoder_pool.planning.encode_jobs import EncodeJobs
from encoder_pool.planning.feature_table import FeatureTable, LeaseKey

__all__ = [
    "CostEstimate",
    "DecodeLine",
    "DecodeRoom",
    "EncodeJob",
    "EncodeJobs",
    "EncodeWaiter",
    "FeatureSpec",
    "FeatureTable",
    "FirstRefused",
    "Forward",
    "ForwardCosts",
    "ForwardResult",
    "ForwardUnit",
    "LeaseKey",
    "QueuedSound",
    "QueuedUnit",
    "SoundJob",
    "SoundResult",
    "StageCosts",
    "check_budget",
    "choose_batch",
    "choose_sounds",
    "refusal",
    "split_cost",
    "waiter_of",
]
