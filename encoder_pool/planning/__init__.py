"""Makes every decision of the encoder pool, without torch, Ray or a clock of its own.

`admission` decides which items are refused. `encode_job` and `encode_jobs` merge requests for the same medium, so that
it is encoded once. `turns` ranks calls and `call_queue` keeps them in order of rank. `decode_line` chooses what is
decoded next, and `batcher` chooses what goes into a forward pass. `shares` limits what one worker may hold.
`forward_job` describes one forward pass. `features` and `lease_book` keep features, leases and eviction, and
`lifecycle` lists the states of a feature. `cost` predicts how long a forward pass takes, `sizes` estimates how much
memory decoded inputs take, `tally` keeps sums for reports, and `feature_log` numbers the changes of the cache that are
sent to routers.
"""

from encoder_pool.planning.batcher import (
    CostEstimate,
    ForwardCosts,
    QueuedSound,
    QueuedUnit,
    choose_batch,
    choose_sounds,
    split_cost,
)
from encoder_pool.planning.call_queue import FirstRefused
from encoder_pool.planning.decode_line import DecodeLine, check_budget, refusal
from encoder_pool.planning.encode_job import (
    BusyTime,
    CallTurn,
    DecodeRoom,
    EncodeJob,
    EncoderTally,
    EncodeWaiter,
    Forward,
    ForwardResult,
    ForwardUnit,
    SoundJob,
    SoundResult,
    waiter_of,
)
from encoder_pool.planning.encode_jobs import EncodeJobs
from encoder_pool.planning.feature_table import FeatureLog, FeatureSpec, FeatureTable, LeaseKey

__all__ = [
    "BusyTime",
    "CallTurn",
    "CostEstimate",
    "DecodeLine",
    "DecodeRoom",
    "EncodeJob",
    "EncodeJobs",
    "EncodeWaiter",
    "EncoderTally",
    "FeatureLog",
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
    "check_budget",
    "choose_batch",
    "choose_sounds",
    "refusal",
    "split_cost",
    "waiter_of",
]
