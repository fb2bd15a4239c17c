"""Checks how tokens are shared among videos: the sum stays within the budget, no video gets more than it wants, and no
video gets less than necessary."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.request_media import share_tokens


@settings(deadline=None, max_examples=150)
@given(wanted=st.lists(st.integers(0, 5000), max_size=6), budget=st.integers(-10, 12000))
def test_shares_are_max_min_fair(wanted: list[int], budget: int) -> None:
    shares = share_tokens(wanted, budget)
    assert len(shares) == len(wanted)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) <= max(0, budget)
    cut = {share for share, want in zip(shares, wanted, strict=True) if share < want}
    assert len(cut) <= 1, "all who get less than they want get the same"
    if cut:
        (level,) = cut
        assert max(shares) == level
        assert max(0, budget) - sum(shares) < len(wanted), "nothing is held back but what a division leaves"
    else:
        assert shares == wanted
