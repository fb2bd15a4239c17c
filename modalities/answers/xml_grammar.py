"""Writes the grammar of Qwen3-Coder's calls, whose arguments stand in tags and whose strings have no quotes.

A parameter that can only be a string becomes a regular expression: its `enum`, `const`, `minLength`, `maxLength` and
`pattern` hold, and it does not contain the tag that ends it. Every other parameter is JSON of its schema. Parameters
come in the order of the schema. The module knows nothing of parsing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from fabric.contracts import InvalidRequest
from modalities.answers.call_grammars import json_value, literal
from modalities.answers.parameter_types import VALUE_END, ParameterTypes
from modalities.answers.pieces import ToolSpec

DESCRIPTIONS = ("$comment", "$id", "$schema", "default", "description", "examples", "strict", "title")
ROOT_KEYWORDS = frozenset(
    {*DESCRIPTIONS, "$defs", "additionalProperties", "definitions", "properties", "required", "type"}
)
"""These keywords of a tool's parameters can be kept; others would bind several parameters together."""
_WITHOUT_END = "~/(?s:.*)<\\/parameter>(?s:.*)/"


def call_body_rules(tools: Sequence[ToolSpec], closing: str, is_strict: bool) -> str:
    """Returns the rule `call_body`, from behind the opening marker to `closing`, and the rules that it needs. If
    `is_strict`, it raises InvalidRequest for parameters of which the grammar can't ensure the schema."""
    rules = f"call_body: WS? ({' | '.join(f'tool_{index}' for index in range(len(tools)))}) WS? {closing}\n"
    for index, tool in enumerate(tools):
        if is_strict:
            check_parameters(tool)
        rules += "".join(_tool_rules(tool, f"{index}"))
    return rules


def check_parameters(tool: ToolSpec) -> None:
    """Raises InvalidRequest for a tool whose parameters depend on each other, which no grammar of single parameters can
    ensure."""
    if others := sorted(tool.parameters.keys() - ROOT_KEYWORDS):
        message = (
            f"the parameters of the tool `{tool.name}` have `{others[0]}` at the top, which this model's form of calls "
            "can't ensure; use `properties` and `required`, or the tool choice `auto`"
        )
        raise InvalidRequest(message, param="tools")


def _tool_rules(tool: ToolSpec, suffix: str) -> Iterator[str]:
    types = ParameterTypes(tool.parameters)
    required = tool.parameters.get("required")
    needed = [str(key) for key in required] if isinstance(required, list) else []
    key_to_schema = {**types.properties, **{key: {} for key in needed if key not in types.properties}}
    places = [f"parameter_{suffix}_{index}{'' if key in needed else '?'}" for index, key in enumerate(key_to_schema)]
    yield f'tool_{suffix}: {literal(f"<function={tool.name}>")} "\\n" {" ".join(places)} "</function>"\n'
    for index, (key, schema) in enumerate(key_to_schema.items()):
        place = f"{suffix}_{index}"
        if ">" in key or "<" in key or "\n" in key or key != key.strip() or not key:
            message = f"a parameter of the tool `{tool.name}` has the name {json.dumps(key)}, which must not have "
            raise InvalidRequest(message + "`<`, `>` or whitespace around it", param="tools")
        opening = literal(f"<parameter={key}>\n")
        if types.is_text(key):
            yield f'parameter_{place}: {opening} VALUE_{place} "\\n"\n'
            texts = " | ".join(f"({_text(one, tool.name)})" for one in types.alternatives(schema))
            yield f"TEXT_{place}: ({texts}) & {_WITHOUT_END}\n"
            yield f"VALUE_{place}: TEXT_{place} {literal(chr(10) + VALUE_END)}\n"
        else:
            yield f'parameter_{place}: {opening} json_{place} WS? {literal(VALUE_END)} "\\n"\n'
            yield f"json_{place}: {json_value(with_definitions(schema, tool.parameters))}\n"


def with_definitions(schema: object, root: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the schema of a parameter with the definitions of its tool, to which it may refer."""
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**definitions, **(schema if isinstance(schema, Mapping) else {})}


def _text(schema: Mapping[str, object], tool_name: str) -> str:
    """Returns a terminal for the strings, and null, of a schema without references and unions."""
    types = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return " | ".join(literal("null" if value is None else str(value)) for value in values)
    if types == "null":
        return literal("null")
    low, high = (_length(schema.get(name)) for name in ("minLength", "maxLength"))
    terminal = "/(?s:.*)/" if low is None and high is None else f"/(?s:.{{{low or 0},{'' if high is None else high}}})/"
    if "pattern" in schema:
        terminal += f" & /{_searched(str(schema['pattern']), tool_name)}/"
    return f'({terminal}) | "null"' if isinstance(types, list) and "null" in types else terminal


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _searched(pattern: str, tool_name: str) -> str:
    """Returns a regular expression for whole strings in which `pattern` is found."""
    is_left, is_right = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if "|" in pattern and (is_left or is_right):
        message = f"a pattern of the tool `{tool_name}` has both `|` and an anchor, which this model's form of calls "
        raise InvalidRequest(message + "can't ensure", param="tools")
    inner = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    inner = inner[is_left : len(inner) - is_right]
    return f"{'' if is_left else '(?s:.*)'}({inner}){'' if is_right else '(?s:.*)'}"
