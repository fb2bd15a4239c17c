"""Checks that the planner's waits at encoders, for all sizes of work at once, are those of the encoder's own rule."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_samples import encoder_member, encoder_report

from fabric.c_structures import address_of
from fabric.contracts import EMPTY_PROFILE, NUM_BINS, add_work, key_of, wait_s
from router.planning import compiled_search
from router.planning.member_columns import MAX_SILENCE_S, EncoderColumns
from router.planning.predictions import DeviceWaits, device_waits

NOW_S, STALE_AFTER_S = 100.0, 1e9
seconds = st.floats(1e-4, 5.0)
works = st.lists(st.tuples(seconds, seconds, st.sampled_from([0, 0, 0, -1, 1])), max_size=8)


def compiled_waits(encoders: EncoderColumns) -> DeviceWaits:
    """Does what `device_waits` does, in C."""
    library = compiled_search.load_library()
    if library is None:
        pytest.skip("there is no C compiler")
    found = np.zeros((2 * NUM_BINS + 1, encoders.capacity))
    waits_s, sizes_s = found[: NUM_BINS + 1], found[NUM_BINS + 1 :]
    described = encoders.described(library)
    addresses = address_of(waits_s), address_of(sizes_s)
    library.device_waits(ctypes.byref(described), NOW_S, STALE_AFTER_S, MAX_SILENCE_S, 0, *addresses)
    return DeviceWaits(waits_s, sizes_s)


@pytest.mark.parametrize("is_native", [True, False])
@settings(deadline=None, max_examples=150)
@given(works, seconds, st.floats(0.5, 10.0), st.floats(0.0, 3.0), st.floats(0.0, 1.0), seconds)
def test_the_wait_at_an_encoder_is_that_of_its_own_rule(
    is_native: bool,
    queued: list[tuple[float, float, int]],
    own_s: float,
    patience: float,
    age_s: float,
    forward_left_s: float,
    unit_s: float,
) -> None:
    profile = [*EMPTY_PROFILE]
    for work_s, size_s, priority in queued:
        add_work(profile, work_s, key_of(size_s, patience, 0.0, priority))
    encoders = EncoderColumns()
    encoders.add(encoder_member("e"), 0)
    report = encoder_report(
        "e", 1, queue_profile=tuple(profile), forward_left_s=forward_left_s, unit_s=unit_s, patience=patience
    )
    encoders.take(0, report, NOW_S - age_s)
    age_s = NOW_S - float(encoders.state_at_s[0])  # A difference of floats is rounded.
    waits = compiled_waits(encoders) if is_native else device_waits(encoders, NOW_S, STALE_AFTER_S, 0)
    num_ahead = 0
    while num_ahead < NUM_BINS and waits.sizes_s[num_ahead, 0] <= own_s:
        num_ahead += 1
    expected_s = wait_s(profile, forward_left_s, key_of(own_s, patience, age_s), age_s, unit_s)
    assert float(waits.waits_s[num_ahead, 0]) == pytest.approx(expected_s, abs=1e-9)
    assert np.all(np.diff(waits.waits_s[:, 0]) >= 0.0), "larger work never begins sooner"
