"""Compares penalties and logit bias with loops over tokens, and with transformers where it has the same function."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from fabric.contracts import SamplingParams
from llm_workers.sampling.distributions import Penalised, apply_logit_bias, apply_penalties, bar_tokens
from llm_workers.scheduling import TokenCounts

pytestmark = pytest.mark.torch
VOCAB = 23
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
)


def counts_of(prompt: list[int], output: list[int]) -> TokenCounts:
    return TokenCounts(np.array(prompt, dtype=np.int64), np.array(output, dtype=np.int64))


def written_out(
    logits: npt.NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[np.float32]:
    """Computes one row, token by token, in float32."""
    row = [np.float32(value) for value in logits]
    for token in range(VOCAB):
        if token in prompt or token in output:
            factor = np.float32(params.repetition_penalty)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        times = output.count(token)
        row[token] -= np.float32(
            np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty) * (times > 0)
        )
    for token, bias in params.logit_bias:
        row[token] += np.float32(bias)
    return row


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(PARAMS, IDS, IDS), min_size=1, max_size=5), st.integers(0, 10_000))
def test_rows_of_all_kinds_change_as_loops_change_them(
    rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=3, size=(len(rows), VOCAB)).astype(np.float32))
    logits[:, seed % VOCAB] = float("-inf")
    expected = [written_out(row.tolist(), *given) for row, given in zip(logits, rows, strict=True)]
    changes = [
        Penalised(row, params, counts_of(prompt, output) if params.has_penalties else None)
        for row, (params, prompt, output) in enumerate(rows)
    ]
    apply_penalties(logits, changes)
    apply_logit_bias(logits, changes)
    assert np.allclose(logits.numpy(), np.array(expected, dtype=np.float32), rtol=1e-6, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(IDS.filter(bool), IDS, st.sampled_from([0.5, 1.1, 1.8]), st.integers(0, 10_000))
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], output: list[int], penalty: float, seed: int
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=3, size=(1, VOCAB)).astype(np.float32))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    params = SamplingParams(repetition_penalty=penalty)
    apply_penalties(logits, [Penalised(0, params, counts_of(prompt, output))])
    assert torch.equal(logits, expected)


def test_barred_tokens_are_impossible_in_their_own_row() -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    bar_tokens(logits, [(0, ()), (2, (5, 7, 5))])
    assert torch.equal(logits[:2], before[:2])
    assert torch.isinf(logits[2]).nonzero().flatten().tolist() == [5, 7]


def test_a_row_without_penalties_is_left_alone() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    strong = SamplingParams(presence_penalty=2.0, logit_bias=((3, -100.0),))
    changes = [Penalised(0, SamplingParams(), None), Penalised(1, strong, counts_of([1], [2, 2]))]
    apply_penalties(logits, changes)
    apply_logit_bias(logits, changes)
    assert torch.equal(logits[0], before[0])
    assert (logits[1] != before[1]).nonzero().flatten().tolist() == [2, 3]
