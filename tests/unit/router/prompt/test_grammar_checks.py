"""Tests that a grammar which workers would refuse reaches none of them, and is compiled once."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher
from router_chats import chat

from deploy.testing import fake_cluster, tiny_codec
from fabric.contracts import InvalidRequest
from modalities.text import CompiledGrammar, CompileLimits, GrammarTokenizer
from router.prompt.grammar_checks import MAX_CHECKED, GrammarChecks
from router.router_config import GrammarLimits

CODEC = tiny_codec()
TIGHT = GrammarLimits(compiling=CompileLimits(max_lexer_steps=3_000))
COSTLY = "(x|y)?" * 100
"""The lexer of this regular expression takes some 20,000 steps, and 3,300 within a schema. They show only when it is
compiled with a tokenizer."""


def tool(pattern: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": COSTLY}}, "structured_outputs.regex"),
        ({"guided_regex": COSTLY}, "guided_regex"),
        ({"guided_json": {"type": "string", "pattern": f"^{COSTLY}$"}}, "guided_json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "string", "pattern": f"^{COSTLY}$"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"tools": [tool(f"^{COSTLY}$")], "tool_choice": "required"}, "tools"),
    ],
)
async def test_what_a_worker_would_refuse_reaches_none(fields: dict[str, object], param: str) -> None:
    async with fake_cluster(grammar=TIGHT) as cluster:
        with pytest.raises(InvalidRequest) as caught:
            await cluster.service.open(chat(**fields))
        assert not cluster.workers[0].requests
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message
    assert "limits." not in caught.value.message
    assert "lexer" not in caught.value.message


def test_a_grammar_is_compiled_once_whether_it_passes_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_grammar, compiled = GrammarTokenizer.compile, []

    def counted(tokenizer: GrammarTokenizer, grammar: str) -> CompiledGrammar:
        compiled.append(grammar)
        return compile_grammar(tokenizer, grammar)

    monkeypatch.setattr(GrammarTokenizer, "compile", counted)
    checks = GrammarChecks(CODEC, CODEC.vocab_size, TIGHT)
    good, bad = LLMatcher.grammar_from_regex("[ab]{3}"), LLMatcher.grammar_from_regex(COSTLY)
    for param in ("guided_regex", "structured_outputs.regex"):
        checks.check(good, param)
        with pytest.raises(InvalidRequest, match=f"`{param}` can't be used") as caught:
            checks.check(bad, param)
        assert caught.value.param == param
    checks.check("", "")
    assert compiled == [good, bad]


def test_no_more_checks_are_remembered_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarTokenizer, "compile", lambda tokenizer, grammar: None)
    checks = GrammarChecks(CODEC, CODEC.vocab_size, GrammarLimits())
    for number in range(MAX_CHECKED + 3):
        checks.check(LLMatcher.grammar_from_regex(f"x{number}"), "guided_regex")
    assert len(checks._digest_to_reason) == MAX_CHECKED
