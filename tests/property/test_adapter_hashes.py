"""Tests that routers and workers hash the blocks of a prompt alike whatever its adapter and salt are, and that no two
of these share a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from scheduling_prompts import Segment, build, segments

from fabric.contracts import (
    WEFT_KV,
    GenerateRequest,
    KvScheme,
    MemberId,
    RequestId,
    SamplingParams,
    StopConditions,
    split_hashes,
)
from llm_workers.scheduling import PromptLayout
from llm_workers.vllm_engine.block_mirror import block_hasher
from router.prompt import Prompt

BLOCK = 4
WORDS = ("", "a", "b", "salt", "lora", "ab")


@dataclass
class GrowingTokens:
    """Stands for a request of vLLM, which asks for hashes as its tokens are computed."""

    all_token_ids: Sequence[int]
    block_hashes: list[bytes] = field(default_factory=list)


def hashes_of_router(parts: tuple[Segment, ...], salt: str, adapter: str) -> list[bytes]:
    token_ids, runs, media = build(parts)
    prompt = Prompt(token_ids, runs, media, (), SamplingParams(), StopConditions(1), cache_salt=salt, adapter=adapter)
    return [*split_hashes(prompt.block_hashes(KvScheme(WEFT_KV, BLOCK)))]


def hashes_of_worker(parts: tuple[Segment, ...], salt: str, adapter: str, cut: int) -> list[bytes]:
    """Hashes the first `cut` tokens first, and then the others."""
    token_ids, runs, media = build(parts)
    request = GenerateRequest(
        request_id=RequestId("r"),
        attempt=0,
        router_id=MemberId("router"),
        router_address="local://router",
        token_ids=token_ids,
        placeholders=runs,
        media=media,
        sampling=SamplingParams(),
        stop=StopConditions(1),
        age=(0.0, "r"),
        cache_salt=salt,
        adapter=adapter,
    )
    hash_new = block_hasher(PromptLayout(request), BLOCK)
    tokens = GrowingTokens(token_ids[:cut])
    tokens.block_hashes += hash_new(tokens)
    tokens.all_token_ids = token_ids
    return [*tokens.block_hashes, *hash_new(tokens)]


@given(parts=segments, salt=st.sampled_from(WORDS), adapter=st.sampled_from(WORDS), cut=st.integers(0, 30))
def test_router_and_worker_agree(parts: tuple[Segment, ...], salt: str, adapter: str, cut: int) -> None:
    assert hashes_of_worker(parts, salt, adapter, cut) == hashes_of_router(parts, salt, adapter)


@given(
    parts=segments,
    first=st.tuples(st.sampled_from(WORDS), st.sampled_from(WORDS)),
    second=st.tuples(st.sampled_from(WORDS), st.sampled_from(WORDS)),
)
def test_two_adapters_or_salts_share_no_block(
    parts: tuple[Segment, ...], first: tuple[str, str], second: tuple[str, str]
) -> None:
    one, other = hashes_of_router(parts, *first), hashes_of_router(parts, *second)
    assert (one == other) if first == second else not set(one) & set(other)
