"""Tests the format in which calls are Python: what is a call, what stays text, and what its grammar takes."""

from __future__ import annotations

import pytest
from answer_walks import EMPTY, SPECIAL_TOKEN_IDS, TOOLS, WEATHER, calls_in, is_allowed, parse

from fabric.contracts import InvalidRequest
from modalities.answers import TextPiece, ToolChoice, ToolSpec, find_tool_format

FORM = find_tool_format("pythonic", "")
REQUIRED = ToolChoice("required")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[get_weather(city="Köln", unit="c")]', [("get_weather", '{"city": "Köln", "unit": "c"}')]),
        ("  [stop()]\n", [("stop", "{}")]),
        ("[stop( ), stop(),]", [("stop", "{}"), ("stop", "{}")]),
        ("[get_weather(city='a', days=None,)]", [("get_weather", '{"city": "a", "days": null}')]),
        ("<|python_start|>[stop()]<|python_end|>", [("stop", "{}")]),
        ("[get_weather(city='it\\'s \"so\"\\n')]", [("get_weather", '{"city": "it\'s \\"so\\"\\n"}')]),
        ("[get_weather(city='\\ud83d\\ude00\\x41')]", [("get_weather", '{"city": "\\ud83d\\ude00A"}')]),
        ("[get_weather(days=True, city=[{'a': 0}])]", [("get_weather", '{"days": true, "city": [{"a": 0}]}')]),
    ],
)
def test_calls_are_read(text: str, calls: list[tuple[str, str]]) -> None:
    for parts in ([text], list(text)):
        pieces = parse(FORM.parser(TOOLS), parts)
        assert calls_in(pieces) == calls
        assert not [piece for piece in pieces if isinstance(piece, TextPiece)]


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "[1] is a source",
        "[]",
        "[other()]",
        "See [stop()]",
        '[get_weather("Rome")]',
        "[get_weather(1=2)]",
        "[__import__('os')]",
        "[stop",
        "[stop(",
        "<|python_start|>print(1)",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse(FORM.parser(TOOLS), list(text)) == [TextPiece(text)]


@pytest.mark.parametrize("value", ["open('x')", "1 + 1", "f'{x}'", "b'x'", "(1, 2)", "{1: 2}", "x", "lambda: 0", "1."])
def test_nothing_but_literals_is_a_value(value: str) -> None:
    pieces = parse(FORM.parser(TOOLS), [f"[get_weather(city={value})]"])
    ((name, arguments),) = calls_in(pieces)
    assert name == "get_weather"
    assert not arguments.endswith("}"), "the arguments are broken, and do not look whole"


def test_the_grammar_takes_pythons_words_and_arguments_in_order() -> None:
    flag = ToolSpec("flag", "", {"properties": {"on": {"type": "boolean"}, "n": {"type": "integer"}}})
    grammar = FORM.grammar([flag], REQUIRED, False, {})
    for text in ("[flag(on=True)]", "[flag(on=False, n=3)]", "[flag()]", "[flag(n=3)]"):
        assert is_allowed(grammar, [text]), text
    for text in (
        "[flag(on=true)]",
        "[flag(n=3, on=True)]",
        "[flag(x=1)]",
        "[flag(n=3.5)]",
        "[flag(), flag()]",
        "flag()",
    ):
        assert not is_allowed(grammar, [text]), text
    assert is_allowed(FORM.grammar([flag], REQUIRED, True, {}), ["[flag(), flag()]"])


def test_free_text_may_begin_like_a_list() -> None:
    grammar = FORM.grammar(TOOLS, ToolChoice("auto"), True, SPECIAL_TOKEN_IDS)
    assert is_allowed(grammar, ["[1] Rome is [stop()]"])
    assert is_allowed(grammar, ['[get_weather(city="a", unit="c")]'])
    assert is_allowed(grammar, ["Well: ", "<|python_start|>", "[stop()]", "<|python_end|>"])
    assert not is_allowed(grammar, ["[get_weather(city=1)]"])
    assert not is_allowed(grammar, ['[get_weather(city="a")]'])


def test_names_that_python_does_not_have_are_refused() -> None:
    for parameters in ({"properties": {"a-b": {}}}, {"properties": {}, "required": ["1"]}):
        with pytest.raises(InvalidRequest, match="takes only names of Python"):
            FORM.grammar([ToolSpec("f", "", parameters)], REQUIRED, False, {})
    with pytest.raises(InvalidRequest, match="`oneOf`"):
        FORM.grammar([ToolSpec("f", "", {"oneOf": []})], REQUIRED, False, {})


def test_the_format_is_found_by_the_words_of_its_templates() -> None:
    template = "in the format of [func_name1(params_name1=params_value1...), func_name2(params)] {{ tools }}"
    assert find_tool_format("auto", template) == FORM
    assert "get_weather" in FORM.instructions((WEATHER, EMPTY))
