"""Runs every family at random schedules with prompt lookup: with guesses, late features, too few blocks, and one
cancelled request.

`test_families` tests the same without guesses. The same comparison counts and prints near ties.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from family_rig import LoadedFamily
from family_row import FamilyRow
from family_table import ROWS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_model import Comparison
from test_families import NUM_TOKENS, at_once, check, prompts_of

from llm_workers.worker_config import Speculation

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def comparison() -> Iterator[Comparison]:
    counted = Comparison()
    yield counted
    counted.finish()


@pytest.fixture(scope="module", params=ROWS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedFamily:
    row: FamilyRow = request.param
    return LoadedFamily(row, tmp_path_factory.mktemp(row.name))


@settings(
    deadline=None, max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_schedule_with_guesses(loaded: LoadedFamily, comparison: Comparison, data: st.DataObject) -> None:
    kinds = prompts_of(loaded.row)
    prompts = [loaded.prompt(*parts) for parts in data.draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=4))]
    cancelled = data.draw(st.none() | st.integers(0, len(prompts) - 1))
    turns = data.draw(st.integers(0, 20))
    block_size = data.draw(st.sampled_from([4, 16]))
    needed = max(-(-(len(of.token_ids) + NUM_TOKENS) // block_size) for of in prompts)
    tokens = asyncio.run(
        at_once(
            loaded,
            prompts,
            [data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4)) for _ in prompts],
            [turns if index == cancelled else None for index in range(len(prompts))],
            block_size=block_size,
            num_blocks=needed + data.draw(st.integers(0, needed // 2)),
            max_step_tokens=data.draw(st.sampled_from([3, 16, 4096])),
            is_prefix_cache_enabled=data.draw(st.booleans()),
            speculation=Speculation(data.draw(st.integers(1, 6)), 1, 3),
        )
    )
    for index, (of, found) in enumerate(zip(prompts, tokens, strict=True)):
        assert found is not None or index == cancelled
        if found is not None:
            check(comparison, loaded, of, found)
