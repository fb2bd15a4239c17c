"""Tests what a router keeps of its costs for the next run, and that a file of another origin is refused."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.planning.link_classes import LinkClass
from router.planning.plan_types import Line
from router.planning.saved_costs import (
    MAX_AGE_S,
    SAVED_HALF_LIFE_S,
    SAVED_WEIGHT,
    CostKey,
    SavedCosts,
    SeenLine,
    decode_costs,
    encode_costs,
)

NOW_S = 1.79e9
KEY = CostKey("encoder", "NVIDIA H100", "image", "decode")
LINE = Line(0.01, 1e-5)

coefficients = st.floats(1e-12, 1e6)
seen_lines = st.builds(SeenLine, st.builds(Line, coefficients, coefficients), st.floats(0.0, NOW_S))
keys = st.builds(CostKey, st.sampled_from(["worker", "encoder"]), st.text(max_size=9), st.text(max_size=9), st.text())
saved_costs = st.builds(
    SavedCosts,
    st.dictionaries(keys.filter(lambda key: len(key.stage) < 99), seen_lines, max_size=5),
    st.dictionaries(st.sampled_from(LinkClass), seen_lines),
    st.just(NOW_S),
)


@settings(deadline=None, max_examples=100)
@given(saved_costs)
def test_a_file_gives_back_what_was_saved(saved: SavedCosts) -> None:
    assert decode_costs(encode_costs(saved, "m"), "m", NOW_S) == saved


def test_a_line_weighs_less_the_longer_ago_it_was_seen() -> None:
    def weight(age_s: float) -> float:
        start = SavedCosts({KEY: SeenLine(LINE, NOW_S - age_s)}, {}, NOW_S).start(KEY)
        assert start is not None
        assert start[0] == LINE
        return start[1]

    assert weight(0.0) == SAVED_WEIGHT
    assert weight(-1e6) == SAVED_WEIGHT, "a clock that was set back makes nothing more certain"
    assert weight(SAVED_HALF_LIFE_S) == pytest.approx(SAVED_WEIGHT / 2)
    assert SavedCosts().start(KEY) is None
    assert SavedCosts().link(LinkClass.TCP) is None


def test_newer_lines_replace_older_ones_and_very_old_ones_go() -> None:
    other, ancient = KEY._replace(modality="video"), KEY._replace(modality="audio")
    old = SavedCosts(
        {
            KEY: SeenLine(LINE, NOW_S - 10),
            other: SeenLine(LINE, NOW_S - 10),
            ancient: SeenLine(LINE, NOW_S - 2 * MAX_AGE_S),
        },
        {LinkClass.TCP: SeenLine(LINE, NOW_S - 10)},
        NOW_S - 10,
    )
    new = SeenLine(Line(0.02, 2e-5), NOW_S)
    updated = old.updated({KEY: new}, {LinkClass.RDMA: new}, NOW_S)
    assert updated.key_to_line == {KEY: new, other: SeenLine(LINE, NOW_S - 10)}
    assert updated.link_to_line == {LinkClass.TCP: SeenLine(LINE, NOW_S - 10), LinkClass.RDMA: new}


def test_lines_that_a_clock_ahead_has_left_are_replaced() -> None:
    wrong, right = Line(1.0, 1.0), SeenLine(LINE, NOW_S + 60.0)
    future = SavedCosts({KEY: SeenLine(wrong, NOW_S + 1e9)}, {LinkClass.TCP: SeenLine(wrong, NOW_S + 1e9)}, NOW_S)
    found = decode_costs(encode_costs(future, "m"), "m", NOW_S)
    assert found.link(LinkClass.TCP) == wrong
    merged = SavedCosts({KEY: right}, {LinkClass.TCP: right}, NOW_S).merged(found)
    assert (merged.key_to_line[KEY], merged.link_to_line[LinkClass.TCP]) == (right, right)


GOOD = encode_costs(SavedCosts({KEY: SeenLine(LINE, NOW_S)}, {LinkClass.TCP: SeenLine(LINE, NOW_S)}, NOW_S), "m")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a file of learned costs"),
        (GOOD[:-20], "not a file of learned costs"),
        (b"\xff\xfe" + GOOD, "not a file of learned costs"),
        (b"[" * 100_000, "not a file of learned costs"),
        (b'{"format": "something else"}', "not a file of learned costs"),
        (GOOD.replace(b'"tcp"', b'"pigeon"'), "not a file of learned costs"),
        (GOOD.replace(b"0.01", b"-0.01"), "not a file of learned costs"),
        (GOOD.replace(b"0.01", b"1e99"), "not a file of learned costs"),
        (GOOD.replace(b'"version": 1', b'"version": 2'), "but this router reads"),
        (GOOD.replace(b'"m"', b'"other"'), "costs of the model 'other', but this router serves 'm'"),
    ],
)
def test_other_files_are_refused_with_the_reason(content: bytes, says: str) -> None:
    assert content != GOOD
    with pytest.raises(ValueError, match=says):
        decode_costs(content, "m", NOW_S)


def test_a_line_of_nothing_is_no_line() -> None:
    content = msgspec.json.decode(GOOD)
    content["costs"][0] |= {"base_s": 0.0, "per_unit_s": 0.0}
    assert decode_costs(msgspec.json.encode(content), "m", NOW_S).start(KEY) is None
