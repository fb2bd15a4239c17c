"""Reads and constrains the format of Qwen3-Coder, in which each argument stands in tags of its own.

The values have no quotes, so their types come from the schema of the tool (`ParameterTypes`): a parameter that can only
be a string is the text itself, which flows on as it comes, and anything else is JSON if it can be read as such. A value
that is neither becomes a string, so that nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modalities.answers.call_grammars import chosen_tools, marked_calls, marker_terminal
from modalities.answers.json_formats import read_closing, tools_as_json
from modalities.answers.json_scanner import WHITESPACE, JsonScanner, ScanStatus, json_value_kind
from modalities.answers.parameter_types import VALUE_END, ParameterTypes
from modalities.answers.pieces import AnswerParser, PieceSink, ToolChoice, ToolSpec
from modalities.answers.text_source import Reading, StreamedParser, TextSource, read_calls_in_text
from modalities.answers.xml_grammar import call_body_rules

FUNCTION_START = "<function="
_MAYBE_END = re.compile(r"[\n<]")


@dataclass(frozen=True, slots=True)
class Qwen3CoderFormat:
    """Writes `<tool_call>`, `<function=NAME>`, for each argument `<parameter=KEY>`, its value and `</parameter>`, then
    `</function>` and `</tool_call>`, each on its own line.

    Qwen3-Coder and Qwen3.5 write calls in this way (the chat templates of these models). As these models sometimes
    leave out `<tool_call>`, a call at the beginning of the answer or behind another call needs none."""

    name: str = "qwen3_coder"
    special_tokens: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, are_parallel: bool, special_token_ids: Mapping[str, int]
    ) -> str:
        chosen = chosen_tools(tools, choice)
        if not chosen:
            return ""
        opening, closing = self.special_tokens
        rules = marked_calls(choice, are_parallel, opening, special_token_ids)
        return rules + call_body_rules(chosen, marker_terminal(closing, special_token_ids), choice.kind != "auto")

    def parser(self, tools: Sequence[ToolSpec]) -> AnswerParser:
        name_to_types = {tool.name: ParameterTypes(tool.parameters) for tool in tools}
        opening, closing = self.special_tokens

        def read(source: TextSource, sink: PieceSink) -> Reading[None]:
            mark = opening

            def read_opening() -> Reading[bool]:
                nonlocal mark
                mark = yield from source.skip_one_of((opening, FUNCTION_START))
                return bool(mark)

            def read_call() -> Reading[bool]:
                nonlocal mark
                if mark != FUNCTION_START:
                    yield from source.skip_all(WHITESPACE)
                    if not (yield from source.skip(FUNCTION_START)):
                        return False
                mark = opening
                if not (yield from _read_function(source, sink, name_to_types)):
                    return False
                return (yield from read_closing(source, closing))

            return read_calls_in_text(source, sink, opening, read_opening, read_call)

        return StreamedParser(read)

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        lines = "\n".join(tools_as_json(tools))
        return (
            f"# Tools\n\nYou have access to the following functions:\n\n<tools>\n{lines}\n</tools>\n\n"
            "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
            "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
            "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\n"
            "multiple lines\n</parameter>\n</function>\n</tool_call>"
        )


def _read_function(source: TextSource, sink: PieceSink, name_to_types: Mapping[str, ParameterTypes]) -> Reading[bool]:
    """Reads from behind `<function=` to `</function>`; returns whether all of it is there. If something else stands
    behind a parameter, the object of the arguments ends there; if the answer ends there, the object stays open."""
    name = yield from _read_tag_end(source)
    if name not in name_to_types:
        return False
    source.forget()
    sink.start_call(name)
    sink.arguments("{")
    num_parameters = 0
    while True:
        source.keep()
        yield from source.skip_all(WHITESPACE)
        if not (yield from source.skip("<")):
            break
        if (yield from source.peek()) == "/":
            if not (yield from source.skip("/function>")):
                break
            source.forget()
            sink.arguments("}")
            return True
        if not (yield from source.skip("parameter=")) or not (key := (yield from _read_tag_end(source))):
            break
        source.forget()
        sink.arguments(f"{', ' if num_parameters else ''}{json.dumps(key, ensure_ascii=False)}: ")
        num_parameters += 1
        if name_to_types[name].is_text(key):
            is_whole = yield from _read_text_value(source, sink, name_to_types[name].can_be_null(key))
        else:
            is_whole = yield from _read_json_value(source, sink, name_to_types[name].takes_boolean(key))
        if not is_whole:
            return False
    if not source.is_at_end:
        sink.arguments("}")
    return False


def _read_tag_end(source: TextSource) -> Reading[str]:
    """Reads what names a function or a parameter, and the `>` behind it. Returns an empty text if there is no `>` on
    the line."""
    parts: list[str] = []
    while (char := (yield from source.peek())) and char not in ">\n<":
        parts.append(char)
        source.position += 1
    return "".join(parts).strip() if (yield from source.skip(">")) else ""


def _read_text_value(source: TextSource, sink: PieceSink, can_be_null: bool) -> Reading[bool]:
    """Reads a string as it stands, without the line breaks around it, and passes it on as it comes. Returns whether the
    value has its end."""
    yield from source.skip("\n")
    source.keep()
    if can_be_null and (yield from source.skip("null")):
        yield from source.skip("\n")
        if (yield from source.skip(VALUE_END)):
            source.forget()
            sink.arguments("null")
            return True
    sink.arguments('"' + _escaped(source.take_kept()))
    while (yield from source.more()):
        place = _MAYBE_END.search(source.text, source.position)
        sink.arguments(_escaped(source.take(place.start() if place else len(source.text))))
        if not place:
            continue
        source.keep()
        yield from source.skip("\n")
        if (yield from source.skip(VALUE_END)):
            source.forget()
            sink.arguments('"')
            return True
        sink.arguments(_escaped(source.take_kept()))
    return False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_json_value(source: TextSource, sink: PieceSink, takes_boolean: bool) -> Reading[bool]:
    """Reads a value that may be JSON, and passes it on when it is whole. Within a JSON string, a text like the end of
    the value does not end it; as such a string has no line break, the end on a line of its own is always found. Returns
    whether the value has its end."""
    yield from source.skip("\n")
    source.keep()
    yield from source.skip_all(WHITESPACE)
    scanner = JsonScanner()
    while scanner.status is ScanStatus.MORE and (yield from source.more()):
        source.position = scanner.feed(source.text, source.position)
    value, is_whole = yield from _read_to_value_end(source)
    value = value.removesuffix("\n")
    if takes_boolean and value.strip().lower() in ("true", "false"):
        value = value.lower()
    sink.arguments(value.strip(WHITESPACE) if json_value_kind(value) else json.dumps(value, ensure_ascii=False))
    return is_whole


def _read_to_value_end(source: TextSource) -> Reading[tuple[str, bool]]:
    """Returns what is kept, up to the end of the value, and whether the end is there."""
    while (yield from source.more()):
        at = source.text.find("<", source.position)
        source.take(len(source.text) if at < 0 else at)
        if at >= 0 and (yield from source.skip(VALUE_END)):
            return source.take_kept()[: -len(VALUE_END)], True
    return source.take_kept(), False
