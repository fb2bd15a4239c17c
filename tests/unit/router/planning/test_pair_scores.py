"""Tests the scores of pairs of a worker and an encoder, which people read to see why a request went where it did."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from planning_samples import EncoderSpec, WorkerSpec, encoder, image, query, snapshot, worker

from fabric.contracts import NoCapacity
from router.planning import PairScores, RoutePlan, RouteQuery

NOW_S = 7.0


def scored(
    request: RouteQuery, workers: Sequence[WorkerSpec], encoders: Sequence[EncoderSpec], max_pairs: int = 100
) -> tuple[PairScores, RoutePlan]:
    cluster = snapshot(workers, encoders)
    return cluster.search(request, NOW_S).pairs(max_pairs), cluster.search(request, NOW_S).plan()


def test_every_worker_is_scored_with_every_encoder_and_the_best_pair_is_the_plan() -> None:
    workers = [worker("w0", queued_tokens=400), worker("w1"), worker("w2", queued_tokens=90)]
    encoders = [encoder("e0", queued_cost=900), encoder("e1"), encoder("e2", queued_cost=100)]
    found, plan = scored(query(image(0), 100), workers, encoders)
    pairs = [(each.worker_id, each.items[0].encoder_id) for each in found.pairs]
    assert found.num_pairs == 9
    assert sorted(pairs) == [(w.worker_id, e.encoder_id) for w in workers for e in encoders]
    times = [each.ttft_s for each in found.pairs]
    assert times == sorted(times)
    assert pairs[0] == (plan.worker_id, plan.assignments[0].encoder_id) == ("w1", "e1")
    assert times[0] == pytest.approx(plan.predicted_ttft_s)
    for each in found.pairs:
        terms_s = each.queue_s + each.prefill_s + each.held_s + each.first_token_s + each.delivery_s
        assert terms_s == pytest.approx(each.ttft_s)
    slow = next(each for each in found.pairs if (each.worker_id, each.items[0].encoder_id) == ("w1", "e0"))
    assert slow.items[0].wait_s > found.pairs[0].items[0].wait_s, "the queue of the encoder shows in its pair"


def test_a_pair_equals_the_plan_of_a_cluster_that_has_nothing_else() -> None:
    workers = [worker("w0", queued_tokens=300), worker("w1", covered_blocks=2)]
    encoders = [encoder("e0", queued_cost=500), encoder("e1")]
    request = query(50, image(0), 20, image(1), 100)
    found, _ = scored(request, workers, encoders)
    for pair in found.pairs:
        (own_worker,) = [each for each in workers if each.worker_id == pair.worker_id]
        (own_encoder,) = [each for each in encoders if each.encoder_id == pair.items[0].encoder_id]
        _, alone = scored(request, [own_worker], [own_encoder])
        assert pair.ttft_s == pytest.approx(alone.predicted_ttft_s)
        assert [each.encoder_id for each in pair.items] == [each.encoder_id for each in alone.assignments]


def test_texts_and_covered_media_need_no_encoder() -> None:
    found, plan = scored(query(100), [worker("w0", queued_tokens=500), worker("w1")], [encoder("e0"), encoder("e1")])
    assert [(each.worker_id, each.items) for each in found.pairs] == [("w1", ()), ("w0", ())]
    assert found.pairs[0].ttft_s == pytest.approx(plan.predicted_ttft_s)


def test_media_that_no_single_encoder_takes_have_the_scores_of_the_search() -> None:
    eyes = encoder("eyes", modalities=frozenset({"image"}))
    ears = encoder("ears", modalities=frozenset({"audio"}))
    found, plan = scored(query(image(0), image(1, modality="audio"), 10), [worker("w0")], [eyes, ears])
    (only,) = found.pairs
    assert [each.encoder_id for each in only.items] == ["eyes", "ears"]
    assert only.ttft_s == pytest.approx(plan.predicted_ttft_s)


def test_only_the_best_workers_are_scored_where_pairs_are_too_many() -> None:
    workers = [worker(f"w{number}", queued_tokens=100 * number) for number in range(5)]
    found, _ = scored(query(image(0), 10), workers, [encoder("e0"), encoder("e1")], max_pairs=4)
    assert found.num_pairs == 10
    assert {each.worker_id for each in found.pairs} == {"w0", "w1"}


def test_without_a_worker_or_an_encoder_there_are_no_pairs() -> None:
    with pytest.raises(NoCapacity, match="image"):
        scored(query(image(0)), [worker("w0")], [encoder("e0", modalities=frozenset({"audio"}))])
