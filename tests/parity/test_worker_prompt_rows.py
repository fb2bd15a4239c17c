"""Compares the scores of a prompt's tokens with sorting in Python, and checks how many rows of logits live at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import RequestId, SequenceId
from llm_workers.sampling import read_prompts
from llm_workers.scheduling import SCORED_AT_ONCE, Chunk, PromptReading, PromptRows, StepPlan

pytestmark = pytest.mark.torch
VOCAB = 17
IDS = np.zeros(0, dtype=np.int64)


class Head:
    """A `Head` is the part of a language model that reads hidden states, which are the logits here."""

    def __init__(self) -> None:
        self.most_rows = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        return hidden.float()


def chunk_of(name: str, num_tokens: int, reading: PromptReading | None) -> Chunk:
    sequence_id = SequenceId(RequestId(name), 0, 0)
    return Chunk(sequence_id, 0, num_tokens, IDS, IDS[None], IDS, (), None, reading=reading)


def read(head: Head, hidden: torch.Tensor, *chunks: Chunk) -> dict[str, PromptRows]:
    """Reads the chunks, which lie one after the other in `hidden`."""
    starts = np.cumsum([0, *(chunk.num_tokens for chunk in chunks)])
    finished = hidden[starts[1:] - 1]
    found = read_prompts(head, hidden, finished, StepPlan(0, chunks), starts)
    return {sequence_id.request_id: rows for sequence_id, rows in found.items()}


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=150),
    st.integers(0, 20),
    st.integers(1, 40),
    st.integers(0, 10_000),
)
def test_scores_are_ordered_by_probability_then_by_id(
    targets: list[int], num_top: int, num_levels: int, seed: int
) -> None:
    """Few levels make many equal values."""
    levels = np.random.default_rng(seed).integers(0, num_levels, (len(targets), VOCAB)).astype(np.float32)
    head, hidden = Head(), torch.from_numpy(levels)
    reading = PromptReading("", np.array(targets), num_top)
    scores = read(head, hidden, chunk_of("a", len(targets), reading))["a"].scores
    assert scores is not None
    assert head.most_rows == min(len(targets), SCORED_AT_ONCE)
    assert scores.token_ids.shape == scores.logprobs.shape == (len(targets), 1 + min(num_top, VOCAB))
    for at, row in enumerate(hidden.log_softmax(dim=-1).tolist()):
        ordered = sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0]))[:num_top]
        assert list(zip(scores.token_ids[at, 1:], scores.logprobs[at, 1:].tolist(), strict=True)) == ordered
        assert (scores.token_ids[at, 0], scores.logprobs[at, 0]) == (targets[at], row[targets[at]])
        assert scores.ranks[at] == 1 + sum(value > row[targets[at]] for value in row)


def test_each_chunk_gets_its_own_rows_in_float32() -> None:
    hidden = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    found = read(
        Head(),
        hidden,
        chunk_of("plain", 2, None),
        chunk_of("last", 3, PromptReading("last", IDS)),
        chunk_of("mean", 4, PromptReading("mean", IDS)),
        chunk_of("both", 3, PromptReading("mean", np.array([1, 2]), 1)),
    )
    assert sorted(found) == ["both", "last", "mean"]
    np.testing.assert_array_equal(found["last"].hidden, hidden[4].float().numpy())
    np.testing.assert_allclose(found["mean"].hidden, hidden[5:9].float().sum(dim=0).numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["both"].hidden, hidden[9:].float().sum(dim=0).numpy(), rtol=1e-6)
    assert {rows.hidden.dtype for rows in found.values()} == {np.dtype(np.float32)}
    assert found["last"].scores is None
    scores = found["both"].scores
    assert scores.token_ids[:, 0].tolist() == [1, 2]
    assert scores.token_ids[:, 1].tolist() == hidden[9:11].float().argmax(dim=-1).tolist()


def test_rows_that_are_not_finite_break_no_other_row() -> None:
    """The engine ends the sequence of such a row; reading it must not fail for the whole step."""
    hidden = torch.zeros(3, VOCAB)
    hidden[1] = float("nan")
    scores = read(Head(), hidden, chunk_of("a", 3, PromptReading("", np.array([1, 2, 3]), 2)))["a"].scores
    assert scores.logprobs[[0, 2], 0].tolist() == pytest.approx([-np.log(VOCAB)] * 2)
    assert np.isneginf(scores.logprobs[1]).all()
