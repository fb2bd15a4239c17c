"""Makes every decision of the engine: what to compute next, in which blocks, and from which features.

The code here is pure. It follows one rule: the computed tokens of a sequence catch up with its total tokens.
`Scheduler` is the entry point, and `plan` describes the steps that it hands out. This package knows nothing of tensors
and sockets.
"""

from llm_workers.scheduling.blocks import BlockPool
from llm_workers.scheduling.feature_references import FeatureReference, FeatureReferences, Reads, ReleasedFeature
from llm_workers.scheduling.pool_sizes import (
    NUM_HIDDEN_WIDTHS,
    LargestItem,
    arena_room,
    arena_shortfall,
    check_shares,
    feature_bytes,
    kv_heads,
    shortfalls,
    worker_bytes,
)
from llm_workers.scheduling.scheduler import Scheduler
from llm_workers.scheduling.scheduler_events import (
    AdmittedSequences,
    FinishedSequence,
    NeededUnit,
    NextRead,
    SchedulerStats,
    SequenceTimes,
    SequenceTokens,
    StepEvents,
)
from llm_workers.scheduling.sequence import Arrival
from llm_workers.scheduling.step_plan import (
    BROKEN_GRAMMAR_TOKEN,
    NO_BLOCK,
    NOT_FINITE_TOKEN,
    Chunk,
    Guide,
    SeenTokens,
    Splice,
    StepCosts,
    StepPlan,
    StepResult,
    StepWork,
    TokenCounts,
)

__all__ = [
    "BROKEN_GRAMMAR_TOKEN",
    "NOT_FINITE_TOKEN",
    "NO_BLOCK",
    "NUM_HIDDEN_WIDTHS",
    "AdmittedSequences",
    "Arrival",
    "BlockPool",
    "Chunk",
    "FeatureReference",
    "FeatureReferences",
    "FinishedSequence",
    "Guide",
    "LargestItem",
    "NeededUnit",
    "NextRead",
    "Reads",
    "ReleasedFeature",
    "Scheduler",
    "SchedulerStats",
    "SeenTokens",
    "SequenceTimes",
    "SequenceTokens",
    "Splice",
    "StepCosts",
    "StepEvents",
    "StepPlan",
    "StepResult",
    "StepWork",
    "TokenCounts",
    "arena_room",
    "arena_shortfall",
    "check_shares",
    "feature_bytes",
    "kv_heads",
    "shortfalls",
    "worker_bytes",
]
