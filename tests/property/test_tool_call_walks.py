"""Draws answers at random from the grammars of all formats of tool calls: what a grammar allows, the parser of its
format reads as calls whose arguments fit the schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from answer_walks import EMPTY, REFERRED, SPECIAL_TOKEN_IDS, TOOLS, WEATHER, calls_in, flaw_of, parse, walk
from jsonschema import validate

from modalities.answers import (
    AnswerPiece,
    ReasoningFormat,
    ReasoningPiece,
    TextPiece,
    ToolChoice,
    ToolFormat,
    after_reasoning,
    answer_parser,
    find_tool_format,
)

NAME_TO_TOOL = {tool.name: tool for tool in TOOLS}
FORMATS = {
    "hermes": find_tool_format("hermes", ""),
    "llama3": find_tool_format("llama3", ""),
    "mistral list": find_tool_format("mistral", ""),
    "mistral names": find_tool_format("mistral", "[ARGS]"),
    "pythonic": find_tool_format("pythonic", ""),
    "qwen3_coder": find_tool_format("qwen3_coder", ""),
}
NAME_TO_BEGINNING = {
    "hermes": ("Well: ", "<tool_call>"),
    "llama3": ('{"name"',),
    "mistral list": ("Well: ", "[TOOL_CALLS]"),
    "mistral names": ("Well: ", "[TOOL_CALLS]"),
    "pythonic": ("[get_weather(",),
    "qwen3_coder": ("Well: ", "<tool_call>"),
}
WALKS = range(25)


def special_ids(form: ToolFormat) -> Mapping[str, int]:
    return {text: index for text, index in SPECIAL_TOKEN_IDS.items() if text in form.special_tokens}


def names_that_fit(pieces: list[AnswerPiece]) -> list[str]:
    """Returns the names of the calls, whose arguments fit the schemas; raises for one that does not."""
    calls = calls_in(pieces)
    for name, arguments in calls:
        tool = NAME_TO_TOOL[name]
        validate(json.loads(arguments), dict(tool.parameters) or {"type": "object", "maxProperties": 0})
    return [name for name, _ in calls]


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_a_call_that_fits(name: str, is_special: bool) -> None:
    form = FORMATS[name]
    ids = special_ids(form) if is_special else {}
    nums, seen = set(), set()
    for are_parallel in (True, False):
        grammar = form.grammar(TOOLS, ToolChoice("required"), are_parallel, ids)
        assert flaw_of(grammar) == ""
        for seed in WALKS:
            text, has_ended = walk(grammar, seed)
            assert has_ended
            pieces = parse(form.parser(TOOLS), [text])
            assert [piece for piece in pieces if isinstance(piece, TextPiece)] == []
            names = names_that_fit(pieces)
            seen |= set(names)
            nums.add((are_parallel, min(2, len(names))))
    assert nums == {(True, 1), (True, 2), (False, 1)}, "one call, or several in parallel"
    assert seen == {WEATHER.name, REFERRED.name, EMPTY.name}


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool_is_the_only_one_that_is_called(name: str) -> None:
    form = FORMATS[name]
    grammar = form.grammar(TOOLS, ToolChoice("named", REFERRED.name), False, special_ids(form))
    for seed in WALKS:
        text, has_ended = walk(grammar, seed)
        assert has_ended
        assert names_that_fit(parse(form.parser(TOOLS), list(text))) == [REFERRED.name]


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_begins_in_free_text_is_completed(name: str, is_special: bool) -> None:
    form = FORMATS[name]
    ids = special_ids(form) if is_special else {}
    for are_parallel in (True, False):
        grammar = form.grammar(TOOLS, ToolChoice("auto"), are_parallel, ids)
        assert flaw_of(grammar) == ""
        for seed in WALKS:
            # A marker that is given letter by letter is text, even if a special token has the same text.
            *before, marker = NAME_TO_BEGINNING[name]
            text, has_ended = walk(grammar, seed, (*before, *([marker] if is_special else marker)))
            assert has_ended
            pieces = parse(form.parser(TOOLS), [text])
            assert len(names_that_fit(pieces)) >= 1
            assert are_parallel or len(calls_in(pieces)) == 1
            if NAME_TO_BEGINNING[name][0] == "Well: ":
                assert pieces[0] == TextPiece("Well: ")


@pytest.mark.parametrize("begins_inside", [True, False])
@pytest.mark.parametrize("reasoning", [ReasoningFormat(), ReasoningFormat("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_may_come_after_reasoning(name: str, reasoning: ReasoningFormat, begins_inside: bool) -> None:
    form = FORMATS[name]
    required = form.grammar(TOOLS, ToolChoice("required"), False, special_ids(form))
    ids = {text: index for text, index in SPECIAL_TOKEN_IDS.items() if text in reasoning.special_tokens}
    grammar = after_reasoning(required, reasoning, begins_inside, ids)
    assert flaw_of(grammar) == ""
    prefix = () if begins_inside else (reasoning.start,)
    for seed in WALKS:
        text, has_ended = walk(grammar, seed, (*prefix, "Use <tool_call> or {", reasoning.end))
        assert has_ended
        pieces = parse(answer_parser(reasoning, form, TOOLS, begins_inside), [text])
        assert pieces[0] == ReasoningPiece("Use <tool_call> or {")
        assert len(names_that_fit(pieces)) == 1
        assert [piece for piece in pieces if isinstance(piece, TextPiece)] == []
    if not begins_inside:
        text, _ = walk(grammar, 1, ("[TOOL_CALLS]",) if "mistral" in name else (walk(required, 1).text[:5],))
        assert names_that_fit(parse(answer_parser(reasoning, form, TOOLS, False), [text])), "it need not reason"
