"""Checks that a worker refuses exactly the grammars that a router refuses, also where it counts the lexer's steps."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from deploy.testing import tiny_codec
from fabric.contracts import InvalidRequest
from llm_workers.sampling import GrammarCompiler
from modalities.text import CompileLimits
from router.prompt.grammar_checks import GrammarChecks
from router.router_config import GrammarLimits

CODEC = tiny_codec()
PATTERNS = st.sampled_from(["[a-z]{1,9}", "(a|b|c){1,200}x?", "\\d{4}-\\d{2}", ".*", "(foo|ba[rz])+"])
SCHEMAS = st.recursive(
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, PATTERNS)
    | st.sampled_from([{"type": "integer", "minimum": 3, "maximum": 4711}, {"enum": ["a", "b"]}, {"type": "number"}]),
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 7}, inner)
        | st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4).map(
            lambda properties: {"type": "object", "properties": properties, "additionalProperties": False}
        )
    ),
    max_leaves=6,
)


def is_taken_by_router(grammar: str, limits: CompileLimits) -> bool:
    try:
        GrammarChecks(CODEC, CODEC.vocab_size, GrammarLimits(compiling=limits)).check(grammar, "schema")
    except InvalidRequest:
        return False
    return True


def is_taken_by_worker(grammar: str, limits: CompileLimits) -> bool:
    try:
        GrammarCompiler(CODEC, CODEC.vocab_size, limits).compile(grammar)
    except InvalidRequest:
        return False
    return True


@settings(deadline=None, max_examples=40)
@given(schema=SCHEMAS)
def test_both_count_alike(schema: dict[str, object]) -> None:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    for name in ("max_symbols", "max_lexer_fuel", "max_lexer_steps"):
        least, most = 0, 2**22 if name == "max_lexer_steps" else 2**17
        while least + 1 < most:  # This finds the smallest limit with which the router takes the grammar.
            middle = (least + most) // 2
            is_taken = is_taken_by_router(grammar, CompileLimits(**{name: middle}))
            least, most = (least, middle) if is_taken else (middle, most)
        assert is_taken_by_worker(grammar, CompileLimits(**{name: most})), name
        assert not is_taken_by_worker(grammar, CompileLimits(**{name: least})) or not least, name
