"""The grammars of tool calls allow what the families write, and refuse calls that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from answer_walks import (
    EMPTY,
    REFERRED,
    SPECIAL_TOKEN_IDS,
    TOOLS,
    WEATHER,
    WIDTH,
    flaw_of,
    is_allowed,
    tokens_allowed,
    walk_codec,
)
from llguidance import LLMatcher

from fabric.contracts import InvalidRequest
from llm_workers.sampling import GrammarCompiler
from modalities.answers import ReasoningFormat, ToolChoice, ToolSpec, after_reasoning, find_tool_format

REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")
GOOD = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "unit": "c"}}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rome", "unit": "c"}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "unit": "c"}}]',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=unit>\nc\n"
    "</parameter>\n</function>\n</tool_call>",
}
BETWEEN = {"hermes": "\n", "llama3": "; ", "qwen3_coder": "\n"}


def grammar(name: str, choice: ToolChoice, are_parallel: bool = True, is_special: bool = False) -> str:
    ids = SPECIAL_TOKEN_IDS if is_special else {}
    written = find_tool_format(name, "").grammar(TOOLS, choice, are_parallel, ids)
    assert flaw_of(written) == ""
    return written


@pytest.mark.parametrize("choice", [REQUIRED, AUTO, ToolChoice("named", "get_weather")])
@pytest.mark.parametrize("name", GOOD)
def test_what_the_families_write_is_allowed(name: str, choice: ToolChoice) -> None:
    assert is_allowed(grammar(name, choice), [GOOD[name]])


@pytest.mark.parametrize("choice", [REQUIRED, AUTO])
@pytest.mark.parametrize(("good", "bad"), [("Rome", "Reykjavik"), ("unit", "unot"), ("get_weather", "get_news")])
@pytest.mark.parametrize("name", GOOD)
def test_a_call_that_does_not_fit_is_refused(name: str, good: str, bad: str, choice: ToolChoice) -> None:
    assert not is_allowed(grammar(name, choice), [GOOD[name].replace(good, bad)])


@pytest.mark.parametrize("name", GOOD)
def test_free_text_is_allowed_under_auto_only(name: str) -> None:
    for text in ["", "It rains.", "<tool", '{"weather": 1}', " "]:
        assert is_allowed(grammar(name, AUTO), [text])
        assert not is_allowed(grammar(name, REQUIRED), [text])
        assert not is_allowed(grammar(name, ToolChoice("named", "get_weather")), [text])


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("choice", [REQUIRED, AUTO])
def test_several_calls_only_where_they_are_parallel(name: str, choice: ToolChoice) -> None:
    twice = [GOOD[name] + BETWEEN[name] + GOOD[name]]
    assert is_allowed(grammar(name, choice, True), twice)
    assert not is_allowed(grammar(name, choice, False), twice)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize(("blank", "is_right"), [("\n", True), ("\n    ", True), ("  ", False), ("\n\n", False)])
def test_json_of_a_call_may_be_indented_and_no_more(name: str, blank: str, is_right: bool) -> None:
    for bracket in ("{", ": ", ", "):
        text = GOOD[name].replace(bracket, bracket.strip() + blank)
        assert is_allowed(grammar(name, REQUIRED), [text]) is is_right


def test_a_mark_that_the_template_writes_is_one_token() -> None:
    """A client's text never becomes such a token, but a model writes it so, also where a grammar forces it."""
    codec = walk_codec(["<tool_call>", "</tool_call>"], "<tool_call>")
    mark = codec.token_id("<tool_call>")
    assert codec.encode("<tool_call>a") == list(b"<tool_call>a")
    assert codec.encode_output("<tool_call>[ARGS]") == [mark, *b"[ARGS]"]
    guide = GrammarCompiler(codec, WIDTH).compile(grammar("hermes", REQUIRED))
    assert tokens_allowed(guide) == [mark]


def test_special_tokens_are_tokens_and_not_their_text() -> None:
    listed = ["[TOOL_CALLS]", '[{"name": "stop", "arguments": {}}]']
    assert is_allowed(grammar("mistral", REQUIRED, is_special=True), listed)
    assert not is_allowed(grammar("mistral", REQUIRED, is_special=True), list("".join(listed)))
    assert is_allowed(grammar("mistral", AUTO, is_special=True), ["Well.", *listed])
    form = find_tool_format("mistral", "[ARGS]")
    named = form.grammar(TOOLS, REQUIRED, True, SPECIAL_TOKEN_IDS)
    assert is_allowed(named, ["[TOOL_CALLS]", "stop", "[ARGS]", "{}", "[TOOL_CALLS]", "stop", "[ARGS]", "{}"])
    assert is_allowed(named, ["[TOOL_CALLS]", "stop", "[CALL_ID]", "ab3dE6gh9", "[ARGS]", "{}"])
    assert is_allowed(form.grammar(TOOLS, REQUIRED, True, {}), ["[TOOL_CALLS]stop[ARGS]{}"])
    tagged = ["<|python_tag|>", '{"name": "stop", "parameters": {}}']
    assert is_allowed(grammar("llama3", REQUIRED, is_special=True), tagged)
    assert is_allowed(grammar("llama3", AUTO, is_special=True), ["I stop.", *tagged])


def test_references_and_constraints_of_strings_hold_in_tags() -> None:
    form = find_tool_format("qwen3_coder", "")
    rules = form.grammar(TOOLS, ToolChoice("named", REFERRED.name), False, {})

    def written(when: str, code: str, note: str) -> list[str]:
        parameters = (("when", when), ("code", code), ("note", note))
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
        return [f"<tool_call>\n<function=get_when>\n{inner}</function>\n</tool_call>"]

    assert is_allowed(rules, written('{"hour": 3}', "abc", "null"))
    assert is_allowed(rules, written('{"hour": 3}', "ab", "\nno\n"))
    assert not is_allowed(rules, written('{"hour": 24}', "abc", "null"))
    assert not is_allowed(rules, written('{"hour": 3}', "abd", "null"))
    assert not is_allowed(rules, written('{"hour": 3}', "abc", "longer"))


@pytest.mark.parametrize(
    ("parameters", "text", "is_good"),
    [
        ({"s": {"type": "string", "pattern": "a/b"}}, "xa/by", True),
        ({"s": {"type": "string", "pattern": "a/b"}}, "ab", False),
        ({"s": {"type": "string", "pattern": "x|y"}}, "ay", True),
        ({"s": {"enum": ["a\nb", "c"]}}, "a\nb", True),
        ({"s": {"enum": ["a\nb", "c"]}}, "b", False),
        ({"s": {"const": "a"}}, "a", True),
        ({"s": {"type": ["string", "null"], "minLength": 5}}, "null", True),
        ({"s": {"type": ["string", "null"], "minLength": 5}}, "nul", False),
        ({"s": {"anyOf": [{"enum": ["a"]}, {"type": "null"}]}}, "null", True),
        ({"s": {"type": ["string", "integer"]}}, '"a"', True),
        ({"s": {"type": ["string", "integer"]}}, "a", False),
        ({"s": True}, "[null]", True),
        ({"s": {"type": "string", "pattern": "a\\\\/b$"}}, "xa\\/b", True),
        ({"s": {"type": "string", "pattern": "a\\\\/b$"}}, "xa/b", False),
        ({"s": {"type": "string", "minLength": "0}/ | /.{0"}}, "a", True),
        ({"s": {"type": "string", "pattern": "a\\/b"}}, "a/b", True),
    ],
)
def test_a_value_in_tags_fits_its_schema(parameters: dict[str, Any], text: str, is_good: bool) -> None:
    tool = ToolSpec("f", "", {"type": "object", "properties": parameters, "required": ["s"]})
    rules = find_tool_format("qwen3_coder", "").grammar([tool], REQUIRED, False, {})
    assert flaw_of(rules) == ""
    call = f"<tool_call><function=f>\n<parameter=s>\n{text}\n</parameter>\n</function></tool_call>"
    assert is_allowed(rules, [call]) == is_good


def test_required_parameters_that_are_not_described_are_asked_for() -> None:
    tool = ToolSpec("f", "", {"required": ["s"]})
    rules = find_tool_format("qwen3_coder", "").grammar([tool], REQUIRED, False, {})
    assert not is_allowed(rules, ["<tool_call><function=f>\n</function></tool_call>"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "the parameters of the tool `f` have `anyOf` at the top"),
        ({"properties": {"a>": {}}}, 'has the name "a>"'),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, r"has both `\|` and an anchor"),
    ],
)
def test_parameters_that_tags_can_not_ensure_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        find_tool_format("qwen3_coder", "").grammar([ToolSpec("f", "", parameters)], REQUIRED, True, {})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", GOOD)
def test_without_a_choice_there_is_no_grammar(name: str) -> None:
    form = find_tool_format(name, "")
    assert form.grammar(TOOLS, ToolChoice("none"), True, {}) == ""
    assert form.grammar([], AUTO, True, {}) == ""
    with pytest.raises(InvalidRequest, match=r"`tool_choice` must name one of the tools .*, not `get_news`") as caught:
        form.grammar(TOOLS, ToolChoice("named", "get_news"), True, {})
    assert caught.value.param == "tool_choice"


def test_a_client_can_not_set_options_of_the_library() -> None:
    tool = ToolSpec("f", "", {**WEATHER.parameters, "x-guidance": {"whitespace_pattern": "[#]*"}})
    rules = find_tool_format("llama3", "").grammar([tool], REQUIRED, False, {})
    call = '{"name": "f", "parameters": { "city": "Rome", "unit": "c"}}'
    assert is_allowed(rules, [call])
    assert not is_allowed(rules, [call.replace("{ ", "{#")])


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    rules = find_tool_format("llama3", "").grammar([EMPTY], REQUIRED, False, {})
    assert is_allowed(rules, ['{"name": "stop", "parameters": {}}'])
    assert not is_allowed(rules, ['{"name": "stop", "parameters": {"a": 1}}'])


@pytest.mark.parametrize("inner", [LLMatcher.grammar_from_json_schema({"type": "object"}), 'start: "{}" | "ab"'])
def test_any_grammar_may_follow_reasoning(inner: str) -> None:
    reasoning = ReasoningFormat()
    outside = after_reasoning(inner, reasoning, False, {})
    for text in ["{}", "<think>\nHm {</think>\n\n{}", "<think></think>{}"]:
        assert is_allowed(outside, [text])
    assert not is_allowed(outside, ["Hm</think>{}"])
    inside = after_reasoning(inner, reasoning, True, {})
    assert is_allowed(inside, ["Hm {</think>\n\n{}"])
    assert not is_allowed(inside, ["{}"])
    tokens = after_reasoning(inner, ReasoningFormat("[THINK]", "[/THINK]"), False, SPECIAL_TOKEN_IDS)
    assert is_allowed(tokens, ["[THINK]", "Hm [/THINK {", "[/THINK]", "{}"])
    assert is_allowed(tokens, ["{}"])
    assert after_reasoning("", reasoning, True, {}) == ""
