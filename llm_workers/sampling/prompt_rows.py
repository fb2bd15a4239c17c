"""Reads from the hidden states of a step what requests want of their prompts: rows and sums for embeddings, and the
log-probabilities of the prompt's own tokens.

A prompt's logits take much more memory than its hidden states, so they are computed a few rows at a time
(`SCORED_AT_ONCE`), and only the scores that are wanted leave the device. This module knows nothing of how the parts of
a prompt are put together (`llm_workers.scheduling.prompt_reader`).
"""

from __future__ import annotations

from math import inf

import numpy as np
import torch

from fabric.contracts import SequenceId
from llm_workers.sampling.step_sampling import most_probable, num_rows_of
from llm_workers.scheduling import SCORED_AT_ONCE, PromptReading, PromptRows, ScoredRows, StepPlan
from modalities.family import LanguageModel


def needs_all_rows(plan: StepPlan) -> bool:
    """Returns whether a chunk of the step needs the last hidden states of all its rows."""
    return any(chunk.reading is not None and chunk.reading.needs_all_rows for chunk in plan.others)


def read_prompts(
    model: LanguageModel, whole: torch.Tensor | None, finished: torch.Tensor, plan: StepPlan, starts: np.ndarray
) -> dict[SequenceId, PromptRows]:
    """Returns what the readings of the plan's chunks ask for. `whole` holds the last hidden states of all rows of the
    step, `(num_tokens, hidden_size)`; it may be None if no reading needs all rows. `finished` holds those of
    `rows_to_finish`. The i-th of the plan's `others` has the rows `[starts[i], starts[i + 1])`."""
    read: dict[SequenceId, PromptRows] = {}
    num_finished = plan.num_decodes
    for chunk, start in zip(plan.others, starts.tolist(), strict=False):
        num_finished += num_rows_of(chunk)
        reading = chunk.reading
        if reading is None:
            continue
        hidden: torch.Tensor | None = None
        if reading.pooling == "last":
            hidden = finished[num_finished - 1].float()
        elif reading.pooling == "mean":
            assert whole is not None
            hidden = whole[start : start + chunk.num_tokens].sum(dim=0, dtype=torch.float32)
        scores = None
        if len(reading.targets):
            assert whole is not None
            scores = _scores(model, whole[start : start + len(reading.targets)], reading)
        read[chunk.sequence_id] = PromptRows(None if hidden is None else hidden.cpu().numpy(), scores)
    return read


def _scores(model: LanguageModel, hidden: torch.Tensor, reading: PromptReading) -> ScoredRows:
    """Returns the scores of the targets. `hidden` has shape `(len(targets), hidden_size)`."""
    parts = [
        _scores_of_slice(model.logits(rows), torch.from_numpy(targets).to(hidden.device), reading.num_top)
        for rows, targets in zip(
            hidden.split(SCORED_AT_ONCE),
            np.split(reading.targets, range(SCORED_AT_ONCE, len(reading.targets), SCORED_AT_ONCE)),
            strict=True,
        )
    ]
    return ScoredRows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _scores_of_slice(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> ScoredRows:
    """Returns the scores of a few targets, from float32 logits with shape `(n, vocab)`. Where they are not finite, the
    scores have no meaning."""
    raw = logits.log_softmax(dim=-1).nan_to_num_(nan=-inf, posinf=inf, neginf=-inf)
    chosen = raw.gather(1, targets[:, None])
    ranks = (raw > chosen).sum(dim=-1) + 1
    token_ids, logprobs = targets.cpu().numpy()[:, None], chosen.cpu().numpy()
    num_top = min(num_top, raw.shape[-1])
    if num_top:
        ids, values, starts = most_probable(raw, [num_top] * len(raw))
        at = starts[:, None] + np.arange(num_top)
        token_ids = np.concatenate([token_ids, ids[at]], axis=1)
        logprobs = np.concatenate([logprobs, values[at]], axis=1)
    return ScoredRows(token_ids, logprobs, ranks.cpu().numpy())
