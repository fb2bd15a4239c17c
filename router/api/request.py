"""Defines the chat completions request as OpenAI's clients send it, and checks its shape and the parameters that Weft
can't honour.

Unknown fields are tolerated and listed (`ignored_fields`). The intake checks an operator's limits, the model's name and
the media.
"""

from __future__ import annotations

import heapq
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator

from fabric.errors import InvalidRequest
from router.api.body_shape import check_shape
from router.api.media_options import MediaKwargs, check_media_kwargs
from router.api.refusals import refuse_unsupported

INT64_MAX = 2**63 - 1
MAX_BIASED_TOKENS = 1024
"""Limits the work per step; OpenAI takes 300."""
MAX_LISTED_FIELDS = 64
Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(BaseModel):
    """A `ChatMessage` is one message of the request. `api.content` reads `content` and names the offending part."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Role
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A `ChatRequest` holds the parameters that Weft honours. Names and bounds are OpenAI's, and vLLM's where OpenAI
    has none. Validation of a list stops at its first flaw: the client gets only that one, and a list may have tens of
    thousands."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    model: str
    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT64_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_BIASED_TOKENS)
    """Maps token ids to biases; the ids are strings because they are JSON keys."""
    seed: int | None = Field(None, ge=-(2**63), le=INT64_MAX)
    stop: Annotated[list[str] | None, FailFast()] = None
    stop_token_ids: Annotated[list[int] | None, FailFast()] = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """A request with a lower number is served first, as in vLLM."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, max_length=256)
    user: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """This is vLLM's parameter: one of `json`, `regex`, `choice`, `json_object`."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, FailFast()] = None
    mm_processor_kwargs: MediaKwargs | None = None
    """This is vLLM's parameter: it says how the request's videos are sampled."""
    on_encode_failure: Literal["error", "reduce", "text_only"] | None = None
    """Says what happens to the request if a medium can't be encoded; the deployment sets the default."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool | None = None
    """This is vLLM's extension: it adds `prompt_token_ids` next to the choices, and `token_ids` in each choice (in each
    chunk, when streamed)."""

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def token_limit(self) -> int | None:
        """Returns the limit of generated tokens; the newer name `max_completion_tokens` wins over `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def is_structured(self) -> bool:
        """Tells whether the output may have to match something (see `router.structured`)."""
        asked = (self.response_format, self.structured_outputs, self.guided_json, self.guided_regex, self.guided_choice)
        return any(each is not None for each in asked)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def ignored_fields(self) -> list[str]:
        """Returns the fields that were sent and change nothing here, sorted. If there are very many, it returns the
        first of them and how many more there are. The list is kept with the request's trace."""
        names = self.model_extra or {}
        listed = [_quoted(name) for name in heapq.nsmallest(MAX_LISTED_FIELDS, names)]
        num_more = len(names) - len(listed)
        return [*listed, f"and {num_more} more"] if num_more else listed


def parse_chat(body: bytes) -> ChatRequest:
    """Parses and checks the body of a request. Raises InvalidRequest, whose `param` names the first offending field; it
    also refuses, and never ignores, a parameter that would change the output and is not supported."""
    check_shape(body)
    try:
        chat = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    refuse_unsupported(chat.model_extra or {})
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if chat.mm_processor_kwargs is not None:
        check_media_kwargs(chat.mm_processor_kwargs)
    return chat


def _refusal(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']}")
    param = ".".join(map(_quoted, first["loc"])) or None
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{param} is not supported by this server", param=param)
    subject = "the body" if param is None else param
    return InvalidRequest(f"{subject}: {first['msg']}", param=param)


def _quoted(step: int | str) -> str:
    """Returns one step of a path in the body. A key that a client made up is escaped, because it must not look like a
    line of a log."""
    if isinstance(step, int) or re.fullmatch(r"[\w-]{1,64}", step) is not None:
        return str(step)
    return repr(step[:64])
