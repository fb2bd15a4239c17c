"""Builds answers from known parts: a parser finds these parts, however the text is cut, and loses no text that is no
call."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from answer_walks import calls_in, parse
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from modalities.answers import (
    AnswerPiece,
    ReasoningFormat,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
    ToolSpec,
    answer_parser,
    find_tool_format,
    join_pieces,
)
from modalities.answers.json_scanner import JsonScanner, ScanStatus, json_value_kind

XML_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "count": {"type": "integer"},
        "any": {},
    },
}
SPECS = (ToolSpec("f", "", XML_SCHEMA), ToolSpec("get_weather", "", {}), ToolSpec("a.b-c", "", {}))
NAMES = [spec.name for spec in SPECS]
FORMS = {name: find_tool_format(name, "") for name in ("hermes", "llama3", "mistral", "pythonic", "qwen3_coder")}
FORMS["plain text"] = None
MARKS = ("<tool", "</tool_call>", "[TOOL_", "</think>", "<thin", "<|python", "</parameter>", "</function>")
WORDS = st.sampled_from((*MARKS, *'a[{};"\\<é\U0001f600 \n\t', "Well, ", "<<", "null", "{}", '{"name": "f"'))
TEXTS = st.lists(WORDS, max_size=6).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS | st.sampled_from(["name", "arguments"]), VALUES, max_size=3)
CALLS = st.tuples(st.sampled_from(NAMES), OBJECTS)
BLANKS = st.sampled_from(["", " ", "\n", " \n\t"])
REASONING = ReasoningFormat()
TYPE_TO_KIND = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
TYPE_TO_KIND |= {int: "number", float: "number"}
FEW = settings(deadline=None, max_examples=60)


def is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(char) <= 0xDFFF for char in text)


@st.composite
def json_texts(draw: st.DrawFn, value: Any) -> str:
    return json.dumps(
        value,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, None, 2])),
        separators=draw(st.sampled_from([None, (",", ":"), (" , ", " : ")])),
    )


@st.composite
def json_calls(draw: st.DrawFn, call: tuple[str, Any]) -> tuple[str, str]:
    """Draws one way to write a call as an object, and the arguments' text that a client gets."""
    name, value = call
    arguments = draw(json_texts(value))
    is_text = draw(st.booleans()) and is_unicode(json.dumps(arguments))
    written = draw(json_texts(arguments)) if is_text else arguments
    members = [("name", draw(json_texts(name))), (draw(st.sampled_from(["arguments", "parameters"])), written)]
    members += draw(st.sampled_from([[], [("id", '"abc{"')], [("type", '"function"'), ("id", "[1, null]")]]))
    members = draw(st.permutations(members))
    blank = draw(BLANKS)
    inner = f",{blank}".join(f'"{key}"{blank}:{draw(BLANKS)}{text}' for key, text in members)
    return f"{{{blank}{inner}{draw(BLANKS)}}}", arguments


@st.composite
def hermes(draw: st.DrawFn) -> tuple[str, list[AnswerPiece]]:
    """Draws an answer in Hermes' form with text between calls, and its pieces."""
    written, pieces = "", []
    texts: list[str] = []
    for index in range(draw(st.integers(0, 3))):
        texts.append(draw(TEXTS))
        call = draw(CALLS)
        form, arguments = draw(json_calls(call))
        written += f"{texts[-1]}<tool_call>{draw(BLANKS)}{form}{draw(BLANKS)}</tool_call>"
        pieces += [TextPiece(texts[-1]), ToolCallStart(index, call[0]), ToolCallArguments(index, arguments)]
    texts.append(draw(TEXTS))
    assume(not any("<tool_call>" in text for text in texts))
    pieces.append(TextPiece(texts[-1]))
    return written + texts[-1], without_blanks(pieces)


@st.composite
def llama3(draw: st.DrawFn) -> tuple[str, list[AnswerPiece]]:
    calls = draw(st.lists(CALLS, min_size=1, max_size=3))
    written, pieces = draw(st.sampled_from(["", "\n", "<|python_tag|>", "<|python_tag|> "])), []
    for index, call in enumerate(calls):
        form, arguments = draw(json_calls(call))
        written += (draw(st.sampled_from(["; ", ";", "\n", " ;\n"])) if index else "") + form
        pieces += [ToolCallStart(index, call[0]), ToolCallArguments(index, arguments)]
    text = draw(TEXTS)
    assume(text.lstrip(" \t\n\r")[:1] not in (";", "{"))
    return written + text, without_blanks([*pieces, TextPiece(text)])


@st.composite
def mistral(draw: st.DrawFn) -> tuple[str, list[AnswerPiece]]:
    calls = draw(st.lists(CALLS, min_size=1, max_size=3))
    written, text, is_list = draw(TEXTS), draw(TEXTS), draw(st.booleans())
    pieces: list[AnswerPiece] = [TextPiece(written)]
    forms: list[str] = []
    for index, call in enumerate(calls):
        form, arguments = draw(json_calls(call))
        if not is_list:
            arguments = draw(json_texts(call[1]))
            between = draw(st.sampled_from(["[ARGS]", "", "[CALL_ID]ab3dE6gh9[ARGS]", " [ARGS] "]))
            form = f"[TOOL_CALLS]{draw(BLANKS)}{call[0]}{between}{arguments}"
        forms.append(form)
        pieces += [ToolCallStart(index, call[0]), ToolCallArguments(index, arguments)]
    blank = draw(BLANKS)
    listed = f"[TOOL_CALLS]{blank}[{blank}" + f"{blank},{blank}".join(forms) + f"{blank}]"
    written += listed if is_list else blank.join(forms)
    return written + text, without_blanks([*pieces, TextPiece(text)])


def without_blanks(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Returns the joined pieces without texts that are only whitespace, if there is a call."""
    if not any(isinstance(piece, ToolCallStart) for piece in pieces):
        return join_pieces([piece for piece in pieces if piece != TextPiece("")])
    return [piece for piece in pieces if not (isinstance(piece, TextPiece) and not piece.text.strip(" \t\n\r"))]


def cuts_of(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@FEW
@given(st.data())
@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_the_pieces_are_those_that_were_written(name: str, data: st.DataObject) -> None:
    written, pieces = data.draw({"hermes": hermes, "llama3": llama3, "mistral": mistral}[name]())
    has_reasoning, begins_inside = data.draw(st.booleans()), data.draw(st.booleans())
    reasoning = REASONING if has_reasoning or begins_inside else None
    if reasoning is not None:
        thought = data.draw(TEXTS).strip("\n")
        assume("</think>" not in thought and not thought.lstrip().startswith("<think>"))
        if pieces and isinstance(pieces[0], TextPiece):
            pieces = [TextPiece(pieces[0].text.lstrip("\n")), *pieces[1:]]
        start = "" if begins_inside and data.draw(st.booleans()) else "<think>"
        written = f"{start}\n{thought}\n\n</think>\n{written}"
        pieces = [piece for piece in [ReasoningPiece(thought), *pieces] if getattr(piece, "text", "x")]
    for parts in ([written], list(written), cuts_of(data.draw, written)):
        assert parse(answer_parser(reasoning, FORMS[name], SPECS, begins_inside), parts) == pieces


@FEW
@given(st.data())
def test_arguments_in_tags_are_those_that_were_written(data: st.DataObject) -> None:
    written, expected, texts = "", [], []
    for _ in range(data.draw(st.integers(1, 3))):
        texts.append(data.draw(TEXTS))
        assume("<tool_call>" not in texts[-1])
        text = data.draw(TEXTS)
        maybe = data.draw(TEXTS | st.none())
        assume("</parameter>" not in text + (maybe or "") and maybe != "null")
        value = {"text": text, "maybe": maybe, "count": data.draw(st.integers()), "any": data.draw(VALUES)}
        assume("</parameter>" not in json.dumps(value["any"]) or isinstance(value["any"], str | list | dict))
        keys = data.draw(st.lists(st.sampled_from(list(value)), unique=True))
        value = {key: value[key] for key in keys}
        written += texts[-1] + f"<tool_call>{data.draw(BLANKS)}<function=f>\n"
        for key in keys:
            is_raw = key == "text" or (key == "maybe" and maybe is not None)
            raw = str(value[key]) if is_raw else data.draw(json_texts(value[key]))
            written += f"<parameter={key}>\n{raw}\n</parameter>\n"
        written += "</function>\n</tool_call>"
        expected.append(value)
    for parts in ([written], list(written), cuts_of(data.draw, written)):
        pieces = parse(FORMS["qwen3_coder"].parser(SPECS), parts)
        assert [json.loads(arguments) for _, arguments in calls_in(pieces)] == expected
        found = [piece.text for piece in pieces if isinstance(piece, TextPiece)]
        assert found == [text for text in texts if text.strip(" \t\n\r")]


@FEW
@given(st.data())
@pytest.mark.parametrize("reasoning", [None, REASONING])
@pytest.mark.parametrize("name", FORMS)
def test_text_without_calls_is_kept(name: str, reasoning: ReasoningFormat | None, data: st.DataObject) -> None:
    marks = ["<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name":', '"f"', '"arguments":', ',"', "<function=f"]
    text = data.draw(st.lists(WORDS | st.sampled_from(marks), max_size=12).map("".join))
    whole = parse(answer_parser(reasoning, FORMS[name], SPECS, False), [text])
    for parts in (list(text), cuts_of(data.draw, text)):
        assert parse(answer_parser(reasoning, FORMS[name], SPECS, False), parts) == whole
    if not calls_in(whole):
        assert whole == ([TextPiece(text)] if text else [])
        return
    place = 0
    for piece in whole:
        if isinstance(piece, TextPiece) or (isinstance(piece, ToolCallArguments) and piece.text != "{}"):
            place = text.find(piece.text, place)
            assert place >= 0, "pieces stand in the text, in their order, and none twice"
            place += len(piece.text)


@settings(deadline=None)
@given(st.data())
def test_the_scanner_knows_json(data: st.DataObject) -> None:
    bits = [*'{}[],:"\\-01.e+ \na', "u00e9", "\\n", "true", "null"]
    text = data.draw(st.lists(st.sampled_from(bits), max_size=8).map("".join) | VALUES.flatmap(json_texts))
    try:
        value = json.loads(text, parse_constant=lambda name: math.nan if name else 0)
        is_json = bool(text.strip(" \t\n\r"))
    except ValueError:
        value, is_json = None, False
    assert json_value_kind(text) == (TYPE_TO_KIND[type(value)] if is_json else "")
    text = text.lstrip(" \t\n\r")
    whole, parted = JsonScanner(), JsonScanner()
    end = whole.feed(text)
    assert sum(parted.feed(letter) for letter in text) == end
    assert parted.status is whole.status
    if is_json and whole.status is ScanStatus.WHOLE:
        assert text[end:].strip(" \t\n\r") == ""
