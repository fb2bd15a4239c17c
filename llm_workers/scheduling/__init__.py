"""Makes every decision of the engine: what to compute next, in which blocks, and from which features.

The code here is pure and follows one rule: the computed tokens of a sequence catch up with its total tokens.
`scheduler` is the entry point and runs the life of a step; `step_planner` chooses a step's work; `standings` knows the
state of every sequence, with `prefill_queue` for the order of prompts and `decode_batch` for the sequences that decode
plainly. `sequence` describes one choice of a request. `sequence_resources` gives it blocks of the pool in `blocks` and
claims on features in `feature_references`; `prompt_reader` collects embeddings and log-probabilities of its prompt.
`step_plan` and `scheduler_events` are the values that go out: plans for the
runner and events for the engine. `pool_sizes` computes what the pools take, before there is a worker.

The engine drives the `Scheduler`; the runner and the sampling read `StepPlan` and answer with `StepResult`; the feature
store exchanges `FeatureReference` with it; the deployment checks its sizes here. This package knows nothing of tensors,
sockets and threads, and no time but the clock that it is given.
"""

from llm_workers.scheduling.blocks import BlockPool, ChainPage, chain_pages, stored_chain
from llm_workers.scheduling.feature_references import (
    FeatureReference,
    FeatureReferences,
    ReadLog,
    Reads,
    ReleasedFeature,
)
from llm_workers.scheduling.pool_sizes import (
    NUM_HIDDEN_WIDTHS,
    PAGE_TOKENS_MULTIPLE,
    USABLE_SHARE,
    DeviceRoom,
    LargestItem,
    arena_room,
    arena_shortfall,
    block_bytes,
    feature_bytes,
    fitting_blocks,
    kv_heads,
    most_blocks,
    reads_in_place,
    shortfalls,
    worker_bytes,
)
from llm_workers.scheduling.prompt_reader import SCORED_AT_ONCE, PromptReading, PromptRows, ScoredRows
from llm_workers.scheduling.scheduler import Scheduler
from llm_workers.scheduling.scheduler_events import (
    NOT_COVERED,
    PREEMPTED,
    AdmittedSequences,
    FinishedSequence,
    NeededUnit,
    NextRead,
    PrefillProgress,
    SequenceOutputs,
    SequenceTimes,
    SequenceTokens,
    StepEvents,
)
from llm_workers.scheduling.sequence import Arrival, PromptLayout, Sequence, prepare
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
    "NOT_COVERED",
    "NOT_FINITE_TOKEN",
    "NO_BLOCK",
    "NUM_HIDDEN_WIDTHS",
    "PAGE_TOKENS_MULTIPLE",
    "PREEMPTED",
    "SCORED_AT_ONCE",
    "USABLE_SHARE",
    "AdmittedSequences",
    "Arrival",
    "BlockPool",
    "ChainPage",
    "Chunk",
    "DeviceRoom",
    "FeatureReference",
    "FeatureReferences",
    "FinishedSequence",
    "Guide",
    "LargestItem",
    "NeededUnit",
    "NextRead",
    "PrefillProgress",
    "PromptLayout",
    "PromptReading",
    "PromptRows",
    "ReadLog",
    "Reads",
    "ReleasedFeature",
    "Scheduler",
    "ScoredRows",
    "SeenTokens",
    "Sequence",
    "SequenceOutputs",
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
    "block_bytes",
    "chain_pages",
    "feature_bytes",
    "fitting_blocks",
    "kv_heads",
    "most_blocks",
    "prepare",
    "reads_in_place",
    "shortfalls",
    "stored_chain",
    "worker_bytes",
]
