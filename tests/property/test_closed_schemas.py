"""Shows that a closed schema keeps a model from inventing properties, and allows nothing that the open one does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from modalities.answers import closed_schema

NAMES = ["a", "b", "properties", "not"]
POINT = {"type": "object", "properties": {"x": {}}, "required": ["x"]}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    by_name = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", ["object", "null"]]),
            "properties": by_name,
            "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=1),
            "minProperties": st.integers(0, 2),
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "$defs": by_name,
            "enum": st.lists(json_values, min_size=1, max_size=2),
        },
    )


schemas = st.recursive(st.booleans() | st.just({}) | st.just({"type": "string"}), objects, max_leaves=8)


@settings(deadline=None, max_examples=300)
@given(schema=objects(schemas), values=st.lists(json_values, max_size=5))
def test_what_a_closed_schema_allows_the_open_one_allows(schema: dict[str, Any], values: list[Any]) -> None:
    closed = closed_schema(schema)
    Draft202012Validator.check_schema(closed)
    for value in values:
        if Draft202012Validator(closed).is_valid(value):
            assert Draft202012Validator(schema).is_valid(value)


@settings(deadline=None, max_examples=200)
@given(schema=objects(schemas))
def test_closing_twice_changes_nothing_and_the_schema_is_left_alone(schema: dict[str, Any]) -> None:
    before = repr(schema)
    closed = closed_schema(schema)
    assert closed_schema(closed) == closed
    assert repr(schema) == before


def test_objects_at_every_depth_are_closed() -> None:
    schema = {
        "type": "object",
        "properties": {"points": {"type": "array", "items": POINT}, "one": {"anyOf": [POINT, {"type": "null"}]}},
        "$defs": {"Point": POINT},
    }
    validator = Draft202012Validator(closed_schema(schema))
    for value in ({"points": [{"x": 1}], "one": None}, {"one": {"x": 2}}, {}):
        assert validator.is_valid(value)
    for value in ({"y": 1}, {"points": [{"x": 1, "y": 2}]}, {"one": {"x": 1, "y": 2}}):
        assert not validator.is_valid(value)
    assert closed_schema(schema)["$defs"]["Point"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        POINT | {"additionalProperties": True},
        POINT | {"additionalProperties": {"type": "string"}},
        POINT | {"patternProperties": {"^y": {}}},
        POINT | {"minProperties": 2},
        {"properties": {"x": {}}, "required": ["y"]},
        {"allOf": [POINT, {"properties": {"y": {}}}]},
        {"oneOf": [POINT, {"properties": {"y": {}}, "required": ["y"]}]},
        {"properties": {"x": {}}, "$ref": "#/$defs/more", "$defs": {"more": {"properties": {"y": {}}}}},
        {"properties": {"x": {}}, "anyOf": [{"required": ["y"]}, {"required": ["z"]}]},
        {"enum": [{"properties": {}}]},
    ],
)
def test_what_an_author_left_open_stays_open(schema: dict[str, Any]) -> None:
    assert closed_schema(schema) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"properties": {"properties": {"type": "string"}, "enum": POINT}}
    closed = closed_schema(schema)
    assert sorted(closed["properties"]) == ["enum", "properties"]
    assert closed["properties"]["enum"]["additionalProperties"] is False
