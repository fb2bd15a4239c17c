"""Writes the parts of grammars that all formats share, in llguidance's Lark notation.

A grammar is text here; llguidance is not imported. Free text ends at a marker by a lazy lexeme if the marker is text,
and by the token itself if the marker is a special token, as in llguidance's structural tags. The module knows no
format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fabric.contracts import InvalidRequest
from modalities.answers.closed_schemas import closed_schema
from modalities.answers.pieces import ToolChoice, ToolSpec

JSON_WHITESPACE = r"(?: |\n[ \t]{0,8})"
"""This pattern is the whitespace between the tokens of JSON: a space, or a line break with some indentation. It is
bounded, so that a model can't write it until its token limit."""
TERMINALS = f"TEXT: /(.|\\n)*/\nWS: /{JSON_WHITESPACE}/\n"


def chosen_tools(tools: Sequence[ToolSpec], choice: ToolChoice) -> Sequence[ToolSpec]:
    """Returns the tools that the model may call. Raises InvalidRequest if the named one is not among them."""
    if choice.kind == "none":
        return ()
    if choice.kind != "named":
        return tools
    chosen = [tool for tool in tools if tool.name == choice.name]
    if not chosen:
        known = ", ".join(f"`{tool.name}`" for tool in tools)
        message = f"`tool_choice` must name one of the tools ({known}), not `{choice.name}`"
        raise InvalidRequest(message, param="tool_choice")
    return chosen


def literal(text: str) -> str:
    """Returns a terminal that matches exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def marker_terminal(marker: str, special_token_ids: Mapping[str, int]) -> str:
    """Returns what matches a marker: its token if it is a special one, otherwise its text."""
    return f"<[{special_token_ids[marker]}]>" if marker in special_token_ids else literal(marker)


def text_up_to(rule: str, marker: str, special_token_ids: Mapping[str, int]) -> str:
    """Returns a rule of this name that matches free text up to the first `marker`, and the marker."""
    if marker in special_token_ids:
        return f"{rule}: TEXT? {marker_terminal(marker, special_token_ids)}\n"
    return f"{rule}[lazy]: TEXT {literal(marker)}\n"


def json_value(schema: Mapping[str, object]) -> str:
    """Returns what matches JSON of this schema, closed. Clients may not set options of the library in it."""
    return "%json " + json.dumps({**closed_schema(schema), "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}})


def arguments_schema(tool: ToolSpec) -> dict[str, object]:
    """Returns the schema of a tool's arguments, which are always an object, whatever else its type may be."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"}


def arguments_grammar(tool: ToolSpec) -> str:
    """Returns a grammar of a tool's arguments alone, as JSON."""
    return f"start: {json_value(arguments_schema(tool))}\n"


def json_call_rules(tools: Sequence[ToolSpec], arguments_key: str) -> str:
    """Returns the rules `json_call`, a call as a JSON object, and `json_call_rest`, the same behind `{"name"`."""
    rules = 'json_call: "{" WS? "\\"name\\"" json_call_rest\n'
    rules += "json_call_rest: " + " | ".join(f"rest_{index}" for index in range(len(tools))) + "\n"
    for index, tool in enumerate(tools):
        name, key = literal(json.dumps(tool.name, ensure_ascii=False)), literal(f'"{arguments_key}"')
        rules += f'rest_{index}: WS? ":" WS? {name} WS? "," WS? {key} WS? ":" WS? arguments_{index} WS? "}}"\n'
    return rules + arguments_rules(tools)


def arguments_rules(tools: Sequence[ToolSpec]) -> str:
    """Returns a rule `arguments_N` for each tool, by its place in `tools`."""
    return "".join(f"arguments_{index}: {json_value(arguments_schema(tool))}\n" for index, tool in enumerate(tools))


def marked_calls(choice: ToolChoice, are_parallel: bool, marker: str, special_token_ids: Mapping[str, int]) -> str:
    """Returns the rules around `call_body`, which is what follows the marker of each call."""
    call = f"call: {marker_terminal(marker, special_token_ids)} call_body\n"
    if choice.kind != "auto":
        return f"start: call{' (WS? call)*' if are_parallel else ''}\n{call}{TERMINALS}"
    start = "start: text_call* TEXT?\n" if are_parallel else "start: text_call WS? | TEXT?\n"
    head = text_up_to("text_head", marker, special_token_ids)
    return f"{start}text_call: text_head call_body\n{head}{TERMINALS}"
