"""Tests the score against values that follow by hand from the formulas of the articles in docs/references.md."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from planning_samples import (
    DECODE,
    ENCODE,
    LINK,
    NO_COST,
    PREFILL,
    ROW_BYTES,
    EncoderSpec,
    WorkerSpec,
    encoder,
    image,
    plan_encoding,
    plan_route,
    query,
    snapshot,
    worker,
)

from fabric.contracts import MediaItem, NoCapacity
from router.planning import RoutePlan, RouteQuery
from router.planning.link_classes import LinkClass
from router.planning.plan_types import EncoderCosts, Line

ENCODE_S = DECODE.base_s + ENCODE.at(256)
TRANSFER_S = LINK.at(64 * ROW_BYTES)
LANDING_S = ENCODE_S + TRANSFER_S
FIRST_TOKEN_S = PREFILL.base_s


def prefill_s(num_tokens: int) -> float:
    return PREFILL.per_unit_s * num_tokens


def plan(
    request: RouteQuery,
    workers: Sequence[WorkerSpec] | None = None,
    encoders: Sequence[EncoderSpec] | None = None,
    **changes: Any,
) -> RoutePlan:
    return plan_route(request, snapshot(workers or [worker("w")], encoders or [encoder("e")], **changes), now=7.0)


def test_without_overlap_the_sum_of_encode_transfer_and_prefill_appears() -> None:
    made = plan(query(image(0), 100))
    assert made.predicted_ttft_s == pytest.approx(ENCODE_S + TRANSFER_S + prefill_s(164) + FIRST_TOKEN_S)
    assert made.explanation.winner.held_s == pytest.approx(LANDING_S)


def test_a_long_text_prefix_hides_the_encoding_and_the_maximum_appears() -> None:
    hidden = plan(query(500, image(0), 100))
    assert prefill_s(500) > LANDING_S
    assert hidden.predicted_ttft_s == pytest.approx(max(prefill_s(500), LANDING_S) + prefill_s(164) + FIRST_TOKEN_S)
    assert hidden.explanation.winner.held_s == 0.0
    shown = plan(query(10, image(0), 100))
    assert prefill_s(10) < LANDING_S
    assert shown.predicted_ttft_s == pytest.approx(max(prefill_s(10), LANDING_S) + prefill_s(164) + FIRST_TOKEN_S)


def test_the_workers_queue_overlaps_the_encoding_too() -> None:
    made = plan(query(image(0), 100), [worker("w", queued_tokens=1000)])
    queued_s = PREFILL.at(1000)
    assert made.predicted_ttft_s == pytest.approx(max(queued_s, LANDING_S) + prefill_s(164) + FIRST_TOKEN_S)
    assert made.lower_bound_s == pytest.approx(LANDING_S + prefill_s(164) + FIRST_TOKEN_S)


def test_text_costs_its_prefill_alone_and_weighs_context() -> None:
    assert plan(query(100)).predicted_ttft_s == pytest.approx(prefill_s(100) + FIRST_TOKEN_S)
    deep = plan(query(1000), context_scale_tokens=500.0)
    assert deep.predicted_ttft_s == pytest.approx(prefill_s(1000) * 2 + FIRST_TOKEN_S)
    cached = plan(query(1000), [worker("w", covered_blocks=50)], context_scale_tokens=500.0)
    assert cached.explanation.winner.prefill_s == pytest.approx(prefill_s(200) * (1 + 900 / 500))


def test_images_on_one_encoder_land_one_after_the_other() -> None:
    first, second = plan(query(image(0), image(1))).explanation.winner.items
    assert first.landing_s == pytest.approx(LANDING_S)
    assert second.landing_s == pytest.approx(DECODE.base_s + ENCODE.at(512) + TRANSFER_S)


def test_images_go_to_several_encoders_by_earliest_landing() -> None:
    made = plan(query(image(0), image(1), image(2)), encoders=[encoder("a"), encoder("b", queued_cost=100)])
    assert [each.encoder_id for each in made.assignments] == ["a", "b", "a"]


def test_waiting_for_the_encoder_overlaps_its_decoding() -> None:
    slow_decode = EncoderCosts(Line(1.0, 0.0), NO_COST, ENCODE)
    busy = encoder("e", queued_cost=1000, costs=slow_decode)
    (item,) = plan(query(image(0), 10), encoders=[busy]).explanation.winner.items
    assert item.wait_s == pytest.approx(ENCODE.at(1000))
    assert item.landing_s == pytest.approx(1.0 + ENCODE.at(256) + TRANSFER_S)


def test_each_modality_costs_its_own_and_forwards_add_up() -> None:
    sounds = EncoderCosts(Line(0.5, 0.0), NO_COST, Line(0.03, 0.001))
    both = encoder("e", modalities=frozenset({"image", "audio"}), modality_to_costs={"audio": sounds})
    media = [image(0), image(1, modality="audio"), image(2), image(3, modality="audio")]
    items = plan(query(*media, 10), encoders=[both]).explanation.winner.items
    heard_s = [sounds.encode.at(256), sounds.encode.at(512)]
    assert [item.modality for item in items] == ["image", "audio", "image", "audio"]
    assert [item.encode_s for item in items] == pytest.approx(
        [ENCODE.at(256), heard_s[0], ENCODE.per_unit_s * 256, heard_s[1] - heard_s[0]]
    ), "the overhead of a forward pass counts once for each modality"
    assert [item.decode_s for item in items] == pytest.approx([DECODE.base_s, 0.5, DECODE.base_s, 0.5])
    begins_s = [0.0, DECODE.base_s, DECODE.base_s + 0.5, 2 * DECODE.base_s + 0.5]
    assert [item.decode_wait_s for item in items] == pytest.approx(begins_s), "one process decodes them in turn"
    decoded_s = 2 * DECODE.base_s + 1.0
    last_s = decoded_s + heard_s[1] - heard_s[0] + TRANSFER_S
    assert items[3].landing_s == pytest.approx(last_s)


def test_pictures_and_sound_of_one_video_may_go_to_two_encoders() -> None:
    vision_encoder, audio_encoder = (
        encoder("vision", modalities=frozenset({"video"})),
        encoder("audio", modalities=frozenset({"audio"})),
    )
    made = plan(query(image(0, modality="video"), image(1, modality="audio")), encoders=[audio_encoder, vision_encoder])
    assert [each.encoder_id for each in made.assignments] == ["vision", "audio"]
    with pytest.raises(NoCapacity, match="audio"):
        plan(query(image(0, modality="video"), image(1, modality="audio")), encoders=[vision_encoder])


def test_units_of_a_video_land_one_by_one_and_overlap_inside_it() -> None:
    frames = MediaItem(0, "image", "f" * 32, (4, 8, 8), (100, 100, 100, 100), 4000, "p")
    made = plan(query(frames, 10))
    unit_transfer_s = LINK.at(100 * ROW_BYTES)
    # The first unit is encoded as soon as a quarter of the video is decoded.
    landings = [DECODE.base_s / 4 + ENCODE.at(1000 * n) + unit_transfer_s for n in (1, 2, 3, 4)]
    t = 0.0
    for landing_s in landings:
        t = max(t, landing_s) + prefill_s(100)
    assert made.predicted_ttft_s == pytest.approx(t + prefill_s(10) + FIRST_TOKEN_S)
    assert made.predicted_ttft_s < landings[-1] + prefill_s(410) + FIRST_TOKEN_S


def test_a_cached_feature_costs_its_transfer_alone() -> None:
    cached = encoder("b", queued_cost=10_000, cached=frozenset({image(0).mm_hash}))
    made = plan(query(image(0), 10), encoders=[encoder("a"), cached])
    (item,) = made.explanation.winner.items
    assert (item.encoder_id, item.is_cached, item.load) == ("b", True, 0)
    assert item.landing_s == pytest.approx(TRANSFER_S)


def test_what_travels_is_as_many_levels_as_the_item_has() -> None:
    """The item is a sound with one level, or a picture with DeepStack levels."""
    for num_levels in (1, 4):
        item = msgspec.structs.replace(image(0), num_levels=num_levels)
        (terms,) = plan(query(item, 10)).explanation.winner.items
        assert terms.num_bytes == num_levels * 64 * ROW_BYTES
        assert terms.transfer_s == pytest.approx(LINK.at(num_levels * 64 * ROW_BYTES))


def test_the_same_picture_twice_is_encoded_once() -> None:
    made = plan(query(image(0, digit="a"), 5, image(1, digit="a"), 5), encoders=[encoder("a"), encoder("b")])
    first, second = made.explanation.winner.items
    assert first.encoder_id == second.encoder_id
    assert second.landing_s == first.landing_s
    assert (first.load, second.load) == (256, 0)


def test_covered_items_are_not_encoded_and_partly_covered_ones_are_encoded_whole() -> None:
    request = query(16, image(0), image(1), 40)
    made = plan(request, [worker("w", covered_blocks=7)])
    assert made.covered_items == (0,)
    assert [each.item_index for each in made.assignments] == [1]
    terms = made.explanation.winner
    assert (terms.covered_tokens, terms.num_prefill_tokens) == (112, 184 - 112)
    assert terms.items[0].cost == 256
    assert terms.held_s == pytest.approx(LANDING_S)


def test_a_prompt_that_is_all_cached_still_computes_its_last_token() -> None:
    made = plan(query(64), [worker("w", covered_blocks=4)])
    assert made.explanation.winner.covered_tokens == 48
    assert made.explanation.winner.num_prefill_tokens == 16


def test_coverage_beats_a_shorter_queue_by_time_not_by_rank() -> None:
    covering, idle = worker("covering", covered_blocks=30, queued_tokens=100), worker("idle")
    assert plan(query(500), [idle, covering]).worker_id == "covering"
    overloaded = covering._replace(queued_tokens=5000)
    assert plan(query(500), [idle, overloaded]).worker_id == "idle"


def test_lacking_kv_blocks_count_as_a_queue() -> None:
    tight = worker("tight", kv_blocks_free=2)
    made = plan(query(160), [tight])
    assert made.explanation.winner.queue_s == pytest.approx(PREFILL.at(8 * 16))
    assert plan(query(160), [tight, worker("roomy", kv_blocks_free=10)]).worker_id == "roomy"


def test_links_are_costed_by_class_and_never_filtered() -> None:
    near, far = worker("near", host="h-1/p"), worker("far", host="h-2")
    costs = dict.fromkeys(LinkClass, LINK) | {LinkClass.TCP: Line(0.5, 0.0)}
    request = query(image(0), 10)
    state = replace(snapshot([far, near], [encoder("e", host="h-1/p")]), links=costs)
    assert plan_route(request, state, 0.0).worker_id == "near"
    busy = replace(state, workers=(far, near._replace(queued_tokens=2000)))
    assert plan_route(request, busy, 0.0).worker_id == "far"


def test_the_explanation_sums_up_and_is_plain_data() -> None:
    made = plan(query(10, image(0), 100), [worker("a", queued_tokens=5), worker("b", queued_tokens=50)])
    winner, runner_up = made.explanation.winner, made.explanation.runner_up
    assert winner.queue_s + winner.prefill_s + winner.held_s + winner.first_token_s == pytest.approx(winner.ttft_s)
    assert runner_up is not None
    assert (winner.worker_id, runner_up.worker_id) == ("a", "b")
    assert runner_up.ttft_s > winner.ttft_s
    plain = msgspec.to_builtins(made)
    assert plain["explanation"]["winner"]["items"][0]["encoder_id"] == "e"
    assert plain["planned_at_s"] == 7.0
    assert msgspec.json.encode(made.explanation)


def test_near_equals_are_chosen_by_the_tie_break_and_by_fewest_open_attempts() -> None:
    four = [worker(name) for name in "abcd"]
    assert [plan(query(100), four, tie_break=t).worker_id for t in (0.0, 0.3, 0.6, 0.99)] == list("abcd")
    busier = [worker("a", num_open=1), worker("b", num_open=1), worker("c")]
    assert {plan(query(100), busier, tie_break=t).worker_id for t in (0.0, 0.5, 0.99)} == {"c"}
    idle_encoders = [encoder("x"), encoder("y")]
    chosen = {plan(query(image(0)), encoders=idle_encoders, tie_break=t).assignments[0].encoder_id for t in (0.1, 0.9)}
    assert chosen == {"x", "y"}


def test_no_worker_is_no_capacity() -> None:
    with pytest.raises(NoCapacity, match="no worker"):
        plan_route(query(10), snapshot([]), 0.0)
    with pytest.raises(NoCapacity, match="no worker"):
        plan_route(query(10, excluded=["w"]), snapshot([worker("w")]), 0.0)


def test_no_encoder_for_the_modality_is_no_capacity_that_names_it() -> None:
    request = query(10, image(0, modality="audio"), 10)
    with pytest.raises(NoCapacity, match="audio"):
        plan(request)
    with pytest.raises(NoCapacity, match="image"):
        plan(query(image(0), 10, excluded=["e"]))
    with pytest.raises(NoCapacity, match="audio"):
        plan_encoding(request, "w", [0], snapshot([worker("w")], [encoder("e")]))


def test_without_an_encoder_a_worker_that_covers_the_media_still_serves() -> None:
    request = query(image(0), 40)
    made = plan(
        request,
        [worker("a"), worker("b", covered_blocks=4, queued_tokens=9999)],
        [encoder("e", modalities=frozenset())],
    )
    assert (made.worker_id, made.assignments, made.covered_items) == ("b", (), (0,))


def test_items_needed_after_all_go_where_they_land_earliest() -> None:
    request = query(10, image(0), image(1), 10)
    state = snapshot([worker("w")], [encoder("a", queued_cost=5000), encoder("b")])
    (terms,) = plan_encoding(request, "w", [1], state)
    assert (terms.item_index, terms.encoder_id) == (1, "b")
    (elsewhere,) = plan_encoding(query(10, image(0), image(1), 10, excluded=["b"]), "w", [1], state)
    assert elsewhere.encoder_id == "a"


def test_a_prefix_does_not_bind_a_request_to_a_worker_with_a_long_queue() -> None:
    """The other worker's first token comes later, because it computes the whole prompt; yet the queue is too long to
    grow further. This holds whether or not the encoders of both are improved."""
    for media in ((), (image(0), image(1))):
        request = query(20_000, *media, 100)
        near_s = prefill_s(12_000)
        crowded = worker("crowded", covered_blocks=1250, queued_tokens=12_000)
        made = plan(request, [crowded, worker("idle")])
        assert made.worker_id == "idle"
        assert made.explanation.winner.released_s == 0.0
        (other,) = made.explanation.alternatives
        assert (other.worker_id, other.covered_tokens) == ("crowded", 20_000)
        assert near_s < other.ttft_s < made.predicted_ttft_s
        assert other.released_s == pytest.approx(prefill_s(20_000))
        short = plan(request, [worker("crowded", covered_blocks=1250, queued_tokens=9_000), worker("idle")])
        assert (short.worker_id, short.explanation.winner.released_s) == ("crowded", 0.0)


def test_the_release_of_a_prefix_holds_if_only_one_of_the_media_is_in_it() -> None:
    request = query(20_000, image(0), 16, image(1), 100)
    crowded = worker("crowded", covered_blocks=1255, queued_tokens=12_000)
    made = plan(request, [crowded, worker("idle")], [encoder("e"), encoder("f")])
    assert made.worker_id == "idle"
    assert [each.item_index for each in made.assignments] == [0, 1]
