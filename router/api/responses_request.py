"""Defines the request of `/v1/responses`, and turns it into a chat request (`chat_of_responses`).

Weft keeps no responses: each request carries its whole conversation. `places_of_input` maps the places of errors in the
chat back to the places in the request. The module checks shapes only; `check_chat` and the rest of the chat's path
check what the fields mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fabric.contracts import InvalidRequest
from router.api.chat_request import ChatRequest, MediaKwargs, ReasoningEffort, check_chat
from router.api.field_errors import shown
from router.api.generation_fields import MAX_TOP_LOGPROBS, GenerationFields, refuse_unsupported
from router.api.request_body import parse_body, read_fields
from router.api.tool_fields import RESPONSES_FORMS, explained_choice

LOGPROBS = "message.output_text.logprobs"
"""Asks for log-probabilities, as an element of `include`."""
_STATEFUL = ("previous_response_id", "conversation", "prompt")
_TEXT_TYPES = ("input_text", "output_text", "text")
_CHAT_PART_TYPES = ("image_url", "image_embeds", "video_url", "audio_url", "input_audio", "file")


class _LooseOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)


class ReasoningOptions(_LooseOptions):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    """Is tolerated: the whole reasoning is in the answer."""


class TextOptions(_LooseOptions):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(GenerationFields):
    """A `ResponsesRequest` holds the parameters of a response that Weft honours, and those of `GenerationFields` as
    extensions."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[str | dict[str, Any], explained_choice(RESPONSES_FORMS)] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    store: bool | None = None
    """Is tolerated: no response is kept."""
    mm_processor_kwargs: MediaKwargs | None = None
    on_encode_failure: Literal["error", "reduce", "text_only"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, value: object) -> object:
        """Checks the input before the union of its types is tried, whose errors would name every type."""
        if not isinstance(value, str | list):
            raise ValueError(f"`input` must be a string or a list of items, not {shown(value)}")
        wrong = next((item for item in value if not isinstance(item, dict)), None) if isinstance(value, list) else None
        if wrong is not None:
            raise ValueError(f"an item of `input` must be an object, not {shown(wrong)}")
        return value


class ResponsesChat(NamedTuple):
    """A `ResponsesChat` is a chat that a request for a response asks for."""

    request: ResponsesRequest
    chat: ChatRequest
    message_to_place: tuple[str, ...]
    """Holds, for each message of the chat, the field of the request from which it comes."""

    def place(self, text: str) -> str:
        """Returns the name of a field of the chat as the request has it."""
        return place_in_request(text, self.message_to_place)


FIELD_TO_NAME = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.type": "text.format.type",
}
"""Maps fields of a chat to those of a request for a response."""


def place_in_request(param: str, message_to_place: Sequence[str]) -> str:
    """Returns the name of a field of the chat as the request has it."""
    if param in FIELD_TO_NAME:
        return FIELD_TO_NAME[param]
    tool = re.fullmatch(r"(tools\.\d+)\.function(.*)", param, re.DOTALL)
    if tool is not None:
        return tool[1] + tool[2]
    message = re.match(r"messages\.(\d+)", param)
    if message is None or int(message[1]) >= len(message_to_place):
        return param
    return message_to_place[int(message[1])] + param[message.end() :]


def parse_responses(body: bytes) -> ResponsesChat:
    """Parses and checks the body of a request. Raises InvalidRequest, whose `param` names the first offending field."""
    request = parse_body(ResponsesRequest, body)
    extra = request.model_extra or {}
    refuse_unsupported(extra)
    for name in _STATEFUL:
        if extra.get(name) is not None:
            message = f"`{name}` is not supported by this server, which keeps no responses; send the whole conversation"
            raise InvalidRequest(message, param=name)
    if request.background:
        raise InvalidRequest("`background` is not supported by this server", param="background")
    if request.num_choices > 1:
        raise InvalidRequest(f"a response has one choice, so `n` must be 1, not {request.n}", param="n")
    messages, places = _messages(request)
    fields: dict[str, object] = {
        name: value for name in GenerationFields.model_fields if (value := getattr(request, name)) is not None
    }
    fields |= {"messages": messages} | _options(request)
    try:
        chat = read_fields(ChatRequest, fields)
        check_chat(chat)
    except InvalidRequest as error:
        raise _in_request(error, places) from None
    return ResponsesChat(request, chat, places)


def _in_request(error: InvalidRequest, places: Sequence[str]) -> InvalidRequest:
    if error.param is None:
        return error
    param = place_in_request(error.param, places)
    return InvalidRequest(error.message.replace(error.param, param), param=param)


def _options(request: ResponsesRequest) -> dict[str, object]:
    """Returns the fields of the chat that have another name or another form in the request."""
    wants_logprobs = request.top_logprobs is not None or LOGPROBS in (request.include or ())
    options: dict[str, object] = {
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "logprobs": wants_logprobs or None,
        "top_logprobs": request.top_logprobs,
        "mm_processor_kwargs": request.mm_processor_kwargs,
        "on_encode_failure": request.on_encode_failure,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    return {name: value for name, value in options.items() if value is not None}


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = None if request.text is None else request.text.format
    if form is None or form.get("type") != "json_schema":
        return request.response_format if form is None else form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def _tool(tool: Mapping[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"the only type of tools that this server has is `function`, not {shown(tool.get('type'))}"
        raise InvalidRequest(message, param=f"{param}.type")
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"`{param}.name` must be a string, not {shown(tool.get('name'))}", param=f"{param}.name")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> object:
    if choice is None or isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    named = [_tool_choice(each) for each in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": named}}


# ------------------------------------------------------------ the conversation


class _Conversation:
    """Collects the messages of a chat, and the place in the request from which each comes."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._reasoning = ""

    def add(self, message: dict[str, Any], place: str) -> None:
        if self._reasoning and message["role"] == "assistant":
            message = {"reasoning_content": self._reasoning} | message
        self._reasoning = ""
        self.messages.append(message)
        self.places.append(place)

    def add_reasoning(self, text: str) -> None:
        """Adds what the assistant thought before its next message."""
        self._reasoning += text

    def add_call(self, call: dict[str, Any], place: str) -> None:
        """Adds a call to the assistant's latest message, or as a message of its own."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": None}, place)
        self.messages[-1].setdefault("tool_calls", []).append(call)


def _messages(request: ResponsesRequest) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the messages of the chat, and the place in the request of each."""
    conversation = _Conversation()
    if request.instructions:
        conversation.add({"role": "system", "content": request.instructions}, "instructions")
    if isinstance(request.input, str):
        conversation.add({"role": "user", "content": request.input}, "input")
    else:
        for index, item in enumerate(request.input):
            _add_item(conversation, item, f"input.{index}")
    if not conversation.messages:
        raise InvalidRequest("`input` must have at least one item", param="input")
    return conversation.messages, tuple(conversation.places)


def _add_item(conversation: _Conversation, item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        conversation.add({"role": item.get("role"), "content": _content(item.get("content"), place)}, place)
    elif kind == "function_call":
        function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
        conversation.add_call({"id": _text(item, "call_id", place), "type": "function", "function": function}, place)
    elif kind == "function_call_output":
        content = _content(item.get("output"), place, "output")
        call_id = _text(item, "call_id", place)
        conversation.add({"role": "tool", "tool_call_id": call_id, "content": content}, place)
    elif kind == "reasoning":
        parts = item.get("content") or []
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        conversation.add_reasoning("".join(text for text in texts if isinstance(text, str)))
    else:
        known = "`message`, `function_call`, `function_call_output` or `reasoning`"
        message = f"the type of an item of `input` must be {known}, not {shown(kind)}"
        raise InvalidRequest(message, param=f"{place}.type")


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"`{place}.{name}` must be a string, not {shown(value)}", param=f"{place}.{name}")
    return value


def _content(content: object, place: str, name: str = "content") -> object:
    """Returns the content of a message in the form of a chat."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    return [_part(part, f"{place}.{name}.{index}") for index, part in enumerate(content)]


def _part(part: object, place: str) -> object:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"a content part must be an object, not {shown(part)}", param=place)
    kind = part.get("type")
    if kind in _TEXT_TYPES:
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal" or kind in _CHAT_PART_TYPES:
        return part
    named = {key: part[key] for key in ("uuid",) if key in part}
    if kind == "input_image":
        if part.get("image_url") is None:
            raise InvalidRequest("`image_url` is required; this server keeps no files", param=f"{place}.image_url")
        return named | {
            "type": "image_url",
            "image_url": {key: part[key] for key in ("detail",) if part.get(key)} | {"url": part["image_url"]},
        }
    if kind == "input_file":
        file = {key: part[key] for key in ("file_data", "file_url", "file_id", "filename") if part.get(key)}
        return named | {"type": "file", "file": file}
    known = ", ".join(("input_text", "input_image", "input_file", *_CHAT_PART_TYPES))
    raise InvalidRequest(f"the content part type {shown(kind)} is unknown; known types are {known}", param=place)
