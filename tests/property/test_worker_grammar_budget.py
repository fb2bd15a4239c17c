"""Checks that the grammars of a worker stay within their budget of memory, and that none waits for another's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from llguidance import LLMatcher

from deploy.testing import tiny_codec
from fabric.contracts import InvalidRequest, Overloaded
from llm_workers.sampling import GrammarCompiler
from llm_workers.sampling.grammar import MAX_WAITING, NUM_THREADS, GrammarGuide
from modalities.text import CompiledGrammar, CompileLimits, GrammarTokenizer

CODEC = tiny_codec()
WIDTH = 300
LIMITS = CompileLimits()
COMPILE = GrammarTokenizer.compile


def regex(text: str) -> str:
    return LLMatcher.grammar_from_regex(text)


def compiler(max_bytes: int = 2**28, max_lexer_steps: int = LIMITS.max_lexer_steps) -> GrammarCompiler:
    return GrammarCompiler(CODEC, WIDTH, CompileLimits(max_lexer_steps=max_lexer_steps), max_bytes)


def draw(guide: GrammarGuide, text: bytes) -> bool:
    """Follows a text. Returns whether the guide could be followed to its end."""
    words = np.zeros(-(-WIDTH // 32), dtype=np.int32)
    for byte in text:
        if not guide.write_mask(words):
            return False
        guide.advance([byte])
    return guide.write_mask(words)


# ------------------------------------------------------------ memory


def test_what_is_kept_stays_within_the_budget_whatever_the_number_of_grammars() -> None:
    one = compiler()
    one.compile(regex("(x|y)?" * 300 + "z"))
    size = one.num_bytes
    several = compiler(max_bytes=4 * size)
    for number in range(12):
        several.compile(regex("(x|y)?" * 300 + f"z{number:02}"))
        assert several.num_bytes <= 4 * size + 4 * 2**10
    assert several.num_bytes > 2 * size


def test_grammars_in_use_count_too_and_room_comes_back_with_their_end() -> None:
    size = GrammarTokenizer(CODEC, WIDTH, LIMITS).compile(regex("(x|y)?" * 300 + "z0")).num_bytes
    full = compiler(max_bytes=2 * size + size // 2)
    guides = [full.compile(regex("(x|y)?" * 300 + f"z{number}")) for number in range(2)]
    with pytest.raises(Overloaded):
        full.compile(regex("(x|y)?" * 300 + "z2"))
    assert draw(guides[0].fork(), b"xyx"), "those that run go on"
    guides.clear()
    assert draw(full.compile(regex("(x|y)?" * 300 + "z2")), b"xyx")


def test_a_grammar_that_grows_too_large_breaks_alone_and_begins_again() -> None:
    grammar, text = regex("(.*[ab].{100})*z"), b"abcab" * 60
    limited = compiler(max_lexer_steps=100_000)
    other = limited.compile(regex("[abc]*"))
    assert draw(compiler().compile(grammar), text)
    assert not draw(limited.compile(grammar), text)
    assert draw(other, text)
    assert draw(limited.compile(grammar), text[:20]), "the lexer that is exhausted is not used again"


def test_over_the_budget_a_grammar_with_more_than_an_equal_share_breaks() -> None:
    grammar, text = regex("(.*[ab].{100})*z"), b"abcab" * 60
    small = compiler()
    small.compile(regex("[abc]*"))
    limited = compiler(max_bytes=4 * small.num_bytes)
    modest, greedy = limited.compile(regex("[abc]*")), limited.compile(grammar)
    assert not draw(greedy, text)
    assert draw(modest, text)


# ------------------------------------------------------------ waiting


class Gate:
    """Makes compiling wait until `opens` is set, and lists the grammars whose compiling has begun."""

    def __init__(self) -> None:
        self.opens = threading.Event()
        self.begun: list[str] = []

    def compile(self, tokenizer: GrammarTokenizer, grammar: str) -> CompiledGrammar:
        self.begun.append(grammar)
        if "slow" in grammar:
            assert self.opens.wait(60)
        return COMPILE(tokenizer, grammar)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(GrammarTokenizer, "compile", lambda tokenizer, grammar: gate.compile(tokenizer, grammar))
    yield gate
    gate.opens.set()


async def until(is_true: Callable[[], object]) -> None:
    for _ in range(100_000):
        if is_true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became true")


async def test_a_grammar_does_not_wait_for_another_that_is_compiled(gate: Gate) -> None:
    one = compiler()
    slow = asyncio.ensure_future(one.guide(regex("slow")))
    await until(lambda: gate.begun)
    assert draw(await one.guide(regex("fast")), b"fast")
    assert not slow.done()
    gate.opens.set()
    assert draw(await slow, b"slow")


async def test_a_grammar_is_compiled_once_for_all_that_wait_for_it(gate: Gate) -> None:
    one = compiler()
    waits = [asyncio.ensure_future(one.guide(regex("slow"))) for _ in range(8)]
    await until(lambda: gate.begun)
    waits.pop().cancel()
    gate.opens.set()
    guides = await asyncio.gather(*waits)
    assert len({id(guide) for guide in guides}) == len(guides) == 7
    assert len(gate.begun) == 1


@pytest.mark.parametrize("flaw", ["(a", "(x|y)?" * 300])
def test_a_refusal_is_remembered(gate: Gate, flaw: str) -> None:
    one = compiler(max_lexer_steps=50_000)
    reasons = set()
    for _ in range(3):
        with pytest.raises(InvalidRequest) as caught:
            one.compile(regex(flaw))
        reasons.add(caught.value.message)
    assert len(reasons) == len(gate.begun) == 1


async def test_compiling_for_a_request_that_has_gone_is_not_begun(gate: Gate) -> None:
    one = compiler()
    running = [asyncio.ensure_future(one.guide(regex(f"slow{number}"))) for number in range(NUM_THREADS)]
    await until(lambda: len(gate.begun) == NUM_THREADS)
    gone = [asyncio.ensure_future(one.guide(regex(f"gone{number}"))) for number in range(20)]
    stays = asyncio.ensure_future(one.guide(regex("stays")))
    await until(lambda: one.num_waiting == NUM_THREADS + len(gone) + 1)
    for wait in gone:
        wait.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    assert one.num_waiting == NUM_THREADS + 1
    gate.opens.set()
    await asyncio.gather(stays, *running)
    assert len(gate.begun) == NUM_THREADS + 1
    assert one.num_waiting == 0


async def test_the_grammars_that_wait_are_limited(gate: Gate) -> None:
    one = compiler()
    waits = [asyncio.ensure_future(one.guide(regex(f"slow{number}"))) for number in range(MAX_WAITING)]
    await until(lambda: one.num_waiting == MAX_WAITING)
    with pytest.raises(Overloaded, match=str(MAX_WAITING)):
        await one.guide(regex("another"))
    gate.opens.set()
    await asyncio.gather(*waits)
    assert draw(await one.guide(regex("another")), b"another")
