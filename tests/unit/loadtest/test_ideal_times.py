"""Tests the lower bound of the time to first token, and what overlap can save, against cases computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.benches.served.ideal_times import (
    TEXT,
    IdealRequest,
    IdealSpan,
    IdealUnit,
    ideal_ttfts_s,
    possible_saving,
    prefill_bound_s,
)


def request(
    arrival_s: float, prefix_s: float, units: int, encode_s: float, prefill_s: float, base_s: float = 0.0
) -> IdealRequest:
    spans = (IdealSpan(prefix_s), *(IdealSpan(prefill_s, unit) for unit in range(units)))
    return IdealRequest(arrival_s, (IdealUnit(0.0, encode_s),) * units, spans, base_s)


class TestTheBound:
    def test_text_alone_takes_its_wait_and_its_prefill(self) -> None:
        assert prefill_bound_s([IdealSpan(2.0)], [], queue_s=1.0) == 3.0

    def test_text_in_front_is_hidden_behind_the_encoding(self) -> None:
        assert request(0.0, 3.0, 1, 4.0, 1.0).bound_s() == 5.0
        assert request(0.0, 6.0, 1, 4.0, 1.0).bound_s() == 7.0

    def test_each_unit_may_be_the_one_that_all_wait_for(self) -> None:
        spans = [IdealSpan(1.0, 0), IdealSpan(2.0, 1), IdealSpan(1.0)]
        assert prefill_bound_s(spans, [5.0, 5.5]) == 9.0
        assert prefill_bound_s(spans, [5.0, 8.0]) == 11.0


class TestWhatCanBeSaved:
    def test_eight_equal_units_save_nearly_a_half(self) -> None:
        assert possible_saving(8, 4.0, 4.0) == 0.4375

    def test_text_that_takes_as_long_as_the_encoding(self) -> None:
        assert possible_saving(1, 2.0, 3.0, prefix_s=2.0) == 0.4

    def test_one_unit_without_text_saves_nothing(self) -> None:
        assert possible_saving(1, 2.0, 3.0) == 0.0
        assert possible_saving(1, 0.0, 0.0) == 0.0

    @given(st.integers(1, 20), st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(0.0, 10.0))
    def test_never_more_than_the_bound_allows(
        self, units: int, encode_s: float, unit_s: float, prefix_s: float
    ) -> None:
        one = request(0.0, prefix_s, units, encode_s / units, unit_s / units)
        total_s = encode_s + unit_s + prefix_s
        saved_s = possible_saving(units, encode_s, unit_s + prefix_s, prefix_s) * total_s
        assert saved_s <= total_s - one.bound_s() + 1e-9
        assert saved_s <= total_s / 2 + 1e-9


requests = st.builds(
    request,
    st.floats(0.0, 5.0),
    st.floats(0.0, 2.0),
    st.integers(0, 4),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.2),
)


class TestRequestsThatMeet:
    @given(requests)
    def test_a_request_that_meets_no_other_takes_its_bound(self, one: IdealRequest) -> None:
        assert ideal_ttfts_s([one]) == [pytest.approx(one.bound_s())]

    @given(st.lists(requests, min_size=1, max_size=6))
    def test_none_is_faster_than_its_bound_and_no_work_is_lost(self, some: list[IdealRequest]) -> None:
        ttfts_s = ideal_ttfts_s(some)
        for one, ttft_s in zip(some, ttfts_s, strict=True):
            assert ttft_s >= one.bound_s() - 1e-9
        ends_s = [one.arrival_s + ttft_s for one, ttft_s in zip(some, ttfts_s, strict=True)]
        assert max(ends_s) >= min(one.arrival_s for one in some) + sum(one.prefill_s for one in some) - 1e-9

    def test_the_second_waits_for_the_encoder_and_computes_its_text_meanwhile(self) -> None:
        first, second = request(0.0, 0.0, 1, 4.0, 1.0), request(0.0, 2.0, 1, 4.0, 1.0)
        assert ideal_ttfts_s([first, second]) == [5.0, 9.0]

    def test_a_span_that_has_begun_is_finished_first(self) -> None:
        long, short = request(0.0, 10.0, 0, 0.0, 0.0), request(1.0, 1.0, 0, 0.0, 0.0)
        assert ideal_ttfts_s([long, short]) == [10.0, 10.0]

    def test_text_is_what_no_unit_precedes(self) -> None:
        assert IdealSpan(1.0).unit == TEXT
