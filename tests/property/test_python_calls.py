"""Checks that calls in Python are read as Python reads them, however the text is cut, and that no text is lost."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

from answer_walks import calls_in, parse
from hypothesis import given
from hypothesis import strategies as st

from modalities.answers import TextPiece, ToolSpec, find_tool_format

FORM = find_tool_format("pythonic", "")
SPECS = (ToolSpec("f", "", {}), ToolSpec("get.it-now", "", {}))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get.it-now"]), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3
)


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@given(calls=CALLS, data=st.data(), is_marked=st.booleans())
def test_calls_are_read_as_python_reads_them(
    calls: list[tuple[str, dict[str, Any]]], data: st.DataObject, is_marked: bool
) -> None:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    ]
    text = f"[{', '.join(written)}]"
    if is_marked:
        text = f"<|python_start|>{text}<|python_end|>"
    pieces = parse(FORM.parser(SPECS), cut(data, text))
    assert not [piece for piece in pieces if isinstance(piece, TextPiece)]
    assert [(name, json.loads(arguments)) for name, arguments in calls_in(pieces)] == calls


@given(text=st.text(alphabet=st.sampled_from("\\\\nxuU0123abf'\"/\nä"), max_size=12), quote=st.sampled_from("'\""))
def test_strings_have_pythons_escapes(text: str, quote: str) -> None:
    """Octal escapes and the escape of `/` are the exceptions: JSON has the latter, and no model was seen to write the
    former."""
    if quote in text.replace("\\\\", "").replace("\\" + quote, ""):
        return
    source = quote + text + quote
    try:
        wanted = ast.literal_eval(source.replace("\n", "\\n"))
    except (SyntaxError, ValueError):
        return
    (pair,) = calls_in(parse(FORM.parser(SPECS), [f"[f(a={source})]"])) or [("", "")]
    is_known = "\\/" not in text and not any(f"\\{digit}" in text for digit in "0123") and "\\N" not in text
    if is_known and "\\\n" not in text and "\\a" not in text:
        assert json.loads(pair[1]) == {"a": wanted}


@given(
    text=st.text(alphabet=st.sampled_from("[f(a=1), 'x']{\"b\": True}\\<|python_start|>"), max_size=40), data=st.data()
)
def test_cuts_change_nothing_and_text_is_kept(text: str, data: st.DataObject) -> None:
    whole = parse(FORM.parser(SPECS), [text])
    assert parse(FORM.parser(SPECS), cut(data, text)) == whole
    if not calls_in(whole):
        assert "".join(piece.text for piece in whole if isinstance(piece, TextPiece)) == text


def test_deep_lists_end_the_call_and_not_the_parser() -> None:
    pieces = parse(FORM.parser(SPECS), ["[f(a=" + "[" * 10_000])
    assert [name for name, _ in calls_in(pieces)] == ["f"]


def test_numbers_keep_their_form() -> None:
    (call,) = calls_in(parse(FORM.parser(SPECS), ["[f(a=-0.5e3, b=12345678901234567890, c=1.0)]"]))
    assert call == ("f", '{"a": -0.5e3, "b": 12345678901234567890, "c": 1.0}')
    assert math.isclose(json.loads(call[1])["a"], -500)
