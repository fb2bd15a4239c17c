"""Tests the sample of mutants: every module contributes its share, every machine draws the same sample, and a change
elsewhere hardly moves it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation.campaign import Mutant, draw, reason_for, render

sizes = st.dictionaries(st.sampled_from([f"fabric/m{at}.py" for at in range(12)]), st.integers(0, 60), min_size=1)


def names(module_to_size: dict[str, int]) -> dict[str, list[str]]:
    return {module: [f"{module}:{at}" for at in range(size)] for module, size in module_to_size.items()}


@settings(deadline=None)
@given(module_to_size=sizes, size=st.integers(1, 300), seed=st.integers(0, 5))
def test_each_module_gives_its_share(module_to_size: dict[str, int], size: int, seed: int) -> None:
    module_to_names = names(module_to_size)
    num_all = sum(module_to_size.values())
    drawn = draw(module_to_names, size, seed)
    assert len(drawn) == len(set(drawn)) == min(size, num_all)
    for mutants in module_to_names.values():
        num_drawn = len(set(mutants) & set(drawn))
        share = min(size, num_all) * len(mutants) / max(1, num_all)
        assert abs(num_drawn - share) < 1


def test_the_sample_is_the_same_for_everybody_and_another_for_another_seed() -> None:
    module_to_names = names({"fabric/a.py": 200, "fabric/b.py": 100})
    backwards = {module: mutants[::-1] for module, mutants in reversed(module_to_names.items())}
    assert draw(module_to_names, 60, 9) == draw(backwards, 60, 9)
    assert draw(module_to_names, 60, 9) != draw(module_to_names, 60, 10)


def test_a_module_that_grows_moves_others_by_their_share_only() -> None:
    before = draw(names({"fabric/a.py": 500, "fabric/b.py": 500}), 100, 9)
    after = draw(names({"fabric/a.py": 500, "fabric/b.py": 520}), 100, 9)
    of_a = [{name for name in drawn if name.startswith("fabric/a.py")} for drawn in (before, after)]
    assert of_a[1] <= of_a[0]
    assert len(of_a[0]) - len(of_a[1]) == 1


def test_the_score_leaves_out_what_was_not_run() -> None:
    statuses = {"killed": 5, "timeout": 1, "not checked": 7}
    sample = [
        Mutant(f"kv_index.feed.xǁEventFeedǁoffer__mutmut_{status}{at}", "kv_index/holder_index.py", status)
        for status, count in statuses.items()
        for at in range(count)
    ]
    text = render(sample, 100, 9)
    assert "| kv_index | 13 | 6 | 1 | 0 | 0 | 7 | 100.0% |" in text
    assert "| all | 13 | 6 | 1 | 0 | 0 | 7 | 100.0% |" in text
    assert "13 of 100 mutants" in text


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("kv_index.feed.xǁEventFeedǁ_keep__mutmut_4", "EventFeed._keep"),
        ("fabric.digest.x_hash_of__mutmut_12", "hash_of"),
    ],
)
def test_mutants_name_their_function(name: str, function: str) -> None:
    assert Mutant(name, "fabric/contracts/identity.py", "survived").function == function


def test_a_reason_is_found_by_function_and_line_and_by_the_change_where_it_names_one() -> None:
    reasons = [
        {"function": "f", "was": "return a < b", "now": "return a <= b", "why": "never equal"},
        {"function": "f", "was": "raise *", "why": "wording"},
    ]
    assert reason_for("f", "return a < b", "return a <= b", reasons) == "never equal"
    assert reason_for("f", "return a < b", "return a > b", reasons) is None
    assert reason_for("f", 'raise ValueError("x")', "raise ValueError(None)", reasons) == "wording"
    assert reason_for("g", "return a < b", "return a <= b", reasons) is None
