"""Defines the request of `/v1/responses`, and turns it into a chat request (`chat_of_responses`).

Weft keeps no responses: each request carries its whole conversation. `place_in_request` maps the places of errors in
the chat back to the places in the request. The module checks shapes only; `check_chat` and the rest of the chat's path
check what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator

from fabric.contracts import InvalidRequest
from router.api.chat_request import ChatRequest, MediaKwargs, ReasoningEffort, Verbosity, check_chat
from router.api.field_errors import shown
from router.api.generation_fields import MAX_TOP_LOGPROBS, GenerationFields, refuse_unsupported
from router.api.request_body import parse_body, read_fields
from router.api.tool_fields import RESPONSES_FORMS, explained_choice

LOGPROBS = "message.output_text.logprobs"
"""Asks for log-probabilities, as an element of `include`."""
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""Is what OpenAI's clients may put into `include`."""
FORMATS = ("text", "json_object", "json_schema")
"""Are the types of `text.format`."""
_STATEFUL = ("previous_response_id", "conversation", "prompt")
_TEXT_TYPES = ("input_text", "output_text", "text")
_CHAT_PART_TYPES = ("image_url", "image_embeds", "video_url", "audio_url", "input_audio", "file")


class _LooseOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)


class ReasoningOptions(_LooseOptions):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Is tolerated: the whole reasoning is in the answer."""


class TextOptions(_LooseOptions):
    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None
    """Is tolerated: a hint that changes nothing."""


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
    include: Annotated[list[Includable] | None, FailFast()] = None
    """Asks for log-probabilities with `message.output_text.logprobs`. The other values ask for parts that no response
    has here, and change nothing."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    """Is tolerated: no item of the input is dropped. An input that does not fit is answered 400 with `auto` too, and
    the response says `disabled`."""
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
    chat_to_place: Mapping[str, str]
    """Maps fields of the chat to those of the request from which they come (see `place_in_request`)."""

    def place(self, text: str) -> str:
        """Returns the name of a field of the chat as the request has it."""
        return place_in_request(text, self.chat_to_place)


def place_in_request(param: str, chat_to_place: Mapping[str, str]) -> str:
    """Returns the name of a field of the chat as the request has it. The longest beginning of the name that the map has
    is replaced."""
    steps = param.split(".")
    for end in range(len(steps), 0, -1):
        place = chat_to_place.get(".".join(steps[:end]))
        if place is not None:
            return ".".join([place, *steps[end:]])
    return param


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
    conversation = _conversation(request)
    places = _places_of_options(request) | conversation.chat_to_place
    fields: dict[str, object] = {
        name: value for name in GenerationFields.model_fields if (value := getattr(request, name)) is not None
    }
    fields |= {"messages": conversation.messages} | _options(request)
    try:
        chat = read_fields(ChatRequest, fields)
        check_chat(chat)
    except InvalidRequest as error:
        raise _in_request(error, places) from None
    return ResponsesChat(request, chat, places)


def _in_request(error: InvalidRequest, places: Mapping[str, str]) -> InvalidRequest:
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


def _places_of_options(request: ResponsesRequest) -> dict[str, str]:
    """Maps the fields of `_options` to those of the request from which they come."""
    places = {"messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
    places |= {f"tools.{index}.function": f"tools.{index}" for index in range(len(request.tools or ()))}
    if request.text is not None and request.text.format is not None:
        places |= dict.fromkeys(("response_format", "response_format.json_schema"), "text.format")
    return places


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = None if request.text is None else request.text.format
    if form is None:
        return request.response_format
    if request.response_format is not None:
        message = "`text.format` and `response_format` exclude each other; send one of them"
        raise InvalidRequest(message, param="response_format")
    if form.get("type") not in FORMATS:
        known = "`text`, `json_object` or `json_schema`"
        message = f"`text.format.type` must be {known}, not {shown(form.get('type'))}"
        raise InvalidRequest(message, param="text.format.type")
    if form["type"] != "json_schema":
        return form
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
    """Collects the messages of a chat, and the fields of the request from which they come."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.chat_to_place: dict[str, str] = {}
        self._reasoning = ""

    def add(self, message: dict[str, Any], place: str) -> None:
        """Adds a message that comes from the field `place`."""
        if self._reasoning and message["role"] == "assistant":
            message = {"reasoning_content": self._reasoning} | message
        self._reasoning = ""
        self.chat_to_place[f"messages.{len(self.messages)}"] = place
        self.messages.append(message)

    def add_reasoning(self, text: str) -> None:
        """Adds what the assistant thought before its next message."""
        self._reasoning += text

    def add_call(self, call: dict[str, Any], place: str) -> None:
        """Adds a call to the assistant's latest message, or as a message of its own."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": None}, place)
        calls = self.messages[-1].setdefault("tool_calls", [])
        path = f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}"
        self.chat_to_place |= dict.fromkeys((path, f"{path}.function"), place)
        calls.append(call)

    def content(self, content: object, place: str) -> object:
        """Returns what the field `place` holds as the content of the next message."""
        path = f"messages.{len(self.messages)}.content"
        self.chat_to_place[path] = place
        if not isinstance(content, list):
            return content
        return [self._part(part, f"{path}.{index}", f"{place}.{index}") for index, part in enumerate(content)]

    def _part(self, part: object, path: str, place: str) -> Mapping[str, Any]:
        if not isinstance(part, Mapping):
            raise InvalidRequest(f"a content part must be an object, not {shown(part)}", param=place)
        kind = part.get("type")
        if kind in _TEXT_TYPES:
            if not isinstance(part.get("text"), str):
                message = f"a part of the type `{kind}` needs a string under `text`, not {shown(part.get('text'))}"
                raise InvalidRequest(message, param=place)
            return {"type": "text", "text": part["text"]}
        if kind == "refusal" or kind in _CHAT_PART_TYPES:
            return part
        if kind == "input_image":
            self.chat_to_place |= {f"{path}.image_url": place, f"{path}.image_url.url": f"{place}.image_url"}
            return _image_part(part, place)
        if kind == "input_file":
            self.chat_to_place[f"{path}.file"] = place
            names = ("file_data", "file_url", "file_id", "filename")
            return _named(part) | {"type": "file", "file": {key: part[key] for key in names if part.get(key)}}
        known = ", ".join(("input_text", "input_image", "input_file", *_CHAT_PART_TYPES))
        raise InvalidRequest(f"the content part type {shown(kind)} is unknown; known types are {known}", param=place)


def _image_part(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns a picture in the form of a chat. It may have only the name of one that was sent before."""
    url = part.get("image_url")
    if url is None and (part.get("file_id") or part.get("uuid") is None):
        raise InvalidRequest("`image_url` is required; this server keeps no files", param=f"{place}.image_url")
    described = {"detail": part.get("detail"), "url": url}
    content = {key: value for key, value in described.items() if value is not None}
    return _named(part) | {"type": "image_url", "image_url": content}


def _named(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: part[key] for key in ("uuid",) if key in part}


def _conversation(request: ResponsesRequest) -> _Conversation:
    conversation = _Conversation()
    if request.instructions:
        content = conversation.content(request.instructions, "instructions")
        conversation.add({"role": "system", "content": content}, "instructions")
    if isinstance(request.input, str):
        conversation.add({"role": "user", "content": conversation.content(request.input, "input")}, "input")
    else:
        for index, item in enumerate(request.input):
            _add_item(conversation, item, f"input.{index}")
    if not conversation.messages:
        raise InvalidRequest("`input` must have at least one item", param="input")
    return conversation


def _add_item(conversation: _Conversation, item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        content = conversation.content(item.get("content"), f"{place}.content")
        conversation.add({"role": item.get("role"), "content": content}, place)
    elif kind == "function_call":
        function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
        conversation.add_call({"id": _text(item, "call_id", place), "type": "function", "function": function}, place)
    elif kind == "function_call_output":
        call_id = _text(item, "call_id", place)
        content = conversation.content(item.get("output"), f"{place}.output")
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
