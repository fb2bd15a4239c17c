"""Defines the requests of `/tokenize` and `/detokenize`, in vLLM's format, and reads them.

The module does not know how many tokens anything becomes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, FailFast, Field

from fabric.contracts import InvalidRequest
from router.api.chat_request import ChatRequest, MediaKwargs, ReasoningEffort, check_chat
from router.api.completion_request import MAX_TOKEN_VALUES, CompletionRequest
from router.api.generation_fields import GenerationFields, refuse_unsupported
from router.api.request_body import parse_body, read_fields


class TokenizeRequest(BaseModel):
    """A `TokenizeRequest` has a prompt or messages, with the fields of a completion or of a chat that decide which
    tokens they become."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    mm_processor_kwargs: MediaKwargs | None = None

    def to_prompt_request(self, model_name: str) -> ChatRequest | CompletionRequest:
        """Returns the request whose prompt is asked for. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("a request must have either `prompt` or `messages`", param="prompt")
        named = {"model": model_name if self.model is None else self.model}
        if self.messages is None:
            return read_fields(CompletionRequest, self._fields_of(CompletionRequest) | named)
        chat = read_fields(ChatRequest, self._fields_of(ChatRequest) | named)
        check_chat(chat)
        return chat

    def _fields_of(self, kind: type[GenerationFields]) -> dict[str, object]:
        """Returns those of the sent fields from which the tokens of a `kind` follow. Raises InvalidRequest for a field
        that a `kind` refuses, because it might change the tokens."""
        sent = {name: value for name, value in self if name in self.model_fields_set}
        refuse_unsupported({name: value for name, value in sent.items() if name not in kind.model_fields})
        return {name: value for name, value in sent.items() if name in TokenizeRequest.model_fields}


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    model: str | None = None
    tokens: Annotated[list[int], FailFast(), Field(max_length=MAX_TOKEN_VALUES)]


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parses the body of a request. Raises InvalidRequest, whose `param` names the first offending field."""
    return parse_body(TokenizeRequest, body)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Parses the body of a request. Raises InvalidRequest, whose `param` names the first offending field."""
    return parse_body(DetokenizeRequest, body, MAX_TOKEN_VALUES)


def tokens_answer(token_ids: list[int], max_model_len: int, token_texts: list[str] | None) -> bytes:
    """Returns the body of an answer to `/tokenize`; `token_texts` are given only if the client asked for them."""
    whole = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids}
    return msgspec.json.encode(whole | {"token_strs": token_texts})


def text_answer(text: str) -> bytes:
    """Returns the body of an answer to `/detokenize`."""
    return msgspec.json.encode({"prompt": text})
