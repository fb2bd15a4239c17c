"""Tests that refusals of bodies speak of the client's fields alone, never of pydantic's names for types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, Field, ValidationError

from fabric.contracts import InvalidRequest
from router.api import ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest, parse_chat, parse_responses
from router.api.request_body import only_type, parse_body, refusal
from router.api.token_requests import DetokenizeRequest, TokenizeRequest

MESSAGES = [{"role": "user", "content": "hi"}]
KIND_TO_BODY: dict[type[BaseModel], dict[str, object]] = {
    ChatRequest: {"model": "m", "messages": MESSAGES},
    CompletionRequest: {"model": "m", "prompt": "a"},
    ResponsesRequest: {"model": "m", "input": "a"},
    EmbeddingRequest: {"model": "m", "input": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
}


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the models that stand in an annotation, and those in their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
    for part in get_args(annotation):
        yield from models_in(part)


def union_fields(kind: type[BaseModel]) -> list[str]:
    """Returns the fields of a model that have several types besides null."""
    fields = kind.model_fields.items()
    return [name for name, field in fields if get_origin(only_type(field.annotation)) in (Union, UnionType)]


def refusal_of(kind: type[BaseModel], fields: dict[str, object]) -> InvalidRequest | None:
    """Returns the error for a body with these fields besides those that it needs; None if the body is taken."""
    try:
        parse_body(kind, json.dumps(KIND_TO_BODY[kind] | fields).encode())
    except InvalidRequest as error:
        return error
    return None


FLAWS: list[object] = [5, 1.5, True, [], {}, "bogus", [5], [[]], [{}], [[1, "a"]], ["a", None], {"type": "function"}]
CASES = [(kind, name) for kind in KIND_TO_BODY for name in union_fields(kind)]


def test_the_fields_with_several_types_are_found() -> None:
    assert {(kind.__name__, name) for kind, name in CASES} >= {
        ("ChatRequest", "tool_choice"),
        ("ChatRequest", "guided_json"),
        ("CompletionRequest", "prompt"),
        ("ResponsesRequest", "input"),
        ("ResponsesRequest", "tool_choice"),
        ("EmbeddingRequest", "input"),
    }


def test_only_fields_of_bodies_have_several_types() -> None:
    """The test below sends flaws to these fields alone."""
    inner = {kind for outer in KIND_TO_BODY for kind in models_in(outer)} - {*KIND_TO_BODY}
    choices = {kind for kind in inner if kind.__name__ in ("NamedTool", "AllowedToolsChoice")}
    assert choices
    assert [(kind, names) for kind in inner - choices if (names := union_fields(kind))] == []


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_flaw_in_a_field_with_several_types_is_explained_under_its_own_name(kind: type[BaseModel], name: str) -> None:
    refused = [error for flaw in FLAWS if (error := refusal_of(kind, {name: flaw})) is not None]
    assert len(refused) > 3
    assert {error.param for error in refused} == {name}
    assert [error.message for error in refused if f"`{name}` " not in error.message] == []
    assert [error.message for error in refused if "none of the forms" in error.message] == []


class Part(BaseModel):
    size: int | Annotated[str, Field(pattern="^a+$")]


class Body(BaseModel):
    parts: list[Part] = []
    sizes: dict[str, int | Part] | None = None
    limits: dict[Annotated[str, Field(max_length=3)], int] | None = None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"parts": [{"size": 1}, {"size": "b"}]}, "parts.1.size"),
        ({"parts": [{"size": []}]}, "parts.0.size"),
        ({"sizes": {"a": 1, "str": "x"}}, "sizes.str"),
        ({"sizes": {"a": {"size": 1.5}}}, "sizes.a"),
        ({"limits": {"long": 1}}, "limits.long"),
    ],
)
def test_a_place_ends_at_a_field_with_several_types(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Body.model_validate(fields)
    refused = refusal(caught.value, Body)
    assert (refused.param, refused.message) == (param, f"`{param}` has none of the forms that it may have")


# ---------------------------------------------------------------- These tests cover the choice of tools.

CHAT_OBJECT = '{"type": "function", "function": {"name": "NAME"}}'
RESPONSE_OBJECT = '{"type": "function", "name": "NAME"}'


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("bogus", ['can\'t be "bogus"', "`none`, `auto` or `required`", CHAT_OBJECT, '"allowed_tools"']),
        (5, ["can't be 5", "`none`, `auto` or `required`", CHAT_OBJECT]),
        ([], ["can't be an empty array", CHAT_OBJECT]),
        ({"type": "mcp"}, ['can\'t be an object with the `type` "mcp"', CHAT_OBJECT]),
        ({"type": "function", "name": "f"}, [f"must be like `{CHAT_OBJECT}`", "`function` is required"]),
        ({"type": "function", "function": {}}, [CHAT_OBJECT, "`function.name` is required"]),
        ({"type": "function", "function": {"name": "a b"}}, ["`function.name` must match", '"a b"']),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, ["`allowed_tools.mode` is required"]),
    ],
)
def test_a_chat_is_told_the_forms_of_a_tool_choice(choice: object, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps({"model": "m", "messages": MESSAGES, "tool_choice": choice}).encode())
    assert caught.value.param == "tool_choice"
    assert [each for each in words if each not in caught.value.message] == []


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("bogus", ['can\'t be "bogus"', RESPONSE_OBJECT]),
        (5, ["can't be 5", RESPONSE_OBJECT]),
        ({"type": "function", "function": {"name": "f"}}, [RESPONSE_OBJECT, "`name` is required"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["f"]}, ["`tools.0` must be an object"]),
        ({"type": "allowed_tools", "mode": "none", "tools": []}, ["`mode` must be"]),
    ],
)
def test_a_response_is_told_its_own_forms_of_a_tool_choice(choice: object, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_responses(json.dumps({"model": "m", "input": "hi", "tool_choice": choice}).encode())
    assert caught.value.param == "tool_choice"
    assert [each for each in words if each not in caught.value.message] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": 5}, "`guided_json` must be a JSON schema, as an object or as its text, not 5"),
        ({"stop": 5}, "`stop` must be a string or a list of strings, not 5"),
        ({"stop": ["a", 5]}, "`stop.1` must be a valid string, not 5"),
    ],
)
def test_a_field_that_takes_a_text_or_more_says_so(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())
    assert caught.value.message == message
