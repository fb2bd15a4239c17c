"""Each family's calls are read as its documents write them, and what is no call stays text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from fabric.contracts import ConfigError
from modalities.answers import (
    AnswerPiece,
    ReasoningFormat,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
    ToolSpec,
    answer_parser,
    find_reasoning_format,
    find_tool_format,
    join_pieces,
    template_takes_tools,
)

SPECS = (
    ToolSpec("get_weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}}),
    ToolSpec(
        "edit",
        "",
        {
            "type": "object",
            "properties": {
                "text": {"$ref": "#/$defs/Text"},
                "lines": {"type": "array", "items": {"type": "integer"}},
                "is_new": {"type": "boolean"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "any": {},
            },
            "$defs": {"Text": {"type": "string"}},
        },
    ),
)


def parsed(name: str, text: str) -> list[AnswerPiece]:
    parser = find_tool_format(name, "").parser(SPECS)
    return join_pieces([*parser.push(text), *parser.flush()])


def call(index: int, name: str, arguments: str) -> list[AnswerPiece]:
    return [ToolCallStart(index, name), ToolCallArguments(index, arguments)]


PARIS = '{"city": "Paris"}'
ROME = '{"city": "Rome"}'


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        (
            "hermes",
            'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "get_weather"}\n</tool_call>',
            [TextPiece("Sure.\n"), *call(0, "get_weather", PARIS), *call(1, "get_weather", ROME)],
        ),
        (
            "hermes",
            '<tool_call>{"name":"get_weather","arguments":"{\\"city\\": \\"Paris\\"}"}</tool_call>\n\nDone.',
            [*call(0, "get_weather", PARIS), TextPiece("\n\nDone.")],
        ),
        ("hermes", '<tool_call>{"name": "get_weather"}</tool_call>', call(0, "get_weather", "{}")),
        ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', call(0, "get_weather", PARIS)),
        (
            "llama3",
            '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; '
            '{"name": "get_weather", "parameters": {"city": "Rome"}}',
            [*call(0, "get_weather", PARIS), *call(1, "get_weather", ROME)],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "9Ae3bDc2F"}, '
            '{"name": "get_weather", "arguments": {"city": "Rome"}}]',
            [*call(0, "get_weather", PARIS), *call(1, "get_weather", ROME)],
        ),
        (
            "mistral",
            'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
            '[TOOL_CALLS]get_weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Rome"}',
            [TextPiece("Hm."), *call(0, "get_weather", PARIS), *call(1, "get_weather", ROME)],
        ),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', call(0, "get_weather", PARIS)),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
            call(0, "get_weather", PARIS),
        ),
        (
            "qwen3_coder",
            'I edit.\n<tool_call>\n<function=edit>\n<parameter=text>\nif a < "b":\n\tpass\n\n</parameter>\n'
            "<parameter=lines>\n[1, 2]\n</parameter>\n<parameter=is_new>\nTrue\n</parameter>\n"
            "<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
            [
                TextPiece("I edit.\n"),
                *call(
                    0, "edit", '{"text": "if a < \\"b\\":\\n\\tpass\\n", "lines": [1, 2], "is_new": true, "note": null}'
                ),
            ],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=edit>\n<parameter=text>\n12\n</parameter>\n<parameter=any>\n12\n</parameter>\n"
            "<parameter=lines>\nthe first\n</parameter>\n<parameter=note>\nnullable\n</parameter>\n"
            "<parameter=other>\nNaN\n</parameter></function></tool_call>",
            call(0, "edit", '{"text": "12", "any": 12, "lines": "the first", "note": "nullable", "other": "NaN"}'),
        ),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
            "<function=get_weather></function></tool_call> <function=get_news>",
            [*call(0, "get_weather", PARIS), *call(1, "get_weather", "{}"), TextPiece(" <function=get_news>")],
        ),
        (
            "qwen3_coder",
            '<tool_call><function=edit><parameter=any>["</parameter>", 1]</parameter></function></tool_call>',
            call(0, "edit", '{"any": ["</parameter>", 1]}'),
        ),
    ],
)
def test_calls_are_read_as_the_families_write_them(name: str, text: str, pieces: list[AnswerPiece]) -> None:
    assert parsed(name, text) == pieces


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>\n'),
        ("hermes", '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "Paris"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'get_weather'}</tool_call>"),
        ("hermes", "<tool_call>get_weather</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_cal"),
        ("hermes", ' \n<tool_call>{"name": "get_w'),
        ("hermes", "if a <b> c </tool_call>"),
        ("llama3", '{"name": "Anna", "age": 3}'),
        ("llama3", '{"answer": {"name": "get_weather"}}'),
        ("llama3", 'Like this: {"name": "get_weather", "parameters": {}}'),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", '[TOOL_CALLS] [{"name": "other", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]get_weather_now[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]get_weather[ARGS]Paris"),
        ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS Paris"),
        ("mistral", "[1] [TOOL_CALL"),
        ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=get_weather\n</function>\n</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'),
    ],
)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert parsed(name, text) == [TextPiece(text)]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call>',
            [*call(0, "get_weather", '{"city": '), TextPiece("Paris}}</tool_call>")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {}, "why": 1}</tool_call>',
            [*call(0, "get_weather", "{}"), TextPiece(', "why": 1}</tool_call>')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}} and <tool_call>x',
            [*call(0, "get_weather", PARIS), TextPiece(" and <tool_call>x")],
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {}}, {"name": "other"}]',
            [*call(0, "get_weather", "{}"), TextPiece(', {"name": "other"}]')],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=city>Paris</parameter> and so on</tool_call>",
            [*call(0, "get_weather", PARIS), TextPiece(" and so on</tool_call>")],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
            call(0, "get_weather", '{"city": "Par'),
        ),
    ],
)
def test_arguments_that_have_begun_to_flow_stay(name: str, text: str, pieces: list[AnswerPiece]) -> None:
    assert parsed(name, text) == pieces


def test_arguments_flow_as_they_come_and_no_marker_is_shown() -> None:
    parser = find_tool_format("hermes", "").parser(SPECS)
    assert parser.push("Yes <tool_") == [TextPiece("Yes ")]
    assert parser.push('call>{"name": "get_weather", "arguments": {"ci') == call(0, "get_weather", '{"ci')
    assert parser.push('ty": "<') == [ToolCallArguments(0, 'ty": "<')]
    assert parser.push('/tool_call>"}}</tool_') == [ToolCallArguments(0, '/tool_call>"}')]
    assert parser.push("call>\n") == []
    assert parser.flush() == []
    parser = find_tool_format("qwen3_coder", "").parser(SPECS)
    assert parser.push("<tool_call><function=get_weather>") == call(0, "get_weather", "{")
    assert parser.push('<parameter=city>\nA "') == [ToolCallArguments(0, '"city": "A \\"')]
    assert parser.push("\n") == [], "the line break may belong to the end"


@pytest.mark.parametrize(
    ("begins_inside", "text", "pieces"),
    [
        (False, "<think>\nHm.\n\nYes.\n</think>\n\nHallo.", [ReasoningPiece("Hm.\n\nYes."), TextPiece("Hallo.")]),
        (False, "Hallo <think>a</think>", [TextPiece("Hallo <think>a</think>")]),
        (False, "\n<think>\n\n</think>\n\nHallo.", [TextPiece("Hallo.")]),
        (True, "Hm.\n</think>\n\nHallo </think>", [ReasoningPiece("Hm."), TextPiece("Hallo </think>")]),
        (True, "</think>Hallo", [TextPiece("Hallo")]),
        (True, "<think>Hm.</think>", [ReasoningPiece("Hm.")]),
        (True, "a <b> \n\n", [ReasoningPiece("a <b> \n\n")]),
        (
            True,
            'Use <tool_call>.</think>\n<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>',
            [ReasoningPiece("Use <tool_call>."), *call(0, "get_weather", "{}")],
        ),
    ],
)
def test_reasoning_comes_before_the_answer(begins_inside: bool, text: str, pieces: list[AnswerPiece]) -> None:
    for parts in ([text], list(text)):
        parser = answer_parser(ReasoningFormat(), find_tool_format("hermes", ""), SPECS, begins_inside)
        found = [piece for part in parts for piece in parser.push(part)]
        assert join_pieces(found + parser.flush()) == pieces


@pytest.mark.parametrize(
    ("name", "before", "text", "after"),
    [
        ("hermes", '<tool_call>{"name": "edit", "arguments": {"text": "', 'a\\"<{ ', '"}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"text": "', 'a\\"<{ ', '"}, "name": "edit"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"text": "', "<tool_call>{", '"}, "name": "other"}</tool_call>'),
        ("hermes", "", "<tool_call>{", ""),
        ("hermes", "", "<", ""),
        ("hermes", '<tool_call>{"name": "edit", "arguments": ', "[", ""),
        ("hermes", '<tool_call>{"name": "edit", "arguments": {"a": ', "[", ""),
        ("llama3", "", '{"name": "edit"};', ""),
        ("mistral", "[TOOL_CALLS][", '{"name": "edit"},', "]"),
        ("mistral", "[TOOL_CALLS]", " ", "edit"),
        ("qwen3_coder", "<tool_call><function=edit><parameter=text>", "\n<a", "</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=edit><parameter=lines>", "1,\n<", "</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=", "x", ">"),
    ],
)
def test_the_work_grows_with_the_length_of_the_text_only(name: str, before: str, text: str, after: str) -> None:
    def num_steps(num_repeats: int, is_cut: bool) -> int:
        written = before + text * num_repeats + after
        parser = answer_parser(ReasoningFormat(), find_tool_format(name, ""), SPECS, False)
        return steps_of(lambda: [parser.push(part) for part in (written if is_cut else [written])] and parser.flush())

    for is_cut in (True, False):
        assert num_steps(1600, is_cut) < 4.5 * num_steps(400, is_cut) + 1000


def test_references_to_each_other_cost_little() -> None:
    """Twenty references of two alternatives each stand for a million of them."""
    union = {f"a{index}": {"anyOf": [{"$ref": f"#/$defs/a{index + 1}"}] * 2} for index in range(20)}
    spec = ToolSpec(
        "f", "", {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": {**union, "a20": {"type": "string"}}}
    )
    text = "<tool_call><function=f><parameter=a>12</parameter></function></tool_call>"
    form = find_tool_format("qwen3_coder", "")
    assert steps_of(lambda: form.parser([spec])) < 2000
    parser = form.parser([spec])
    assert join_pieces(parser.push(text)) == call(0, "f", '{"a": 12}'), "what is too deep may have any type"


def steps_of(run: Callable[[], object]) -> int:
    """Returns the number of calls of functions that a run makes, those of the interpreter's own functions included."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    earlier = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(earlier)
    return num_calls


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ \'<tool_call>\\n{"name": "\' }}', "hermes"),
        ("{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}{{ '\"parameters\": ' }}", "llama3"),
        ("{{ '<|start_header_id|>ipython<|end_header_id|>' }}{{ '\"parameters\": ' }}", "llama3"),
        ("{{ '[func_name1(params_name1=params_value1...)]' }}{{ 'ipython' }}{{ '\"parameters\": ' }}", "pythonic"),
        ("{{ '<|start_header_id|>user<|end_header_id|>' }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_the_template_names_the_format(template: str, name: str) -> None:
    assert find_tool_format("auto", template).name == name
    assert find_tool_format("llama3", template).name == "llama3"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be one of `auto`, `hermes`, .*, not `python`"):
        find_tool_format("python", "")


QWEN3 = (
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}"
    "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (QWEN3, (), ReasoningFormat()),
        (QWEN3 + "{{- '<|im_start|>assistant\\n<think>\\n' }}", (), ReasoningFormat(begins_inside=True)),
        ("{{ c.split('</think>') }}{{'<|Assistant|><think>\\n'}}", (), ReasoningFormat(begins_inside=True)),
        ("{{ '[INST]' }}", ("[THINK]", "[/THINK]"), ReasoningFormat("[THINK]", "[/THINK]")),
        ("{{ '<|im_start|>assistant\\n' }}", ("<|im_end|>",), None),
    ],
)
def test_the_template_names_the_marks_of_reasoning(
    template: str, tokens: tuple[str, ...], expected: ReasoningFormat | None
) -> None:
    assert find_reasoning_format(template, tokens) == expected


def test_the_prompt_says_whether_the_output_begins_with_reasoning() -> None:
    reasoning = ReasoningFormat()
    assert reasoning.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not reasoning.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not reasoning.is_open_after("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "takes_tools"),
    [
        ("{%- if tools %}", True),
        ("{{ tools | tojson }}", True),
        ("{% for tool in tools -%}", True),
        ("{% set custom_tools = 1 %}{{ message.tools }}{{ message['tools'] }}{{ '<tools>' }} if tools", False),
    ],
)
def test_a_template_takes_tools_if_it_reads_the_variable(template: str, takes_tools: bool) -> None:
    assert template_takes_tools(template) == takes_tools


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "pythonic", "qwen3_coder"])
def test_instructions_tell_of_each_tool(name: str) -> None:
    text = find_tool_format(name, "").instructions(SPECS)
    for spec in SPECS:
        described = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
        assert json.dumps({"type": "function", "function": described}) in text
