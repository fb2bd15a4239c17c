"""Checks a long video and pictures at one encoder on a simulated clock: a picture waits for at most one unit, and the
video never starves."""

from __future__ import annotations

from encoder_line import PATIENCE, Arrival, Line
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_pool.planning.call_queue import CallQueue
from fabric.contracts import Rank

FILM_UNITS = 60
"""A video has this many units: 120 frames with two to a temporal patch."""
MAX_LOAD = 0.9


@settings(deadline=None, max_examples=40)
@given(
    unit_cost=st.integers(16, 1024),
    share=st.floats(0.01, 0.49),
    moment=st.floats(0, 1.2),
    modality=st.sampled_from(["image", "audio"]),
    overhead_s=st.sampled_from([0.0, 0.004, 0.2]),
)
def test_a_long_video_delays_a_picture_by_one_unit_at_most(
    unit_cost: int, share: float, moment: float, modality: str, overhead_s: float
) -> None:
    """Holds for any arrival time of the picture, and for any work of it up to half of the video's."""
    film = Arrival("film", 0.0, "video", [unit_cost] * FILM_UNITS)
    picture_cost = max(1, int(share * sum(film.unit_costs)))
    picture = Arrival("picture", moment * film.own_s, modality, [picture_cost])
    line = Line([film, picture], max_batch_cost=unit_cost, overhead_s=overhead_s).run()
    start_s = next(start for start, _, keys in line.forwards if keys[0].mm_hash == "picture")
    assert start_s - picture.at_s <= unit_cost * 0.001 + overhead_s + 1e-9
    assert [key.unit for _, _, keys in line.forwards for key in keys if key.mm_hash == "film"] == list(
        range(FILM_UNITS)
    )


@settings(deadline=None, max_examples=40)
@given(
    unit_cost=st.integers(16, 1024),
    share=st.floats(0.01, 0.49),
    moment=st.floats(0, 1.2),
    overhead_s=st.floats(0, 10),
)
def test_units_that_share_a_forward_delay_a_picture_by_less_than_two_of_them(
    unit_cost: int, share: float, moment: float, overhead_s: float
) -> None:
    """Holds where a forward pass has a cost of its own, as on a GPU, for any number of units that fit into one."""
    film = Arrival("film", 0.0, "video", [unit_cost] * FILM_UNITS)
    picture = Arrival("picture", moment * film.own_s, "image", [max(1, int(share * sum(film.unit_costs)))])
    line = Line([film, picture], max_batch_cost=FILM_UNITS * unit_cost, overhead_s=overhead_s).run()
    start_s = next(start for start, _, keys in line.forwards if keys[0].mm_hash == "picture")
    assert start_s - picture.at_s <= 2 * (unit_cost * 0.001 + overhead_s)
    shared = max(len(keys) for _, _, keys in line.forwards)
    assert (shared > 1) == (overhead_s >= unit_cost * 0.001), "one more costs no more than the forward it saves"


@settings(deadline=None, max_examples=25)
@given(
    unit_cost=st.integers(16, 256),
    picture_cost=st.integers(64, 512),
    load=st.floats(0.2, MAX_LOAD),
    num_units=st.integers(2, 8),
)
def test_a_steady_load_of_pictures_never_starves_a_video(
    unit_cost: int, picture_cost: int, load: float, num_units: int
) -> None:
    """The pictures leave little of the encoder, and another one always comes before the video is done. The video waits
    for `PATIENCE` times its own time and then gets its share; the time it has been served counts against what it may
    still claim."""
    film = Arrival("film", 0.0, "video", [unit_cost] * num_units)
    apart_s = picture_cost * 0.001 / load
    horizon_s = (2 * PATIENCE + 2) * film.own_s / (1 - MAX_LOAD / 2) + 10 * apart_s
    pictures = [
        Arrival(f"picture-{number}", number * apart_s, "image", [picture_cost])
        for number in range(int(horizon_s / apart_s))
    ]
    line = Line([film, *pictures], max_batch_cost=max(unit_cost, picture_cost)).run()
    assert line.name_to_done_s["film"] < horizon_s, "it waited for the last picture"
    for picture in pictures:
        delay_s = line.name_to_done_s[picture.name] - picture.at_s
        assert delay_s <= (PATIENCE + 2) * picture_cost * 0.001 / (1 - load) + 3 * unit_cost * 0.001


requests = st.lists(
    st.tuples(st.integers(0, 3000), st.lists(st.integers(1, 40), min_size=1, max_size=8)), min_size=1, max_size=25
)


@settings(deadline=None, max_examples=100)
@given(requests, st.integers(1, 80))
def test_nobody_is_overtaken_by_who_came_long_after(arrivals: list[tuple[int, list[int]]], max_cost: int) -> None:
    """A request may lose the lead of a batch only to requests that came within `PATIENCE` times its own encoding time,
    extended by the time it spent in forward passes. So its wait is bounded by the work that can arrive in that time."""
    made = [Arrival(f"req-{n}", at / 10_000, "image", costs) for n, (at, costs) in enumerate(arrivals)]
    name_to_arrival = {one.name: one for one in made}
    line = Line(made, max_batch_cost=max_cost).run()
    name_to_served_s = dict.fromkeys(name_to_arrival, 0.0)
    for start_s, end_s, keys in line.forwards:
        leader = name_to_arrival[keys[0].mm_hash]
        for other in made:
            if other.at_s <= start_s < line.name_to_done_s[other.name] - 1e-12:
                latest_s = other.at_s + PATIENCE * other.own_s + name_to_served_s[other.name]
                assert leader.at_s <= latest_s + 1e-9
        for name in {key.mm_hash for key in keys}:
            name_to_served_s[name] += end_s - start_s
    assert len(line.name_to_done_s) == len(made)


RANKS = st.builds(Rank, st.integers(-1, 1), st.integers(0, 3).map(float), st.just((0.0, "")), st.just(0))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 5), st.none() | RANKS, st.integers(0, 6)), max_size=120))
def test_a_queue_of_calls_is_sorted_whatever_has_changed(steps: list[tuple[int, Rank | None, int]]) -> None:
    """Calls come with a rank, get another one, leave and come back; the test reads a part of the order after each
    change."""
    queue, model = CallQueue(), dict[int, Rank]()
    for call, rank, num_read in steps:
        if rank is None:
            queue.drop(call)
            model.pop(call, None)
        else:
            queue.put(call, rank)
            model[call] = rank
        expected = sorted(model, key=lambda call: (model[call], call))
        assert [call for call, _ in zip(queue.in_order(), range(num_read), strict=False)] == expected[:num_read]
        assert (len(queue), queue.first()) == (len(model), expected[0] if expected else None)
    assert len(queue._heap) <= 2 * len(model) + 16, "what is stale is dropped"
