"""Checks that a guide follows from the ids alone: whether it is stepped, forked or rebuilt from the emitted ids, it
allows the same tokens."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from deploy.testing import tiny_codec
from deploy.testing.tiny_family import EOS, SPECIALS
from fabric.contracts import InvalidRequest
from llm_workers.sampling import GrammarCompiler
from llm_workers.sampling.grammar import MAX_CACHED, GrammarGuide

WIDTH = 300
"""The vocabulary is wider than the tokenizer's 260 ids, as it is in padded checkpoints."""
COMPILER = GrammarCompiler(tiny_codec(), WIDTH)
REGEX = "(ab|ac){1,3}(é|x)"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["é", "no"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
GRAMMARS = [LLMatcher.grammar_from_regex(REGEX), LLMatcher.grammar_from_json_schema(SCHEMA)]


def allowed(guide: GrammarGuide) -> list[int]:
    words = np.full(-(-WIDTH // 32), -1, dtype=np.int32)
    assert guide.write_mask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[WIDTH:].any()
    return np.flatnonzero(bits).tolist()


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(GRAMMARS), st.data())
def test_a_rebuilt_guide_stands_where_the_stepped_one_does(grammar: str, data: st.DataObject) -> None:
    guide, ids = COMPILER.compile(grammar), []
    for _ in range(80):
        tokens = allowed(guide)
        assert max(tokens) <= EOS, "no padding, no special token but the end"
        if data.draw(st.integers(0, 3)) == 0:
            rebuilt = COMPILER.compile(grammar)
            rebuilt.advance(ids)
            assert allowed(rebuilt) == tokens
            fork = guide.fork()
            fork.advance((tokens[0],))
            assert allowed(guide) == tokens, "a fork goes its own way"
        ids.append(data.draw(st.sampled_from(tokens)))
        guide.advance(ids[-1:])
        if ids[-1] == EOS:
            break
    if ids[-1] == EOS:
        text = bytes(ids[:-1]).decode()
        if grammar == GRAMMARS[0]:
            assert re.fullmatch(REGEX, text)
        else:
            value = json.loads(text)
            assert 0 <= value["n"] <= 99
            assert value["s"] in ("é", "no")


def test_behind_the_end_only_the_end_may_come() -> None:
    guide = COMPILER.compile(GRAMMARS[0])
    guide.advance(b"abx")
    for _ in range(4):
        assert allowed(guide) == [EOS]
        guide.advance([EOS])


def test_a_token_that_is_not_allowed_breaks_the_guide_for_good() -> None:
    guide = COMPILER.compile(GRAMMARS[0])
    guide.advance(b"zz")
    words = np.zeros(-(-WIDTH // 32), dtype=np.int32)
    assert not guide.write_mask(words)
    guide.advance(b"ab")
    assert not guide.write_mask(words)
    assert not guide.fork().write_mask(words)
    assert allowed(COMPILER.compile(GRAMMARS[0])) == [ord("a")], "what is cached stays at its beginning"


def test_a_grammar_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="can't be used"):
        COMPILER.compile(LLMatcher.grammar_from_regex("(a"))


def test_the_cache_is_bounded() -> None:
    compiler = GrammarCompiler(tiny_codec(), WIDTH)
    for index in range(MAX_CACHED + 3):
        assert allowed(compiler.compile(LLMatcher.grammar_from_regex(f"x{index}"))) == [ord("x")]
    assert len(compiler._compiled) == MAX_CACHED


def test_the_codec_has_the_specials_that_this_file_counts_on() -> None:
    assert tiny_codec().vocab_size == 256 + len(SPECIALS)
