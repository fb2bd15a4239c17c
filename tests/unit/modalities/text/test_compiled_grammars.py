"""Tests how compiled grammars are counted, and what clients are told of those that are refused."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from deploy.testing import tiny_codec
from fabric.contracts import InvalidRequest
from modalities.text import CompiledGrammar, CompileLimits, GrammarTokenizer, plain_reason
from modalities.text.compiled_grammars import MASKS_PER_COUNT, MOST_MASKS_PER_COUNT, TOO_COMPLEX, TOO_LARGE

CODEC = tiny_codec()


def compiled(regex: str, limits: CompileLimits | None = None) -> CompiledGrammar:
    tokenizer = GrammarTokenizer(CODEC, CODEC.vocab_size, limits or CompileLimits())
    return tokenizer.compile(LLMatcher.grammar_from_regex(regex))


def test_the_steps_of_a_lexer_grow_with_the_square_of_its_optional_parts() -> None:
    steps = [compiled("(x|y)?" * number + "z").num_steps for number in (400, 800, 1600)]
    assert 3 < steps[1] / steps[0] < 5
    assert 3 < steps[2] / steps[1] < 5


def test_what_is_drawn_makes_the_lexer_of_a_grammar_larger_for_all_its_matchers() -> None:
    grammar = compiled("(.*[ab].{100})*z")
    steps, size = grammar.num_steps, grammar.num_bytes
    matcher = grammar.matcher()
    for byte in b"abcab" * 20:
        matcher.compute_bitmask()
        matcher.consume_token(byte)
    assert grammar.count_steps() > 10 * steps
    assert grammar.num_bytes > size
    assert not grammar.matcher().is_error(), "counting breaks a copy alone"


def test_a_grammar_with_many_symbols_counts_as_larger() -> None:
    names = [f"n{number}" for number in range(300)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    tokenizer = GrammarTokenizer(CODEC, CODEC.vocab_size, CompileLimits())
    large = tokenizer.compile(LLMatcher.grammar_from_json_schema(schema))
    assert large.num_bytes > 3 * compiled("[ab]{3}").num_bytes


def test_a_lexer_of_too_many_steps_is_refused() -> None:
    regex = "(x|y)?" * 200
    steps = compiled(regex).num_steps
    assert compiled(regex, CompileLimits(max_lexer_steps=steps)).num_steps == steps
    with pytest.raises(InvalidRequest) as caught:
        compiled(regex, CompileLimits(max_lexer_steps=steps - 1))
    assert (caught.value.message, caught.value.param) == (TOO_COMPLEX, None)


def test_masks_are_counted_less_often_while_the_lexer_does_not_grow() -> None:
    grammar = compiled("[ab]{3}")
    counted = [number for number in range(1, 800) if grammar.note_mask()]
    gaps = [after - before for before, after in zip([0, *counted], counted, strict=False)]
    assert gaps[0] == MASKS_PER_COUNT
    assert gaps[-1] == MOST_MASKS_PER_COUNT
    assert gaps == sorted(gaps)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ('Unimplemented keys: ["uniqueItems"]', 'Unimplemented keys: ["uniqueItems"]'),
        ("at 1(8): invalid\n    ^\nerror: unclosed group\n   1 | start", "unclosed group"),
        ("lexer precomputation failed; either increase limits.initial_lexer_fuel or disable", TOO_COMPLEX),
        ("lexer error: too many states: 5 >= 5\n<state>\nTokens: secret</state>", TOO_COMPLEX),
        ("panic: assertion failed: self.curr_elt", TOO_COMPLEX),
        ("initial lexer configuration (grammar) too big (limit for this grammar: 500)", TOO_LARGE),
        ("schema too large", TOO_LARGE),
        ("<state>secret</state><grammar>secret</grammar>", TOO_COMPLEX),
        ("", TOO_COMPLEX),
    ],
)
def test_a_reason_shows_nothing_of_the_library(words: str, reason: str) -> None:
    assert plain_reason(words) == reason
