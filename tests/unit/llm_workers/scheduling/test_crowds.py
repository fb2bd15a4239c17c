"""Tests that a crowd of waiting requests adds no cost to a step and holds no blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from scheduling_cases import Bench, attempt_id, request, sequence_id, unit

from llm_workers.scheduling import BlockPool
from llm_workers.scheduling.sequence import PromptLayout, Sequence
from llm_workers.scheduling.step_planner import MAX_PASSED_OVER

PREFIX = list(range(64))


def crowded(num_waiting: int, **fields: object) -> Bench:
    """Returns a bench on which three requests decode and hold nearly all blocks; the others share their prefix and find
    no room."""
    bench = Bench(block_size=4, num_blocks=16 + 3 * 5 + 4, max_sequences=8)
    for number in range(3):
        bench.add(request(f"runs-{number}", [*PREFIX, *range(1000 * number, 1000 * number + 18)], age=number))
        bench.step()
    assert bench.scheduler.stats().num_decoding == 3
    for number in range(num_waiting):
        tail = range(10_000 + 100 * number, 10_020 + 100 * number)
        bench.add(request(f"waits-{number}", [*PREFIX, *tail], age=10 + number, **fields))
    return bench


def operations(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Counter[str]:
    """Returns how often a step calls what it may call only for sequences that it serves or tries."""
    counts: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counting(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    with monkeypatch.context() as monkeypatch:
        count(BlockPool, "lookup")
        count(BlockPool, "num_reclaimable")
        count(PromptLayout, "runs_between")
        count(Sequence, "extend_hashes")
        plan = bench.scheduler.plan_step()
        for chunk in plan.chunks:
            assert chunk.sequence_id.request_id.startswith("runs")
    bench.commit(plan)
    return counts


@pytest.mark.parametrize("fields", [{}, {"priority": 1}, {"cache_salt": "tenant"}])
def test_a_step_looks_at_no_more_of_a_hundred_than_of_ten(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    few, many = (operations(monkeypatch, crowded(count, **fields)) for count in (10, 100))
    assert few == many
    assert few["lookup"] <= 2 * MAX_PASSED_OVER


def test_each_user_a_salt_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = crowded(0), crowded(0)
    for bench, count in ((few, 10), (many, 100)):
        for number in range(count):
            bench.add(request(f"user-{number}", 40, age=20 + number, cache_salt=f"salt-{number}"))
    assert operations(monkeypatch, few) == operations(monkeypatch, many)


def test_waiting_requests_hold_no_blocks() -> None:
    without, with_crowd = crowded(0), crowded(100)
    assert with_crowd.scheduler.stats().kv_blocks_used == without.scheduler.stats().kv_blocks_used
    assert with_crowd.scheduler.stats().num_waiting == 100


def test_a_hit_is_counted_when_it_is_used() -> None:
    bench = crowded(1)
    assert bench.scheduler.stats().prefix_hit_tokens == 2 * len(PREFIX)
    bench.scheduler.abort(attempt_id("runs-2"))
    assert bench.step() == {"runs-0": 1, "runs-1": 1, "waits-0": 20}
    assert bench.scheduler.stats().prefix_hit_tokens == 3 * len(PREFIX)


def test_blocks_that_were_evicted_before_it_began_cost_a_request_its_units() -> None:
    """The picture lies in cached blocks at admission, but another request takes them before this one begins."""
    bench = Bench(block_size=4, num_blocks=8, max_sequences=1)
    picture = [("image", 4, 8)]
    bench.add(request("first", 16, picture, max_tokens=1), landed=True)
    bench.step()
    bench.add(request("other", 28, age=1, max_tokens=1))
    assert bench.add(request("second", request("first", 16, picture).token_ids, picture, age=2)).missing_units == ()
    assert not bench.scheduler.needs_unit(unit("image"))
    assert bench.step() == {"other": 28}
    assert bench.step() == {}
    assert [tuple(need) for need in bench.scheduler.drain_needed()] == [
        (sequence_id("second"), unit("image"), "preempted")
    ]
    bench.land(unit("image"))
    assert bench.step() == {"second": 12}


def test_the_blocks_that_a_waiting_request_hits_are_given_away_last() -> None:
    bench = Bench(block_size=4, num_blocks=12, max_sequences=1)
    for name in ("wanted", "other"):
        bench.add(request(name, 16, max_tokens=1))
        bench.step()
    bench.add(request("large", 28, age=1, max_tokens=1))
    bench.add(request("again", request("wanted", 16).token_ids, age=2))
    bench.step()
    assert bench.step() == {"again": 1}


def test_those_that_find_no_room_do_not_keep_one_that_has_begun_waiting() -> None:
    """A crowd of another tenant is ahead of that request in turn, and none of the crowd may begin."""
    bench = Bench(block_size=4, num_blocks=24, max_step_tokens=10, max_sequences=4)
    bench.add(request("decodes", 8, age=0, max_tokens=60))
    bench.step()
    bench.add(request("long", 70, age=1, max_tokens=1))
    bench.step()
    for number in range(3 * MAX_PASSED_OVER):
        bench.add(request(f"crowd-{number}", 92, age=2 + number, cache_salt="crowd"))
    computed = [bench.step().get("long", 0) for _ in range(7)]
    assert computed == [9] * 6 + [7]


@pytest.mark.parametrize("num_large", [MAX_PASSED_OVER - 1, MAX_PASSED_OVER])
def test_a_small_request_begins_behind_so_many_large_ones_and_no_more(num_large: int) -> None:
    bench = Bench(block_size=4, num_blocks=20, max_sequences=4)
    bench.add(request("decodes", 8, age=0, max_tokens=60))
    bench.step()
    for number in range(num_large):
        bench.add(request(f"large-{number}", 76, age=1 + number))
    bench.add(request("small", 8, age=100))
    assert bench.step() == {"decodes": 1} | ({"small": 8} if num_large < MAX_PASSED_OVER else {})


def test_tokens_that_a_tenant_decodes_count_as_its_share() -> None:
    """Half of each step decodes for one tenant, so the other half belongs to the other tenant."""
    bench = Bench(block_size=4, num_blocks=200, max_step_tokens=10, max_sequences=16)
    for number in range(5):
        bench.add(request(f"decodes-{number}", 2, age=number, cache_salt="a"))
    bench.step()
    bench.add(request("long-a", 100, age=10, cache_salt="a"))
    bench.add(request("long-b", 100, age=11, cache_salt="b"))
    computed: Counter[str] = Counter()
    for _ in range(10):
        computed.update(bench.step())
    assert computed["long-a"] + computed["long-b"] == 10 * 5
    assert computed["long-b"] >= 9 * 5


def test_when_nothing_else_can_be_done_the_first_in_rank_is_tried() -> None:
    """A request at its doorstep (ahead of a medium that was lost) holds all blocks, and the tenant whose turn it
    is has only younger prompts, which may not take these blocks; the oldest request, of the other tenant, may take
    them and waits behind these prompts."""
    bench = Bench(block_size=4, num_blocks=20, max_step_tokens=79, max_sequences=4)
    bench.add(request("doorstep", 80, [("image", 79, 1)], age=1, cache_salt="a"), landed=True)
    for number in range(3 * MAX_PASSED_OVER):
        media = [(f"other-{number}", 7, 1)]
        bench.add(request(f"younger-{number}", 8, media, age=2 + number, cache_salt="b"), landed=True)
    assert bench.step() == {"doorstep": 79}
    bench.scheduler.evict_feature(unit("image"))
    assert bench.step() == {}
    bench.add(request("oldest", 60, [("last", 59, 1)], age=0, cache_salt="a"), landed=True)
    assert bench.step() == {"oldest": 60}
