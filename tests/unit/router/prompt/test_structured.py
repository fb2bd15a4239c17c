"""Tests what becomes a grammar, and what is refused by name before any worker receives it."""

from __future__ import annotations

import json

import pytest
from router_chats import chat

import router.prompt.generation_options
from fabric.contracts import InvalidRequest
from router.api import ChatRequest
from router.prompt.generation_options import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_SCHEMA_DEPTH,
    check_grammar,
    grammar_of,
)


def checked(asked: ChatRequest) -> str:
    """Returns the grammar that a request asks for, after its check."""
    grammar = grammar_of(asked)
    check_grammar(grammar.text, grammar.param)
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
        as_schema({"type": "object", "description": "x" * MAX_GRAMMAR_BYTES}),
        as_schema({"type": "object", "x" * MAX_GRAMMAR_BYTES: 1}),
        as_schema({"enum": ["xx" * (MAX_GRAMMAR_BYTES // 64)] * 64}),
        {"guided_choice": ["x" * MAX_GRAMMAR_BYTES, "y"]},
    ],
)
def test_what_is_too_large_is_not_written_out_first(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = chat(**fields)
    monkeypatch.setattr(router.prompt.generation_options, "json", None)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_GRAMMAR_BYTES} bytes"):
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
        ({"guided_json": nested(MAX_SCHEMA_DEPTH)}, "guided_json", "deep"),
        ({"guided_json": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, "guided_json", "bytes"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}}, "guided_json", "greater than"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": ""}, "guided_regex", "regular expression"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex", "bytes"),
        ({"guided_choice": []}, "guided_choice", "list of strings"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice", "at most"),
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


@pytest.mark.parametrize("depth", [1, MAX_SCHEMA_DEPTH - 2])
def test_schemas_within_the_limits_pass(depth: int) -> None:
    assert checked(chat(guided_json=nested(depth)))


@pytest.mark.parametrize("regex", ["a/b", "a\nb", "/ | start", '"', "é+", "#x", "^a$", "(?i)ab"])
def test_a_regex_can_not_leave_its_place_in_the_grammar(regex: str) -> None:
    assert checked(chat(guided_regex=regex))
