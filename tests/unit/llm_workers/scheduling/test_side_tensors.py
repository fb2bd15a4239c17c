"""Tests side tensors under the blocks' ids and eviction: what counts as a hit for which request, and which block
replaces which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scheduling_cases import Bench, attempt_id, request, sequence_id

from fabric.contracts import BlockHash, ProtocolError, SequenceId
from llm_workers.scheduling import BlockPool, Chunk

A, B = sequence_id("a"), sequence_id("b")
TALKER = frozenset({"talker"})
BOTH = frozenset({"talker", "other"})


def hashes(text: str) -> list[BlockHash]:
    return [BlockHash(letter.encode() * 16) for letter in text]


def publish(
    pool: BlockPool, owner: SequenceId, text: str, names: frozenset[str] = frozenset()
) -> tuple[list[int], list[int]]:
    blocks = pool.allocate(owner, len(text))
    return blocks, pool.publish(owner, None, blocks, hashes(text), names)


def test_a_chain_counts_up_to_its_first_block_without_the_name() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(A, 4)
    pool.publish(A, None, blocks[:2], hashes("xy"), BOTH)
    pool.publish(A, hashes("y")[0], blocks[2:3], hashes("z"), TALKER)
    pool.publish(A, hashes("z")[0], blocks[3:], hashes("w"))
    assert pool.lookup(hashes("xyzw")) == blocks
    assert pool.lookup(hashes("xyzw"), TALKER) == blocks[:3]
    assert pool.lookup(hashes("xyzw"), BOTH) == blocks[:2]


def test_names_go_with_the_block() -> None:
    pool = BlockPool(2)
    blocks, _ = publish(pool, A, "xy", TALKER)
    pool.free(A, blocks)
    pool.allocate(B, 2)
    assert [pool.names(block) for block in blocks] == [frozenset(), frozenset()]
    assert pool.lookup(hashes("x"), TALKER) == []


def test_a_cached_block_without_the_name_gives_its_place() -> None:
    pool = BlockPool(6)
    poor, _ = publish(pool, A, "xy")
    pool.free(A, poor)
    pool.drain_events()
    rich, kept = publish(pool, B, "xy", TALKER)
    assert kept == rich
    assert pool.lookup(hashes("xy"), TALKER) == rich
    assert pool.num_cached == 2
    assert pool.num_free == 4
    assert pool.drain_events()[1] == [], "routers knew these hashes"
    pool.check_invariants({B: rich})


def test_a_block_in_use_keeps_its_place_and_the_chain_stays_private() -> None:
    pool = BlockPool(6)
    poor, _ = publish(pool, A, "x")
    rich, kept = publish(pool, B, "xy", TALKER)
    assert kept == []
    assert pool.lookup(hashes("xy")) == poor
    pool.check_invariants({A: poor, B: rich})
    pool.free(B, rich)
    assert pool.num_cached == 1


def test_who_needs_less_shares_what_has_more() -> None:
    pool = BlockPool(6)
    rich, _ = publish(pool, A, "x", BOTH)
    _, kept = publish(pool, B, "x", TALKER)
    assert kept == rich
    assert pool.names(rich[0]) == BOTH


def serve(bench: Bench, name: str, prompt: list[int], *side_names: str) -> int:
    """Runs a request to its end and returns the number of its prompt tokens that were hit."""
    hits = bench.add(request(name, prompt, max_tokens=1, side_names=side_names)).num_cached_tokens
    for chunk in bench_chunks(bench):
        assert chunk.side_names == frozenset(side_names)
    return hits


def bench_chunks(bench: Bench) -> Iterator[Chunk]:
    while True:
        plan = bench.plan()
        if not plan.chunks:
            return
        yield from plan.chunks
        bench.commit(plan)


def test_a_request_that_needs_rows_computes_what_was_cached_without_them() -> None:
    bench = Bench(block_size=4, num_blocks=64, side_layers=(("talker", 2),))
    prompt = list(range(40))
    assert serve(bench, "plain", prompt) == 0
    assert serve(bench, "plain again", prompt) == 39
    assert serve(bench, "speech", prompt, "talker") == 0
    assert serve(bench, "speech again", prompt, "talker") == 39
    assert serve(bench, "plain after it", prompt) == 39


def test_a_longer_prompt_counts_up_to_the_last_block_that_has_them() -> None:
    bench = Bench(block_size=4, num_blocks=64, side_layers=(("talker", 2),))
    prompt = list(range(40))
    serve(bench, "speech", prompt[:20], "talker")
    serve(bench, "plain", prompt)
    assert serve(bench, "longer speech", prompt, "talker") == 20


def test_names_that_nobody_keeps_are_refused() -> None:
    bench = Bench(block_size=4, num_blocks=64, side_layers=(("talker", 2),))
    with pytest.raises(ProtocolError, match="does not store the side tensors other"):
        bench.add(request("r", 8, side_names=("other",)))


def test_a_choice_keeps_private_what_it_took_over_from_a_private_one() -> None:
    """The first choice has private blocks, because the prompt's blocks were in use without the rows at that time; that
    use has ended since."""
    bench = Bench(block_size=4, num_blocks=64, side_layers=(("talker", 2),))
    prompt = list(range(40))
    bench.add(request("plain", prompt))
    bench.step()
    bench.add(request("speech", prompt, num_choices=2, side_names=("talker",)))
    bench.step()
    bench.scheduler.abort(attempt_id("plain"))
    for _ in range(6):
        bench.step()
    assert bench.add(request("speech again", prompt, side_names=("talker",))).num_cached_tokens == 0
