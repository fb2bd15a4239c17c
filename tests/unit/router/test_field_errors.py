"""Tests the sentences that say what is wrong with a field of a request, and with a key of a config file."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fabric.contracts import InvalidRequest
from router.api import describe_flaw, parse_chat, shown


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields).encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "`temperature` must be less than or equal to 2, not 3"),
        ({"temperature": float("inf")}, "`temperature` must be a finite number, not Infinity"),
        ({"temperature": True}, "`temperature` must be a valid number, not true"),
        ({"n": "two\n"}, '`n` must be a valid integer, not "two\\n"'),
        ({"n": 1.5}, "`n` must be a valid integer, not 1.5"),
        ({"n": [1]}, "`n` must be a valid integer, not an array"),
        ({"stream": {}}, "`stream` must be a valid boolean, not an empty object"),
        ({"model": None}, "`model` must be a valid string, not null"),
        ({"messages": []}, "`messages` must have at least 1 item, not 0"),
        ({"messages": "hi"}, '`messages` must be a valid array, not "hi"'),
        ({"messages": [5]}, "`messages.0` must be an object, not 5"),
        ({"cache_salt": "x" * 300}, "`cache_salt` must have at most 256 characters, not 300"),
        ({"on_encode_failure": "no"}, "`on_encode_failure` must be 'error', 'reduce' or 'text_only', not \"no\""),
        ({"mm_processor_kwargs": {"size": 1}}, "`mm_processor_kwargs.size` is not supported by this server"),
    ],
)
def test_a_client_reads_what_a_field_must_be_and_what_it_is(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body(**fields))
    assert caught.value.message == message


def test_a_body_that_is_no_object_is_described() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(b"[1]")
    assert caught.value.message == "the body must be an object, not an array"


def test_a_number_of_thousands_of_digits_is_refused_in_a_short_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body().replace(b'"m"', b"1" * 4000))
    assert caught.value.message.startswith("`model` must be a valid string, not 111")
    assert len(caught.value.message) < 200


class Inner(BaseModel):
    size: int = 0


def _refuse(value: str) -> str:
    raise ValueError(f"{value!r} is not a colour")


class Settings(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    count: int = Field(1, ge=1)
    is_on: bool = True
    kind: Literal["a", "b"] = "a"
    inner: Inner = Inner()
    names: list[str] = Field([], max_length=1)
    colour: Annotated[str, AfterValidator(_refuse)] = "red"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"count": 0}, "the value must be greater than or equal to 1, not 0"),
        ({"count": "many"}, 'the value must be a valid integer, not "many"'),
        ({"count": 2.5}, "the value must be a valid integer, not 2.5"),
        ({"is_on": "perhaps"}, 'the value must be a valid boolean, not "perhaps"'),
        ({"kind": "c"}, "the value must be 'a' or 'b', not \"c\""),
        ({"inner": 3}, "the value must be a mapping, not 3"),
        ({"names": ["a", "b"]}, "the value must have at most 1 item, not 2"),
        ({"colour": "loud"}, "'loud' is not a colour"),
    ],
)
def test_a_lenient_model_reads_the_same(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(data)
    (flaw,) = caught.value.errors()
    assert describe_flaw(flaw, "the value") == sentence


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("", '""'),
        ("é", '"\\u00e9"'),
        ("\ud800", '"\\ud800"'),
        ({"a": 1}, "an object"),
        ([], "an empty array"),
        ("x" * 70, '"' + "x" * 63 + "..."),
        (int("7" * 70), "7" * 64 + "..."),
    ],
)
def test_a_value_is_shown_as_short_json(value: object, text: str) -> None:
    assert shown(value) == text
