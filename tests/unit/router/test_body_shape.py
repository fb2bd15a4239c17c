"""Tests that the values of a JSON body are counted without parsing it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.contracts import InvalidRequest
from router.api import parse_chat
from router.api import request_body as body_shape
from router.api.request_body import MAX_JSON_VALUES, check_shape, num_values

JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='"\\,:[{}]a', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\,:a', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def separators_of(value: object) -> int:
    """Returns the number of characters that a writer of JSON puts ahead of values: `{`, `[`, `,` and `:`."""
    if isinstance(value, dict):
        return max(1, 2 * len(value)) + sum(map(separators_of, value.values()))
    if isinstance(value, list):
        return max(1, len(value)) + sum(map(separators_of, value))
    return 0


@given(JSON, st.integers(1, 9))
def test_separators_outside_of_strings_are_counted(value: object, piece_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_shape, "PIECE_BYTES", piece_bytes)
        assert num_values(json.dumps(value).encode(), 10**9) == separators_of(value)


@pytest.mark.parametrize("values", [b"{},", b"1,", b'"a":1,', b"[],"])
def test_more_values_than_a_request_has_are_refused(values: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_JSON_VALUES} JSON values"):
        parse_chat(b'{"model":"m","messages":[' + values * MAX_JSON_VALUES + b"1]}")


def test_the_limit_is_exact() -> None:
    check_shape(b"[" + b"1," * (MAX_JSON_VALUES - 1) + b"1]")
    with pytest.raises(InvalidRequest):
        check_shape(b"[" + b"1," * MAX_JSON_VALUES + b"1]")


def test_text_of_any_length_is_one_value() -> None:
    content = json.dumps({"a": [1, 2, {"b": '"'}]}) * 20_000
    chat = parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode())
    assert chat.messages[0].content == content


def test_a_list_fails_at_its_first_flaw() -> None:
    with pytest.raises(InvalidRequest, match="required") as caught:
        parse_chat(b'{"model":"m","messages":[' + b"{}," * 20_000 + b"{}]}")
    assert caught.value.param == "messages.0.role"
