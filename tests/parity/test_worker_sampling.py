"""Compares sampling with a reference written token by token, and tests the exact support of the distribution."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import SamplingParams, uniform
from llm_workers.sampling.distributions import _draw_truncated, sample


def probabilities_of(logits: npt.NDArray[np.float32], params: SamplingParams) -> list[tuple[int, float]]:
    """Returns [(id, probability)] in the order of the CDF, computed in plain Python."""
    weights = np.asarray(logits, dtype=np.float64)
    weights = np.exp((weights - weights.max()) / params.temperature)
    pairs = [(i, w / weights.sum() if w >= params.min_p * weights.max() else 0.0) for i, w in enumerate(weights)]
    if params.top_k <= 0 and params.top_p >= 1:
        return pairs
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    if params.top_k > 0:
        pairs = pairs[: params.top_k]
    total = sum(p for _, p in pairs)
    kept, before = [], 0.0
    for i, p in pairs:
        if kept and before >= params.top_p:
            break
        kept.append((i, p / total))
        before += p / total
    return kept


def draw_written_out(logits: npt.NDArray[np.float32], params: SamplingParams, choice: int, index: int) -> int:
    if params.temperature == 0:
        return int(np.argmax(logits))
    pairs = probabilities_of(logits, params)
    target = uniform(params.seed, choice, index) * sum(p for _, p in pairs)
    running = 0.0
    for i, p in pairs:
        running += p
        if running > target:
            return i
    return max(i for i, p in pairs if p > 0)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.8]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 40, 500]),
    min_p=st.sampled_from([0.0, 0.0, 0.04, 0.3, 1.0]),
    seed=st.integers(0, 2**62),
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(PARAMS, st.integers(0, 7), st.integers(0, 500)), min_size=1, max_size=6), st.integers(0, 10_000)
)
def test_rows_of_all_kinds_draw_what_the_reference_draws(
    draws: list[tuple[SamplingParams, int, int]], seed: int
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=3, size=(len(draws), 61)).astype(np.float32))
    before = logits.clone()
    drawn = sample(logits, draws)
    assert torch.equal(logits, before)
    assert drawn == [draw_written_out(row.numpy(), *draw) for row, draw in zip(logits, draws, strict=True)]
    alone = [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    assert drawn == alone


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(PARAMS.filter(lambda params: params.temperature > 0), st.just(0), st.integers(0, 99)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 60),
    st.integers(2, 200),
    st.integers(0, 10_000),
)
def test_looking_at_the_most_probable_first_changes_no_draw(
    draws: list[tuple[SamplingParams, int, int]], width: int, num_levels: int, seed: int
) -> None:
    """Few levels make many equal values, also at the edge of the tokens that are examined first."""
    levels = np.random.default_rng(seed).integers(0, num_levels, (len(draws), 61)).astype(np.float32)
    logits = torch.from_numpy(levels * 8 / num_levels)
    assert _draw_truncated(logits, draws, width).tolist() == _draw_truncated(logits, draws, 61).tolist()


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, [(greedy, 0, 0), (greedy, 1, 9)]) == [1, 0]


def test_support_is_exactly_what_top_k_and_top_p_leave() -> None:
    logits = torch.log(torch.tensor([0.4, 0.05, 0.3, 0.05, 0.2]))
    for params, support in [
        (SamplingParams(top_k=2), {0, 2}),
        (SamplingParams(top_p=0.69), {0, 2}),
        (SamplingParams(top_p=0.71), {0, 2, 4}),
        (SamplingParams(top_k=2, top_p=0.5), {0}),
        (SamplingParams(top_p=1e-9), {0}),
        (SamplingParams(min_p=0.49), {0, 2, 4}),
        (SamplingParams(min_p=0.51), {0, 2}),
        (SamplingParams(min_p=0.51, top_k=4), {0, 2}),
        (SamplingParams(min_p=0.4, top_p=0.44), {0}),
        (SamplingParams(min_p=1.0), {0}),
        (SamplingParams(), {0, 1, 2, 3, 4}),
        (SamplingParams(temperature=1e-4), {0}),
    ]:
        draws = [(params, 0, index) for index in range(400)]
        assert set(sample(logits.expand(400, -1), draws)) == support, params


def test_draws_follow_the_distribution() -> None:
    """The test is deterministic, because the digest fixes these 4,000 draws. Each share lies within 4 standard
    errors."""
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    num_draws = 4000
    drawn = sample(
        torch.log(probabilities).expand(num_draws, -1), [(SamplingParams(seed=11), 0, i) for i in range(num_draws)]
    )
    for token, p in enumerate(probabilities.tolist()):
        share = drawn.count(token) / num_draws
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / num_draws)


def test_a_draw_depends_on_seed_choice_and_index() -> None:
    logits = torch.zeros(1, 1000)
    drawn = {sample(logits, [(SamplingParams(seed=s), c, i)])[0] for s in range(3) for c in range(3) for i in range(3)}
    assert len(drawn) > 20


def test_masked_and_broken_rows() -> None:
    logits = torch.zeros(3, 4)
    logits[0, :3] = float("-inf")
    logits[1, 2] = float("nan")
    draws = [(SamplingParams(seed=i), 0, i) for i in range(3)]
    drawn = sample(logits, draws)
    assert drawn[0] == 3
    assert drawn[1] == -1
    assert 0 <= drawn[2] < 4


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.1}, {}])
def test_a_row_that_is_not_finite_gives_no_token_in_a_large_vocabulary(params: dict[str, float]) -> None:
    """The finite row samples the same token as it samples alone."""
    torch.manual_seed(0)
    logits = torch.randn(5, 5000)
    logits[0] = float("nan")
    logits[1, 77] = float("nan")
    logits[2, 4000] = float("inf")
    logits[3] = float("-inf")
    draws = [(SamplingParams(seed=i, **params), 0, i) for i in range(5)]
    assert sample(logits, draws) == [-1, -1, -1, -1, *sample(logits[4:], draws[4:])]
