"""Defines how clients name tools: the tools of a request, which of them the model may or must call, and the calls that
earlier messages made.

`check_tools` checks them against each other. The module knows nothing of how a model writes a call
(`modalities.answers`), nor of what the schemas of arguments mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from fabric.contracts import InvalidRequest
from router.api.field_errors import shown
from router.api.request_body import read_fields

MAX_TOOLS = 128
"""Limits the tools of a request, as OpenAI does."""
MAX_TOOL_NAME_CHARS = 64
TOOL_NAME = f"^[a-zA-Z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}$"
"""Matches the name of a tool, as OpenAI names tools; the dot is an extension that MCP clients use."""
ToolName = Annotated[str, Field(pattern=TOOL_NAME)]


class _Tolerant(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)


class FunctionDefinition(_Tolerant):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """This is the JSON schema of the arguments, which are an object. Without one, the function has no arguments. An
    object that names its properties gets no others, unless `additionalProperties` says so."""
    strict: bool | None = None
    """Is tolerated: the arguments of a call always fit the schema."""


class FunctionTool(_Tolerant):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Tolerant):
    name: ToolName


class NamedTool(_Tolerant):
    """A `NamedTool` demands a call of one tool."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(_Tolerant):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FailFast(), Field(min_length=1)]


class AllowedToolsChoice(_Tolerant):
    """An `AllowedToolsChoice` lets the model call some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class NamedToolOfResponse(_Tolerant):
    """A `NamedToolOfResponse` is what `/v1/responses` takes as a `NamedTool`."""

    type: Literal["function"]
    name: ToolName


class AllowedToolsOfResponse(_Tolerant):
    """An `AllowedToolsOfResponse` is what `/v1/responses` takes as an `AllowedToolsChoice`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolOfResponse], FailFast(), Field(min_length=1)]


class ChoiceForm(NamedTuple):
    """A `ChoiceForm` is a form that a `tool_choice` may have as an object."""

    kind: type[BaseModel]
    example: str


CHAT_FORMS = {
    "function": ChoiceForm(NamedTool, '`{"type": "function", "function": {"name": "NAME"}}`'),
    "allowed_tools": ChoiceForm(
        AllowedToolsChoice,
        '`{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function":'
        ' {"name": "NAME"}}]}}`',
    ),
}
RESPONSES_FORMS = {
    "function": ChoiceForm(NamedToolOfResponse, '`{"type": "function", "name": "NAME"}`'),
    "allowed_tools": ChoiceForm(
        AllowedToolsOfResponse,
        '`{"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "NAME"}]}`',
    ),
}
"""Maps each type of an object under `tool_choice` of a response to its form; `CHAT_FORMS` does so for a chat."""
ChoiceWord = Literal["none", "auto", "required"]


def explained_choice(type_to_form: Mapping[str, ChoiceForm]) -> BeforeValidator:
    """Returns the check of a `tool_choice` that comes before the union of its types is tried: its message names the
    accepted forms, where the errors of the union would name each of pydantic's types."""

    def check(choice: object) -> object:
        flaw = flaw_of_choice(choice, type_to_form)
        if flaw is not None:
            raise ValueError(flaw)
        return choice

    return BeforeValidator(check)


def flaw_of_choice(choice: object, type_to_form: Mapping[str, ChoiceForm]) -> str | None:
    """Returns what is wrong with a `tool_choice`, or None if nothing is."""
    if choice is None or (isinstance(choice, str) and choice in get_args(ChoiceWord)):
        return None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    form = type_to_form.get(kind) if isinstance(kind, str) else None
    if form is None or not isinstance(choice, Mapping):
        examples = " or ".join(each.example for each in type_to_form.values())
        given = f"an object with the `type` {shown(kind)}" if isinstance(choice, Mapping) else shown(choice)
        return f"`tool_choice` can't be {given}; it is `none`, `auto` or `required`, or an object such as {examples}"
    try:
        read_fields(form.kind, choice)
    except InvalidRequest as error:
        return f"a `tool_choice` of the type `{kind}` must be like {form.example}, in which {error.message}"
    return None


ToolChoiceField = Annotated[ChoiceWord | NamedTool | AllowedToolsChoice, explained_choice(CHAT_FORMS)]


class CalledFunction(_Tolerant):
    name: str
    arguments: str = ""
    """This is JSON as a model wrote it, so it may be broken."""


class ToolCall(_Tolerant):
    """A `ToolCall` is a call that an assistant's message made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


def check_tools(tools: Sequence[FunctionTool], choice: ToolChoiceField | None) -> None:
    """Raises InvalidRequest for too many tools, for two tools of one name, and for a choice of a tool that is not
    among them."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"a request may have at most {MAX_TOOLS} tools, not {len(tools)}", param="tools")
    names = Counter(tool.function.name for tool in tools)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise InvalidRequest(f"two tools have the name `{twice}`, but each name must be unique", param="tools")
    wanted = chosen_names(choice)
    unknown = next((name for name in wanted if name not in names), None)
    if unknown is not None:
        message = f"`tool_choice` names the tool `{unknown}`, which is not among the tools"
        raise InvalidRequest(message, param="tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest("`tool_choice` is `required`, but the request has no tools", param="tool_choice")


def chosen_names(choice: ToolChoiceField | None) -> tuple[str, ...]:
    """Returns the names of the tools that a choice names; none if it names none."""
    if isinstance(choice, NamedTool):
        return (choice.function.name,)
    if isinstance(choice, AllowedToolsChoice):
        return tuple(each.function.name for each in choice.allowed_tools.tools)
    return ()
