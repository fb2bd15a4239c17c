"""Turns hidden states into tokens: computes the logits of the requested rows, constrains them, draws tokens and
verifies drafts.

`sample_step` does all of this for one step. A chunk with drafts (guessed tokens) is drawn at the token before the
drafts and at each draft, all in one call. A draw depends on (seed, choice, index) alone, so a draft is right exactly if
it equals the draw at its place, at any temperature. `distributions` changes and draws from single rows; what is done
for a step as a whole stands here: the masks of the grammars, and the log-probabilities of the drawn tokens.

This module knows nothing of the KV or of features, nor of how a grammar is written: a `Guide` sets the bits of its
mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fabric.contracts import SamplingParams, SequenceId, TokenLogprobs
from llm_workers.sampling.distributions import (
    Draw,
    Penalised,
    apply_logit_bias,
    apply_penalties,
    bar_tokens,
    sample_tokens,
)
from llm_workers.scheduling import BROKEN_GRAMMAR_TOKEN, Chunk, Guide, StepPlan, StepResult
from modalities.family import LanguageModel

# ---------------------------------------------------------------- a step


def sample_step(model: LanguageModel, hidden: torch.Tensor, plan: StepPlan) -> StepResult:
    """Draws for all of the plan's `decodes`, and for each of its `others` that has `sampling`. `hidden` has shape
    `(n, hidden_size)` and holds the last hidden states of `rows_to_finish`, in that order. A token is negative where
    the logits are not finite or the grammar is broken.

    The result also says for each of the `others`, with or without `sampling`, whether its rows are finite. The last row
    of a chunk shows this: in every layer it attends to all other rows, and a value that is not finite stays so at any
    weight, even at zero. For a decode, its token shows it. Tokens and flags reach the host in one transfer."""
    sampled: list[SampledChunk] = []
    at = list(range(plan.num_decodes))
    last_rows: list[int] = []
    num_rows = len(at)
    for chunk in plan.others:
        first, num_rows = num_rows, num_rows + num_rows_of(chunk)
        last_rows.append(num_rows - 1)
        if chunk.sampling is not None:
            sampled.append(SampledChunk(chunk, chunk.sampling, len(at)))
            at += range(first, num_rows)
    spoiled = _spoiled(hidden, last_rows)
    if not at:
        return StepResult({}, not_finite=_named(plan.others, spoiled.tolist()))
    if len(at) < len(hidden):
        hidden = hidden.index_select(0, torch.tensor(at, device=hidden.device))
    logits = model.logits(hidden).contiguous()
    scored = [one for one in sampled if one.params.num_top_logprobs is not None]
    raw = logits[[row for one in scored for row in one.rows]].log_softmax(dim=-1) if scored else None
    broken = _constrain(logits, sampled)
    fetched: list[int] = torch.cat([sample_tokens(logits, _draws(plan, sampled)), spoiled]).tolist()
    tokens, flags = fetched[: len(at)], fetched[len(at) :]
    for row in broken:
        tokens[row] = BROKEN_GRAMMAR_TOKEN
    plain = plan.decodes.sequence_ids if plan.decodes is not None else ()
    sampled_tokens: dict[SequenceId, tuple[int, ...]] = dict(zip(plain, zip(tokens, strict=False), strict=False))
    result = StepResult(sampled_tokens, not_finite=_named(plan.others, flags))
    for one in sampled:
        accepted = one.chunk.accepted(tokens[one.rows.start : one.rows.stop])
        result.token_ids[one.chunk.sequence_id] = tuple(accepted)
    if raw is not None:
        _score(raw, scored, result)
    return result


def rows_to_finish(plan: StepPlan, starts: np.ndarray) -> npt.NDArray[np.int64]:
    """Returns the rows of a step whose last hidden states `sample_step` needs. These are the rows of all `decodes` and
    some rows of each of the `others`: the rows that tokens are drawn from, or the last row if no token is drawn. The
    i-th of the `others` has the rows `[starts[i], starts[i + 1])`."""
    ends = starts[1:]
    if not any(chunk.num_drafts for chunk in plan.others):
        return np.concatenate([np.arange(plan.num_decodes), ends - 1])
    rows = [np.arange(end - num_rows_of(chunk), end) for end, chunk in zip(ends, plan.others, strict=True)]
    return np.concatenate([np.arange(plan.num_decodes), *rows])


class SampledChunk(NamedTuple):
    """A `SampledChunk` is a chunk whose tokens are drawn from rows `[first, first + num_drafts + 1)` of the logits."""

    chunk: Chunk
    params: SamplingParams
    first: int

    @property
    def rows(self) -> range:
        return range(self.first, self.first + self.chunk.num_drafts + 1)


def num_rows_of(chunk: Chunk) -> int:
    """Returns the number of rows that a chunk has in `rows_to_finish`."""
    return 1 + chunk.num_drafts if chunk.sampling is not None else 1


def _spoiled(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Returns 1 for each of these rows that is not finite and 0 for the others, as int64 `(len(rows),)` on the
    device."""
    chosen = hidden.index_select(0, torch.tensor(rows, dtype=torch.int64, device=hidden.device))
    # A value that is not finite makes the sum not finite, and sums of normalised rows are far below the largest
    # float32. The sum takes a tenth of the time of `aminmax`.
    return (~chosen.sum(dim=-1, dtype=torch.float32).isfinite()).long()


def _named(chunks: Sequence[Chunk], flags: Sequence[int]) -> set[SequenceId]:
    return {chunk.sequence_id for chunk, flag in zip(chunks, flags, strict=True) if flag}


def _constrain(logits: torch.Tensor, sampled: Sequence[SampledChunk]) -> list[int]:
    """Changes the logits of every row in place as its request demands. Returns the rows whose grammar is broken."""
    changes: list[Penalised] = []
    barred: list[tuple[int, tuple[int, ...]]] = []
    for chunk, params, first in sampled:
        for ahead in range(chunk.num_drafts + 1):
            counts = chunk.counts.after(chunk.drafts[:ahead].tolist()) if ahead and chunk.counts else chunk.counts
            changes.append(Penalised(first + ahead, params, counts))
            if ahead < chunk.num_barred:
                barred.append((first + ahead, chunk.barred))
    apply_penalties(logits, changes)
    apply_logit_bias(logits, changes)
    bar_tokens(logits, barred)
    return apply_masks(logits, [Guided(first, chunk.guide) for chunk, _, first in sampled if chunk.guide is not None])


def _draws(plan: StepPlan, sampled: Sequence[SampledChunk]) -> list[Draw]:
    """Returns the parameters of all draws, in the order of the rows of the logits."""
    decodes = plan.decodes
    draws: list[Draw] = []
    if decodes is not None:
        choices = (sequence_id.choice for sequence_id in decodes.sequence_ids)
        draws += zip(decodes.sampling, choices, decodes.draw_indexes.tolist(), strict=True)
    for one in sampled:
        index = one.chunk.draw_index - one.first
        draws += ((one.params, one.chunk.sequence_id.choice, index + row) for row in one.rows)
    return draws


def _score(raw: torch.Tensor, scored: Sequence[SampledChunk], result: StepResult) -> None:
    """Adds the log-probabilities of the accepted tokens to `result`. `raw` holds the rows of `scored`, one after the
    other."""
    rows: list[int] = []
    tokens: list[int] = []
    num_top: list[int] = []
    first = 0
    for one in scored:
        accepted = result.token_ids[one.chunk.sequence_id]
        rows += range(first, first + len(accepted))
        tokens += accepted
        num_top += [one.params.num_top_logprobs or 0] * len(accepted)
        first += len(one.rows)
    scores: list[TokenLogprobs] = token_logprobs(raw if len(rows) == len(raw) else raw[rows], tokens, num_top)
    at = 0
    for one in scored:
        count = len(result.token_ids[one.chunk.sequence_id])
        result.logprobs[one.chunk.sequence_id] = tuple(scores[at : at + count])
        at += count


# ---------------------------------------------------------------- masks of grammars

WORD_BITS = 32


class Guided(NamedTuple):
    """A `Guided` is a row of the logits and the guide of its sequence."""

    row: int
    guide: Guide


def apply_masks(logits: torch.Tensor, guided: Sequence[Guided]) -> list[int]:
    """Sets the logits of the tokens that a grammar forbids to -inf, for all rows at once. Changes `logits` with shape
    `(n, vocab)` in place; the guides do not advance. Returns the rows whose grammar is broken; tokens drawn from these
    rows have no meaning."""
    if not guided:
        return []
    words = np.zeros((len(guided), -(-logits.shape[-1] // WORD_BITS)), dtype="<i4")
    broken = [row for place, (row, guide) in enumerate(guided) if not guide.write_mask(words[place])]
    packed = torch.from_numpy(words.view(np.uint8)).to(logits.device)
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    is_forbidden = bits.view(len(guided), -1)[:, : logits.shape[-1]] == 0
    at = torch.tensor([row for row, _ in guided], device=logits.device)
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(is_forbidden, float("-inf")))
    return broken


# ---------------------------------------------------------------- log-probabilities


def token_logprobs(raw: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Returns, for each row of `raw`, the log-probability of the drawn token and the `num_top` most probable tokens;
    among equally probable tokens the lowest id comes first. `raw` holds float32 log-probabilities with shape
    `(n, vocab)` as the model gave them, before penalties, bias, temperature and truncation, which is also vLLM's
    default (`raw_logprobs`)."""
    sampled = torch.tensor(token_ids, device=raw.device).clamp_(min=0)
    logprobs = raw.gather(1, sampled[:, None])[:, 0].tolist()
    return [TokenLogprobs(logprob, top) for logprob, top in zip(logprobs, _tops(raw, num_top), strict=True)]


def _tops(raw: torch.Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """Returns the most probable tokens of each row, as pairs of id and log-probability."""
    counts = [min(count, raw.shape[-1]) for count in num_top]
    if not any(counts):
        return [()] * len(num_top)
    ids, values, starts = most_probable(raw, counts)
    pairs = list(zip(ids.tolist(), values.tolist(), strict=True))
    return [tuple(pairs[start : start + count]) for start, count in zip(starts.tolist(), counts, strict=True)]


class RankedTokens(NamedTuple):
    """Holds the most probable tokens of several rows, side by side."""

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int64]
    """Holds where the tokens of each row begin. There may be more of them than were asked for."""


def most_probable(raw: torch.Tensor, num_top: Sequence[int]) -> RankedTokens:
    """Returns the `num_top[i]` most probable tokens of row i in descending order, the lowest id first among equals.
    `raw` has shape `(n, vocab)`; at least one number is above 0, and none is above the size of the vocabulary.

    It takes all tokens that are at least as probable as the last one requested, sorts them and then leaves it to the
    caller to cut. So tokens of equal probability at the cut are selected by their id, which `topk` alone does not
    guarantee."""
    asked = torch.tensor(num_top, device=raw.device)
    last = raw.topk(max(num_top), dim=-1).values.gather(1, (asked - 1).clamp_(min=0)[:, None])
    is_candidate = (raw >= last) & (asked > 0)[:, None]
    rows, ids = (axis.cpu().numpy() for axis in is_candidate.nonzero(as_tuple=True))
    values = raw[is_candidate].cpu().numpy()
    order = np.lexsort((ids, -values, rows))
    return RankedTokens(ids[order], values[order], np.searchsorted(rows, np.arange(len(num_top))))
