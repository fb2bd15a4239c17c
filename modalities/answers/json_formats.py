"""Reads and constrains the formats in which a call is JSON: those of Hermes, Llama 3 and Mistral.

Each class says at its head what a call looks like, and where this is documented. The module does not know which model
uses which format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from modalities.answers.call_grammars import (
    TERMINALS,
    arguments_rules,
    chosen_tools,
    json_call_rules,
    literal,
    marked_calls,
    marker_terminal,
)
from modalities.answers.json_calls import read_json_call, read_object
from modalities.answers.json_scanner import WHITESPACE
from modalities.answers.pieces import AnswerParser, PieceSink, ToolChoice, ToolSpec
from modalities.answers.text_source import Reading, StreamedParser, TextSource, read_calls_in_text


def tools_as_json(tools: Sequence[ToolSpec]) -> list[str]:
    """Returns each tool as OpenAI's API describes it, in JSON on one line."""
    return [json.dumps({"type": "function", "function": tool._asdict()}, ensure_ascii=False) for tool in tools]


@dataclass(frozen=True, slots=True)
class HermesFormat:
    """Writes `<tool_call>`, a JSON object with `name` and `arguments`, and `</tool_call>`, each on its own line.

    Nous Hermes, Qwen2.5 and Qwen3 write calls in this way (the chat templates of these models)."""

    name: str = "hermes"
    special_tokens: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, are_parallel: bool, special_token_ids: Mapping[str, int]
    ) -> str:
        chosen = chosen_tools(tools, choice)
        if not chosen:
            return ""
        opening, closing = self.special_tokens
        body = f"call_body: WS? json_call WS? {marker_terminal(closing, special_token_ids)}\n"
        rules = marked_calls(choice, are_parallel, opening, special_token_ids)
        return rules + body + json_call_rules(chosen, "arguments")

    def parser(self, tools: Sequence[ToolSpec]) -> AnswerParser:
        names = {tool.name for tool in tools}
        opening, closing = self.special_tokens

        def read(source: TextSource, sink: PieceSink) -> Reading[None]:
            def read_call() -> Reading[bool]:
                yield from source.skip_all(WHITESPACE)
                if not (yield from read_json_call(source, sink, names)):
                    return False
                return (yield from read_closing(source, closing))

            return read_calls_in_text(source, sink, opening, lambda: source.skip(opening), read_call)

        return StreamedParser(read)

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        lines = "\n".join(tools_as_json(tools))
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{lines}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )


def read_closing(source: TextSource, closing: str) -> Reading[bool]:
    """Reads whitespace and the marker that closes a call. If the marker is not there, what was read stays kept."""
    source.keep()
    yield from source.skip_all(WHITESPACE)
    if not (yield from source.skip(closing)):
        return False
    source.forget()
    return True


@dataclass(frozen=True, slots=True)
class Llama3Format:
    """Writes a JSON object with `name` and `parameters` as the whole answer, several with `; ` between them, and
    sometimes `<|python_tag|>` before the first.

    Llama 3.1, 3.2 and 3.3 write calls in this way (Meta's description of the prompt format, and the models' chat
    templates). Without the tag, a call is one only at the beginning of the answer."""

    name: str = "llama3"
    special_tokens: tuple[str, ...] = ("<|python_tag|>",)

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, are_parallel: bool, special_token_ids: Mapping[str, int]
    ) -> str:
        chosen = chosen_tools(tools, choice)
        if not chosen:
            return ""
        (tag,) = self.special_tokens
        more = ' (WS? ";" WS? json_call)*' if are_parallel else ""
        if choice.kind == "auto":
            tagged = f" | TEXT? {marker_terminal(tag, special_token_ids)} WS? json_call"
            first = f"call_head json_call_rest{tagged if tag in special_token_ids else ''}"
            head = 'call_head[lazy]: /[ \\n\\t]{0,40}\\{[ \\n\\t]{0,40}"name"/\n'
            rules = f"start: first_call{more} WS? | TEXT?\nfirst_call: {first}\n{head}"
        else:
            tagged = f"{marker_terminal(tag, special_token_ids)}? " if tag in special_token_ids else ""
            rules = f"start: {tagged}json_call{more}\n"
        return rules + TERMINALS + json_call_rules(chosen, "parameters")

    def parser(self, tools: Sequence[ToolSpec]) -> AnswerParser:
        names = {tool.name for tool in tools}
        (tag,) = self.special_tokens

        def read(source: TextSource, sink: PieceSink) -> Reading[None]:
            def read_opening() -> Reading[bool]:
                if sink.num_calls and (yield from source.skip(";")):
                    yield from source.skip_all(WHITESPACE)
                return (yield from source.peek()) == "{" or (yield from source.skip(tag))

            def read_call() -> Reading[bool]:
                yield from source.skip_all(WHITESPACE)
                return (yield from read_json_call(source, sink, names))

            return read_calls_in_text(source, sink, tag, read_opening, read_call)

        return StreamedParser(read)

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        return (
            "You have access to the following functions. To call a function, respond with JSON for a function call. "
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
            "Do not use variables.\n\n" + "\n\n".join(tools_as_json(tools))
        )


@dataclass(frozen=True, slots=True)
class MistralFormat:
    """Writes `[TOOL_CALLS]` and a JSON list of objects with `name` and `arguments`, or, if `has_args_token`, for each
    call `[TOOL_CALLS]`, the name, `[ARGS]` and the JSON of the arguments.

    Mistral's tokenizers write lists up to version 7 and names from version 11 on; some write `[CALL_ID]` and an id
    behind the name (mistral-common, and the models' chat templates). The parser reads all of these forms."""

    has_args_token: bool = False
    name: str = "mistral"
    special_tokens: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, are_parallel: bool, special_token_ids: Mapping[str, int]
    ) -> str:
        chosen = chosen_tools(tools, choice)
        if not chosen:
            return ""
        opening, args, call_id = self.special_tokens
        if not self.has_args_token:
            more = ' (WS? "," WS? json_call)*' if are_parallel else ""
            rules = marked_calls(choice, False, opening, special_token_ids)
            return rules + f'call_body: WS? "[" WS? json_call{more} WS? "]"\n' + json_call_rules(chosen, "arguments")
        has_id = call_id in special_token_ids
        between = f"({marker_terminal(call_id, special_token_ids)} CALL_ID)? " if has_id else ""
        between += marker_terminal(args, special_token_ids)
        bodies = (f"{literal(tool.name)} {between} WS? arguments_{index}" for index, tool in enumerate(chosen))
        rules = marked_calls(choice, are_parallel, opening, special_token_ids) + "call_body: " + " | ".join(bodies)
        return f"{rules}\n{'CALL_ID: /[a-zA-Z0-9]{9}/' if has_id else ''}\n{arguments_rules(chosen)}"

    def parser(self, tools: Sequence[ToolSpec]) -> AnswerParser:
        names = {tool.name for tool in tools}
        opening = self.special_tokens[0]

        def read(source: TextSource, sink: PieceSink) -> Reading[None]:
            def read_call() -> Reading[bool]:
                yield from source.skip_all(WHITESPACE)
                if (yield from source.peek()) == "[":
                    return (yield from _read_list(source, sink, names))
                return (yield from self._read_named(source, sink, names))

            return read_calls_in_text(source, sink, opening, lambda: source.skip(opening), read_call)

        return StreamedParser(read)

    def _read_named(self, source: TextSource, sink: PieceSink, names: Collection[str]) -> Reading[bool]:
        """Reads a name, an id that may be there, and the arguments. The token before the arguments may be missing."""
        _, args, call_id = self.special_tokens
        name = yield from _read_name(source, names)
        yield from source.skip_all(WHITESPACE)
        if (yield from source.skip("[")):
            if (yield from source.skip(call_id[1:])):
                yield from _read_up_to(source, "[{")
                if (yield from source.skip("[")) and not (yield from source.skip(args[1:])):
                    return False
            elif not (yield from source.skip(args[1:])):
                return False
            yield from source.skip_all(WHITESPACE)
        if name not in names or (yield from source.peek()) != "{":
            return False
        source.forget()
        sink.start_call(name)
        return (yield from read_object(source, sink.arguments))

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        form = (
            "name[ARGS]{arguments as a JSON object}" if self.has_args_token else '[{"name": ..., "arguments": {...}}]'
        )
        return (
            f"[AVAILABLE_TOOLS][{', '.join(tools_as_json(tools))}][/AVAILABLE_TOOLS]\n\n"
            f"To call functions, write [TOOL_CALLS]{form} and nothing else."
        )


def _read_name(source: TextSource, names: Collection[str]) -> Reading[str]:
    """Reads a name without whitespace, `[` or `{`, but no more characters than the longest of `names` has."""
    longest = max(map(len, names), default=0)
    parts: list[str] = []
    while len(parts) < longest and (char := (yield from source.peek())) and char not in WHITESPACE + "[{":
        parts.append(char)
        source.position += 1
    return "".join(parts)


def _read_up_to(source: TextSource, chars: str) -> Reading[None]:
    """Reads an id, up to the first of `chars`, of whitespace or the end."""
    while (char := (yield from source.peek())) and char not in chars + WHITESPACE:
        source.position += 1


def _read_list(source: TextSource, sink: PieceSink, names: Collection[str]) -> Reading[bool]:
    """Reads the list of calls. What follows the last good call is kept if it is neither another call nor the end."""
    yield from source.skip("[")
    while True:
        yield from source.skip_all(WHITESPACE)
        if not (yield from read_json_call(source, sink, names)):
            return False
        source.keep()
        yield from source.skip_all(WHITESPACE)
        if (yield from source.skip("]")):
            source.forget()
            return True
        if not (yield from source.skip(",")):
            return False
