"""Decides how the answer to a chat is constrained and read: which tools the model may call, in which format it writes
calls and reasoning, and what the grammar of its output is.

`AnswerFormats` holds what a model's chat template says about both. For each chat it returns an `AnswerPlan`, from which
the prompt (`template_variables`, `tool_messages`), the grammar and the parser of each choice follow. The formats
themselves are those of `modalities.answers`. The module knows nothing of HTTP or of media.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fabric.contracts import InvalidRequest
from modalities.answers import (
    AnswerParser,
    ReasoningFormat,
    ToolChoice,
    ToolFormat,
    ToolSpec,
    after_reasoning,
    answer_parser,
    arguments_grammar,
    find_reasoning_format,
    find_tool_format,
    template_takes_tools,
)
from modalities.text import TextCodec
from router.api import ChatRequest, chosen_names, shown
from router.prompt.generation_options import Grammar, check_grammar, check_schema
from router.router_config import GrammarLimits

_CALL_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """An `AnswerPlan` says how one chat's answer is written and read."""

    tools: ToolFormat | None
    """Is the format of calls; None if the model may not call tools."""
    specs: tuple[ToolSpec, ...]
    """Holds all tools of the request. The prompt names them even if `choice` forbids calls."""
    callable_specs: tuple[ToolSpec, ...]
    choice: ToolChoice
    are_parallel: bool
    reasoning: ReasoningFormat | None
    begins_inside: bool
    """Says whether the prompt ends inside the reasoning."""

    @property
    def is_plain(self) -> bool:
        """Tells whether the answer is text alone."""
        return self.tools is None and self.reasoning is None

    def parser(self) -> AnswerParser:
        """Returns a parser for one choice."""
        must_call = self.choice.kind in ("required", "named")
        return answer_parser(self.reasoning, self.tools, self.callable_specs, self.begins_inside, must_call)

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Returns the control tokens whose text the parser must see."""
        formats = [each.special_tokens for each in (self.tools, self.reasoning) if each is not None]
        return tuple(token for tokens in formats for token in tokens)


PLAIN = AnswerPlan(None, (), (), ToolChoice("none"), False, None, False)
"""Is the plan of every answer that is text alone."""


class AnswerFormats:
    """An `AnswerFormats` holds the formats of one model. It has no state."""

    def __init__(self, codec: TextCodec, tool_format: str = "auto", reads_reasoning: bool = True) -> None:
        """Takes the name of the format of calls, or `auto` for what the chat template writes; `reads_reasoning` says
        whether reasoning is told apart from text. Raises ConfigError for an unknown format."""
        source = codec.template_source
        self._codec = codec
        self.tools = find_tool_format(tool_format, source)
        self.takes_tools = template_takes_tools(source)
        special = [text for text in map(codec.token_text, codec.special_token_ids) if text is not None]
        self.reasoning = find_reasoning_format(source, special) if reads_reasoning else None

    def plan(self, chat: ChatRequest) -> AnswerPlan:
        """Returns the plan of a chat. Renders a short conversation if the model reasons, because the chat's own
        variables decide whether a prompt ends inside the reasoning. Raises InvalidRequest."""
        specs = tuple(
            ToolSpec(tool.function.name, tool.function.description or "", tool.function.parameters or {})
            for tool in chat.tools or ()
        )
        choice = tool_choice(chat) if specs else ToolChoice("none")
        reasoning = self._reasoning(chat)
        if not specs and reasoning is None:
            return PLAIN
        names = chosen_names(chat.tool_choice) or [spec.name for spec in specs]
        return AnswerPlan(
            tools=None if choice.kind == "none" else self.tools,
            specs=specs,
            callable_specs=tuple(spec for spec in specs if spec.name in names),
            choice=choice,
            are_parallel=chat.parallel_tool_calls is not False,
            reasoning=reasoning,
            begins_inside=reasoning is not None and self._begins_inside(chat, reasoning),
        )

    def grammar(self, plan: AnswerPlan, response_grammar: str) -> str:
        """Returns the grammar of an answer; it is empty if any text is allowed. `response_grammar` is what the client
        asked of the text itself, which a call of a tool replaces. Raises InvalidRequest."""
        grammar, ids = response_grammar, self._special_token_ids(plan)
        if plan.tools is not None:
            is_free = plan.choice.kind == "auto"
            choice = ToolChoice("required") if is_free and response_grammar else plan.choice
            calls = plan.tools.grammar(plan.callable_specs, choice, plan.are_parallel, ids)
            grammar = either(calls, response_grammar) if is_free and response_grammar else calls
        if plan.reasoning is not None and grammar:
            grammar = after_reasoning(grammar, plan.reasoning, plan.begins_inside, ids)
        return grammar

    def checked_grammar(self, plan: AnswerPlan, response: Grammar, limits: GrammarLimits) -> str:
        """Returns the grammar of an answer, which was compiled once. May take half a second. Raises InvalidRequest,
        which names the tool whose schema can't be used."""
        grammar = self.grammar(plan, response.text)
        try:
            check_grammar(grammar, response.param or "tools", limits)
        except InvalidRequest:
            for spec in plan.callable_specs if plan.tools is not None else ():
                check_grammar(arguments_grammar(spec), _parameters_place(plan.specs.index(spec)), limits)
            raise
        return grammar

    def shown_token_ids(self, plan: AnswerPlan) -> frozenset[int]:
        """Returns the ids of the control tokens whose text the parser must see."""
        return frozenset(self._special_token_ids(plan).values())

    def _special_token_ids(self, plan: AnswerPlan) -> dict[str, int]:
        found = {token: self._codec.token_id(token) for token in plan.shown_tokens}
        special = self._codec.special_token_ids
        return {token: token_id for token, token_id in found.items() if token_id is not None and token_id in special}

    def _reasoning(self, chat: ChatRequest) -> ReasoningFormat | None:
        """Returns the marks of the reasoning that may come; None if there can't be any. A message that is continued has
        its reasoning behind it if it has a text, unless that text ends inside the reasoning."""
        if self.reasoning is None or not chat.continues_text:
            return self.reasoning
        text = chat.final_text or ""
        return self.reasoning if not text.strip() or self.reasoning.is_open_in(text) else None

    def _begins_inside(self, chat: ChatRequest, reasoning: ReasoningFormat) -> bool:
        if not chat.begins_answer:
            return chat.continues_text and reasoning.is_open_in(chat.final_text or "")
        variables = template_variables(chat)
        prompt = self._codec.render([{"role": "user", "content": "x"}], template_kwargs=variables)
        return reasoning.is_open_after(self._codec.decode(prompt[-16:], skip_special_tokens=False))

    # ------------------------------------------------------------ the prompt

    def template_variables(self, chat: ChatRequest, plan: AnswerPlan) -> dict[str, object]:
        """Returns the variables of the chat template, the tools among them if the template reads them."""
        variables = template_variables(chat)
        if plan.specs and self.takes_tools:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in chat.tools or ()]
        return variables

    def tool_messages(self, messages: Sequence[dict[str, object]], plan: AnswerPlan) -> list[dict[str, object]]:
        """Returns the messages as the chat template takes them. A template that knows nothing of tools gets them as
        text: a system message tells of the tools, calls stand in the assistant's text, and results come from the
        user."""
        if self.takes_tools:
            return [dict(message) for message in messages]
        written = [_as_text(message) for message in messages]
        if not plan.specs:
            return written
        instructions = self.tools.instructions(plan.specs)
        if written and written[0]["role"] == "system" and isinstance(written[0]["content"], str):
            written[0]["content"] = f"{written[0]['content']}\n\n{instructions}"
            return written
        return [{"role": "system", "content": instructions}, *written]


def check_tools(chat: ChatRequest, limits: GrammarLimits) -> None:
    """Raises InvalidRequest for a tool whose schema is too large or too deep, or whose arguments are no object."""
    for index, tool in enumerate(chat.tools or ()):
        parameters, param = tool.function.parameters or {}, _parameters_place(index)
        check_schema(parameters, param, limits)
        kinds = parameters.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            message = (
                f"`{param}.type` must be `object`, because the arguments of a function are one, not {shown(kinds)}"
            )
            raise InvalidRequest(message, param=f"{param}.type")


def _parameters_place(index: int) -> str:
    return f"tools.{index}.function.parameters"


def new_call_id(tools: ToolFormat | None) -> str:
    """Returns a new id for a call. Mistral's templates take ids of nine letters and digits only."""
    if tools is not None and tools.name == "mistral":
        return "".join(secrets.choice(_CALL_ID_CHARS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def tool_choice(chat: ChatRequest) -> ToolChoice:
    """Returns which calls a chat with tools allows or demands; without a word it allows all."""
    names, choice = chosen_names(chat.tool_choice), chat.tool_choice
    if choice is None or isinstance(choice, str):
        return ToolChoice(choice or "auto")
    if choice.type == "function":
        return ToolChoice("named", names[0])
    return ToolChoice(choice.allowed_tools.mode)


def template_variables(chat: ChatRequest) -> dict[str, object]:
    """Returns the variables of the chat template that a chat sets."""
    variables: dict[str, object] = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", chat.reasoning_effort)
        if chat.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def called_arguments(text: str) -> object:
    """Returns the arguments of an earlier call as templates take them: as an object, or as they were written if they
    are broken."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def either(calls: str, response: str) -> str:
    """Returns a grammar that allows what either of two allows. `calls` is Lark, and `response` llguidance's JSON."""
    try:
        first, *others = json.loads(response)["grammars"]
    except (ValueError, KeyError) as error:
        raise InvalidRequest("structured output can't be combined with tools", param="tools") from error
    whole = {"name": "answer", "lark_grammar": "start: @calls | @response\n"}
    parts = [{"name": "calls", "lark_grammar": calls}, {**first, "name": "response"}, *others]
    return json.dumps({"grammars": [whole, *parts]})


def _as_text(message: Mapping[str, object]) -> dict[str, object]:
    """Returns a message without calls of tools and without the role `tool`."""
    written = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
        content = written["content"]
        text = "\n".join(texts)
        written["content"] = (
            [*content, {"type": "text", "text": f"\n{text}"}]
            if isinstance(content, list)
            else f"{content}\n{text}".lstrip()
        )
    if message["role"] == "tool":
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": str(content)}]
        before, after = ({"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>"))
        is_text = isinstance(content, str)
        framed = f"<tool_response>\n{content}\n</tool_response>" if is_text else [before, *parts, after]
        written |= {"role": "user", "content": framed}
    return written
