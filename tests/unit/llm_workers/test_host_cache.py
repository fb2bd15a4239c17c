"""Tests whether features are kept or discarded after prefill: every row of the table, their precedence, and the
operator's setting."""

from __future__ import annotations

from itertools import product

import pytest

from fabric.contracts import ConfigError
from llm_workers.features.host_cache import FeatureUse, Scenario, is_kept, scenario_of

ROWS = [
    (FeatureUse(has_drafts=True, is_prefix_cached=False), Scenario.SPECULATION, True),
    (FeatureUse(has_beams=True, is_prefix_cached=False), Scenario.BEAM_SEARCH, True),
    (FeatureUse(is_seen_before=True, is_prefix_cached=False), Scenario.SEVERAL_TURNS, True),
    (FeatureUse(is_prefix_cached=True), Scenario.PREFIX_CACHE, False),
    (FeatureUse(is_prefix_cached=False), Scenario.SINGLE_PASS, False),
]


@pytest.mark.parametrize(("use", "scenario", "kept"), ROWS)
def test_the_five_rows(use: FeatureUse, scenario: Scenario, kept: bool) -> None:
    assert scenario_of(use) is scenario
    assert is_kept("auto", use) is kept


def test_of_several_rows_the_first_decides() -> None:
    order = list(Scenario)
    for seen, cached, beams, drafts in product((False, True), repeat=4):
        use = FeatureUse(seen, cached, beams, drafts)
        applies = {
            Scenario.SPECULATION: drafts,
            Scenario.BEAM_SEARCH: beams,
            Scenario.SEVERAL_TURNS: seen,
            Scenario.PREFIX_CACHE: cached,
            Scenario.SINGLE_PASS: True,
        }
        assert scenario_of(use) is next(scenario for scenario in order if applies[scenario])


@pytest.mark.parametrize(("use", "scenario", "kept"), ROWS)
def test_the_operators_word_stands_above_the_table(use: FeatureUse, scenario: Scenario, kept: bool) -> None:
    assert is_kept("always", use)
    assert not is_kept("never", use)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, always, never"):
        is_kept("sometimes", FeatureUse())
