"""Tests what becomes a grammar, and what is refused by name before any worker receives it."""

from __future__ import annotations

import json
import threading

import pytest
from router_chats import chat

import router.prompt.generation_options
import router.prompt.prompt_builder
from deploy.testing import fake_cluster
from fabric.contracts import InvalidRequest
from modalities.text import CompileLimits
from router.api import ChatRequest
from router.prompt.generation_options import FREE, Grammar, check_grammar, grammar_of
from router.router_config import GrammarLimits

LIMITS = GrammarLimits()


def checked(asked: ChatRequest, limits: GrammarLimits = LIMITS) -> str:
    """Returns the grammar that a request asks for, after its check."""
    grammar = grammar_of(asked, limits)
    check_grammar(grammar.text, grammar.param, limits)
    return grammar.text


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def as_schema(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_json": None},
    ],
)
def test_asking_for_nothing_gives_no_grammar(fields: dict[str, object]) -> None:
    assert checked(chat(**fields)) == ""


@pytest.mark.parametrize(
    "fields",
    [
        as_schema({"type": "object", "description": "x" * LIMITS.max_bytes}),
        as_schema({"type": "object", "x" * LIMITS.max_bytes: 1}),
        as_schema({"enum": ["xx" * (LIMITS.max_bytes // 64)] * 64}),
        {"guided_choice": ["x" * LIMITS.max_bytes, "y"]},
    ],
)
def test_what_is_too_large_is_not_written_out_first(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = chat(**fields)
    monkeypatch.setattr(router.prompt.generation_options, "json", None)
    with pytest.raises(InvalidRequest, match=f"more than {LIMITS.max_bytes} bytes"):
        checked(asked)


def test_one_meaning_has_one_grammar_however_it_is_asked_for() -> None:
    ways = [
        as_schema(SCHEMA),
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"guided_json": SCHEMA},
        {"guided_json": SCHEMA | {"x-guidance": {"lenient": True}}},
    ]
    (grammar,) = {checked(chat(**way)) for way in ways}
    assert "properties" in grammar
    objects = {
        checked(chat(response_format={"type": "json_object"})),
        checked(chat(guided_json='{"type":"object"}')),
    }
    assert len(objects | {checked(chat(structured_outputs={"json_object": True}))}) == 1
    assert checked(chat(guided_choice=["a", "b"])) == checked(chat(structured_outputs={"choice": ["a", "b"]}))


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
        (as_schema(["no"]), "response_format.json_schema.schema", "object"),
        (as_schema({"type": "array", "uniqueItems": True}), "response_format.json_schema.schema", "uniqueItems"),
        (as_schema({"type": "string", "pattern": "(?=a)"}), "response_format.json_schema.schema", "look-around"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[" * 5000}, "guided_json", "not valid JSON"),
        ({"guided_json": nested(LIMITS.max_depth)}, "guided_json", "deep"),
        ({"guided_json": {"enum": ["x" * LIMITS.max_bytes]}}, "guided_json", "bytes"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}}, "guided_json", "greater than"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": ""}, "guided_regex", "regular expression"),
        ({"guided_regex": "a" * (LIMITS.max_bytes + 1)}, "guided_regex", "bytes"),
        ({"guided_choice": []}, "guided_choice", "list of strings"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
        ({"guided_choice": ["a"] * (LIMITS.max_choices + 1)}, "guided_choice", "at most"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "list of strings"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "regular expression"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "only one"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "only one"),
        (as_schema(SCHEMA) | {"guided_json": SCHEMA}, "guided_json", "only one"),
    ],
)
def test_what_can_not_be_honoured_is_named(fields: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        checked(chat(**fields))
    assert caught.value.param == param
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("depth", [1, LIMITS.max_depth - 2])
def test_schemas_within_the_limits_pass(depth: int) -> None:
    assert checked(chat(guided_json=nested(depth)))


@pytest.mark.parametrize("regex", ["a/b", "a\nb", "/ | start", '"', "é+", "#x", "^a$", "(?i)ab"])
def test_a_regex_can_not_leave_its_place_in_the_grammar(regex: str) -> None:
    assert checked(chat(guided_regex=regex))


# ------------------------------------------------------------ grammars that explode


def explosive(num_parts: int, num_kinds: int) -> dict[str, object]:
    """Returns a small schema whose grammar has `num_kinds ** num_parts` combinations: each part is a union, and all
    must hold at once."""
    parts = [
        [{"type": "object", "properties": {f"p{part}_{kind}": {"type": "string"}}} for kind in range(num_kinds)]
        for part in range(num_parts)
    ]
    return {"allOf": [{"anyOf": kinds} for kinds in parts]}


@pytest.mark.parametrize(("num_parts", "num_kinds"), [(6, 4), (10, 2), (10, 3)])
def test_a_small_schema_with_a_huge_grammar_is_refused(num_parts: int, num_kinds: int) -> None:
    """The library's own limits let these pass, after about a second of one core."""
    with pytest.raises(InvalidRequest, match=r"too (big|large)") as caught:
        checked(chat(guided_json=explosive(num_parts, num_kinds)))
    assert caught.value.param == "guided_json"


def test_each_limit_of_a_grammar_is_that_of_the_config() -> None:
    asked = chat(guided_json=explosive(3, 3))
    assert checked(asked)
    for limits, flaw in (
        (GrammarLimits(compiling=CompileLimits(max_symbols=500)), "too large"),
        (GrammarLimits(compiling=CompileLimits(max_lexer_fuel=500)), "too large"),
        (GrammarLimits(max_depth=3), "nested more than 3 levels"),
        (GrammarLimits(max_bytes=100), "at most 100 bytes|more than 100 bytes"),
    ):
        with pytest.raises(InvalidRequest, match=flaw):
            checked(asked, limits)
    with pytest.raises(InvalidRequest, match="at most 1 choices, not 2"):
        checked(chat(guided_choice=["a", "b"]), GrammarLimits(max_choices=1))


# ------------------------------------------------------------ regular expressions

LONG = LIMITS.max_pattern_bytes + 1


def text_like(pattern: str) -> dict[str, object]:
    return {"type": "string", "pattern": pattern}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": r"\w?" * 700}, "guided_regex"),
        ({"structured_outputs": {"regex": "é" * (LONG // 2 + 1)}}, "structured_outputs.regex"),
        (as_schema(text_like("a" * LONG)), "response_format.json_schema.schema"),
        ({"guided_json": json.dumps({"$defs": {"a": {"items": [text_like("a" * LONG)]}}})}, "guided_json"),
        ({"guided_json": {"patternProperties": {"a" * LONG: {"type": "null"}}}}, "guided_json"),
    ],
)
def test_long_regular_expressions_are_refused_before_they_are_compiled(fields: dict[str, object], param: str) -> None:
    """The library takes two minutes and gigabytes for 64 kB of optional letters."""
    with pytest.raises(InvalidRequest, match=f"may have at most {LIMITS.max_pattern_bytes} bytes") as caught:
        grammar_of(chat(**fields), LIMITS)
    assert caught.value.param == param


def test_regular_expressions_are_limited_together_too() -> None:
    patterns = [text_like("a" * LIMITS.max_pattern_bytes)] * 4
    assert grammar_of(chat(guided_json={"anyOf": patterns}))
    with pytest.raises(InvalidRequest, match="together may have at most 4096 bytes, not 4097"):
        grammar_of(chat(guided_json={"anyOf": [*patterns, text_like("a")]}))


async def test_the_regular_expressions_of_all_tools_are_limited_together() -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{number}", "parameters": {"properties": {"a": text_like("a" * 1000)}}},
        }
        for number in range(5)
    ]
    async with fake_cluster() as cluster:
        with pytest.raises(InvalidRequest, match="all regular expressions of `tools` together") as caught:
            await cluster.service.open(chat(tools=tools))
    assert caught.value.param == "tools"


def test_a_property_may_be_called_like_a_keyword() -> None:
    assert checked(chat(guided_json={"type": "object", "properties": {"pattern": {"const": "a" * LONG}}}))


def test_large_schemas_of_ordinary_form_pass() -> None:
    names = [f"field_{number}" for number in range(500)]
    properties = {name: {"type": "string", "maxLength": 100} for name in names}
    assert checked(chat(guided_json={"type": "object", "properties": properties, "required": names}))
    assert checked(chat(guided_json={"enum": [f"value {number}" for number in range(3000)]}))


async def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def slow(*_: object) -> Grammar:
        assert goes_on.wait(60)
        return FREE

    monkeypatch.setattr(router.prompt.prompt_builder, "grammar_of", slow)
    async with fake_cluster(grammar=GrammarLimits(compile_timeout_s=0.01)) as cluster:
        try:
            with pytest.raises(InvalidRequest, match=r"`guided_regex` takes more than 0\.01 s to compile") as caught:
                await cluster.service.open(chat(guided_regex="a+"))
        finally:
            goes_on.set()
        assert caught.value.param == "guided_regex"
        assert not cluster.workers[0].requests


async def test_content_parts_are_counted_over_all_messages() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2} for _ in range(2)]
    async with fake_cluster(max_content_parts=3) as cluster:
        with pytest.raises(InvalidRequest, match="at most 3 content parts, not 4"):
            await cluster.service.open(chat(messages=messages))
        assert not cluster.workers[0].requests
