"""Checks that the wait which routers predict for new work at an encoder is the wait that the encoder's own queue gives
it, over random mixes of short and long media."""

from __future__ import annotations

import random
import statistics

import pytest
from encoder_line import SECONDS_PER_COST, Arrival, PredictedLine
from hypothesis import given
from hypothesis import strategies as st

NUM_ARRIVALS = 150


def mix(rng: random.Random, load: float) -> list[Arrival]:
    """Returns arrivals at random moments: 70 % pictures of very different sizes, 20 % short videos and 10 % long ones.
    Together they keep the device busy for the share `load` of the time."""
    kinds = rng.choices(("picture", "clip", "film"), (7, 2, 1), k=NUM_ARRIVALS)
    costs: list[list[int]] = []
    for kind in kinds:
        unit_cost = int(10 ** rng.uniform(0.7, 1.8))
        costs.append({"picture": [unit_cost], "clip": [unit_cost] * rng.randint(2, 8), "film": [29] * 40}[kind])
    mean_s = statistics.mean(map(sum, costs)) * SECONDS_PER_COST
    at_s, arrivals = 0.0, list[Arrival]()
    for number, units in enumerate(costs):
        at_s += rng.expovariate(load / mean_s)
        arrivals.append(Arrival(f"{kinds[number]}-{number}", at_s, "image", units))
    return arrivals


def landing_errors(line: PredictedLine, name_to_wait_s: dict[str, float]) -> list[float]:
    """Returns the error of each prediction relative to the time until the first unit would be made, for the arrivals
    that found the device busy."""
    actual = line.name_to_actual_s
    return [
        abs(name_to_wait_s[one.name] - actual[one.name]) / (actual[one.name] + one.unit_costs[0] * SECONDS_PER_COST)
        for one in line.arrivals
        if line.name_to_fifo_s[one.name] > 0.0
    ]


@pytest.mark.parametrize("load", [0.5, 0.8, 1.1])
def test_most_waits_are_predicted_exactly_at_any_load(load: float) -> None:
    errors, fifo_errors = list[float](), list[float]()
    for seed in range(3):
        line = PredictedLine(mix(random.Random(seed), load))
        line.run()
        errors += landing_errors(line, line.name_to_wait_s)
        fifo_errors += landing_errors(line, line.name_to_fifo_s)
    # What is left are shorter calls that come later and overtake, which nobody can know.
    assert statistics.median(errors) < 0.01
    assert statistics.quantiles(errors, n=10)[-1] < 0.5
    assert statistics.median(fifo_errors) > 10 * statistics.median(errors) + 1.0


@given(st.integers(0, 2**20), st.integers(1, 12), st.floats(0.2, 1.5))
def test_equal_pictures_are_served_in_the_order_of_their_arrival(seed: int, cost: int, load: float) -> None:
    rng, at_s, arrivals = random.Random(seed), 0.0, list[Arrival]()
    for number in range(20):
        at_s += rng.expovariate(load / (cost * SECONDS_PER_COST))
        arrivals.append(Arrival(f"picture-{number:02}", at_s, "image", [cost]))
    line = PredictedLine(arrivals)
    line.run()
    assert line.name_to_wait_s == pytest.approx(line.name_to_actual_s, abs=1e-9)


def test_a_picture_waits_for_one_unit_of_a_long_video_and_not_for_all_of_it() -> None:
    film = Arrival("film", 0.0, "image", [29] * 22)
    line = PredictedLine([film, Arrival("picture", 0.0001, "image", [5])])
    line.run()
    assert line.name_to_wait_s["picture"] == pytest.approx(0.0289)
    assert line.name_to_actual_s["picture"] == pytest.approx(0.0289)
    assert line.name_to_fifo_s["picture"] == pytest.approx(0.6379)


def test_a_video_that_waited_long_goes_first_for_as_long_as_its_wait_lasts() -> None:
    """Two pictures come every unit; the video waits until it is older than they are short."""
    film = Arrival("film", 0.0, "image", [10] * 6)
    pictures = [Arrival(f"picture-{number:02}", 0.001 + 0.01 * number, "image", [10]) for number in range(60)]
    line = PredictedLine([Arrival("first", 0.0, "image", [10]), film, *pictures])
    line.run()
    errors = landing_errors(line, line.name_to_wait_s)
    assert statistics.median(errors) < 0.01
    assert max(errors) < 1.0
