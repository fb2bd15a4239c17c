"""Reads and constrains calls that are written as a Python list of function calls.

A call that is constrained has its arguments in the order of the schema, with values in JSON, which is Python except for
booleans and `None`; these are written as in Python where a whole argument is one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fabric.contracts import InvalidRequest
from modalities.answers.call_grammars import TERMINALS, chosen_tools, json_value, literal, marker_terminal
from modalities.answers.json_formats import read_closing, tools_as_json
from modalities.answers.json_scanner import WHITESPACE
from modalities.answers.parameter_types import ParameterTypes
from modalities.answers.pieces import AnswerParser, PieceSink, ToolChoice, ToolSpec
from modalities.answers.python_values import read_python_value
from modalities.answers.text_source import Reading, StreamedParser, TextSource, read_calls_in_text
from modalities.answers.xml_grammar import DESCRIPTIONS, check_parameters, with_definitions

MAX_KEY_CHARS = 256
_KEY = re.compile(r"[^\W\d]\w*")
_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    """Writes `[name(key=value, ...), ...]` as the whole answer; Llama 4 may put it between `<|python_start|>` and
    `<|python_end|>`.

    Llama 4, and Llama 3.2 in one of its forms, write calls in this way (Meta's description of the prompt formats).
    Without the marker, a call is one only at the beginning of the answer."""

    name: str = "pythonic"
    special_tokens: tuple[str, ...] = ("<|python_start|>", "<|python_end|>")

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, are_parallel: bool, special_token_ids: Mapping[str, int]
    ) -> str:
        chosen = chosen_tools(tools, choice)
        if not chosen:
            return ""
        opening, closing = self.special_tokens
        is_marked = opening in special_token_ids and closing in special_token_ids
        start, end = (marker_terminal(each, special_token_ids) for each in self.special_tokens)
        more = ' (WS? "," WS? call)*' if are_parallel else ""
        rest = f'{more} WS? "]"'
        if choice.kind == "auto":
            heads = " | ".join(f"head_{index} rest_{index}" for index in range(len(chosen)))
            marked = f' | TEXT? {start} WS? "[" WS? call{rest} WS? {end} WS?' if is_marked else ""
            rules = f"start: first_call{rest} WS?{marked} | TEXT?\nfirst_call: {heads}\n"
            for index, tool in enumerate(chosen):
                name = re.sub(r"[.-]", r"\\\g<0>", tool.name)
                rules += f"head_{index}[lazy]: /[ \\n\\t]{{0,40}}\\[[ \\n\\t]{{0,40}}{name}\\(/\n"
        else:
            bare = f'"[" WS? call{rest}'
            rules = f"start: {bare}{f' | {start} {bare} WS? {end}' if is_marked else ''}\n"
        rules += "call: " + " | ".join(f"call_{index}" for index in range(len(chosen))) + "\n"
        for index, tool in enumerate(chosen):
            if choice.kind != "auto":
                check_parameters(tool)
            rules += f"call_{index}: {literal(tool.name + '(')} rest_{index}\n" + _arguments_rules(tool, index)
        return rules + TERMINALS

    def parser(self, tools: Sequence[ToolSpec]) -> AnswerParser:
        names = {tool.name for tool in tools}
        opening, closing = self.special_tokens

        def read(source: TextSource, sink: PieceSink) -> Reading[None]:
            is_marked = True

            def read_opening() -> Reading[bool]:
                nonlocal is_marked
                is_marked = (yield from source.peek()) != "["
                is_open = not is_marked or (yield from source.skip(opening))
                is_marked = True if not is_open else is_marked
                return is_open

            def read_call() -> Reading[bool]:
                nonlocal is_marked
                has_closing, is_marked = is_marked, True
                yield from source.skip_all(WHITESPACE)
                if not (yield from _read_list(source, sink, names)):
                    return False
                return not has_closing or (yield from read_closing(source, closing))

            return read_calls_in_text(source, sink, opening, read_opening, read_call)

        return StreamedParser(read)

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        return (
            "You have access to the following functions. If you decide to call one or several of them, you MUST put it "
            "in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), "
            "func_name2(params)], and you SHOULD NOT include any other text in the response.\n\n"
            + "\n\n".join(tools_as_json(tools))
        )


# ------------------------------------------------------------ reading


def _read_list(source: TextSource, sink: PieceSink, names: Collection[str]) -> Reading[bool]:
    """Reads the list of calls. What follows the last good call is kept if it is neither another call nor the end."""
    if not (yield from source.skip("[")):
        return False
    longest = max(map(len, names), default=0)
    while True:
        yield from source.skip_all(WHITESPACE)
        name = yield from _read_word(source, "(", longest)
        if name not in names or not (yield from source.skip("(")):
            return False
        if not (yield from _read_arguments(source, sink, name)):
            return False
        source.keep()
        yield from source.skip_all(WHITESPACE)
        has_comma = yield from source.skip(",")
        yield from source.skip_all(WHITESPACE)
        if (yield from source.skip("]")):
            source.forget()
            return True
        if not has_comma:
            return False


def _read_arguments(source: TextSource, sink: PieceSink, name: str) -> Reading[bool]:
    """Reads from behind the parenthesis to the one that closes it. The call is certain once the first key is. If an
    argument breaks, the object of the arguments stays open, as it does when a token limit cuts it."""
    keys: set[str] = set()
    while True:
        yield from source.skip_all(WHITESPACE)
        if (yield from source.skip(")")):
            if not keys:
                source.forget()
                sink.start_call(name)
                sink.arguments("{")
            sink.arguments("}")
            return True
        key = yield from _read_word(source, "=", MAX_KEY_CHARS)
        yield from source.skip_all(WHITESPACE)
        if key in keys or not _KEY.fullmatch(key) or not (yield from source.skip("=")):
            return False
        if not keys:
            source.forget()
            sink.start_call(name)
        sink.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        yield from source.skip_all(WHITESPACE)
        if not (yield from read_python_value(source, sink.arguments)):
            return False
        yield from source.skip_all(WHITESPACE)
        if not (yield from source.skip(",")) and (yield from source.peek()) != ")":
            return False


def _read_word(source: TextSource, end: str, longest: int) -> Reading[str]:
    """Reads up to `end` or whitespace, but no more than `longest` characters."""
    parts: list[str] = []
    while len(parts) < longest and (char := (yield from source.peek())) and char not in WHITESPACE + end:
        parts.append(char)
        source.position += 1
    return "".join(parts)


# ------------------------------------------------------------ constraining


def _arguments_rules(tool: ToolSpec, index: int) -> str:
    """Returns the rule `rest_N`, from behind the parenthesis to the one that closes it, and the rules that it needs:
    `first_N_I` begins with argument I or a later one, and `more_N_I` goes on so behind another argument."""
    types = ParameterTypes(tool.parameters)
    required = tool.parameters.get("required")
    needed = [str(key) for key in required] if isinstance(required, list) else []
    key_to_schema = {**types.properties, **{key: {} for key in needed if key not in types.properties}}
    rules, first, more = "", "", ""
    for place, (key, schema) in reversed([*enumerate(key_to_schema.items())]):
        if not _KEY.fullmatch(key) or len(key) > MAX_KEY_CHARS:
            message = (
                f"a parameter of the tool `{tool.name}` has the name {json.dumps(key[:64])}, but this model's form"
            )
            raise InvalidRequest(f"{message} of calls takes only names of Python", param="tools")
        argument = f"argument_{index}_{place}"
        words = _words(types.alternatives(schema))
        value = words or json_value(with_definitions(schema, tool.parameters))
        rules += f"{argument}: {literal(key + '=')} value_{index}_{place}\nvalue_{index}_{place}: {value}\n"
        behind = f" {more}" if more else ""
        if key in needed:
            first_rule, more_rule = f"{argument}{behind}", f'"," WS? {argument}{behind}'
        else:
            first_rule = f"{argument}{behind} | {first}" if first else f"({argument}{behind})?"
            more_rule = f'("," WS? {argument})?{behind}'
        first, more = f"first_{index}_{place}", f"more_{index}_{place}"
        rules += f"{first}: {first_rule}\n{more}: {more_rule}\n"
    return f'rest_{index}: {first} ")"\n{rules}'


def _words(alternatives: Sequence[Mapping[str, object]]) -> str:
    """Returns Python's words for an argument that can only be a boolean or None; an empty text for any other."""
    kinds = [one.get("type") for one in alternatives if one.keys() <= {"type", *DESCRIPTIONS}]
    if len(kinds) < len(alternatives) or not all(isinstance(kind, str) and kind in _WORDS for kind in kinds):
        return ""
    return " | ".join(_WORDS[str(kind)] for kind in dict.fromkeys(kinds))
