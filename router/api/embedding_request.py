"""Defines the request and the answer of `/v1/embeddings`.

`EmbeddingRequest.each` splits a request into one prompt per input. The module does not know how an embedding is
computed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from fabric.contracts import InvalidRequest, PromptOutputs
from router.api.answer_parts import Usage
from router.api.chat_request import ChatRequest, check_chat
from router.api.completion_request import MAX_TOKEN_VALUES, CompletionRequest, check_prompts
from router.api.generation_fields import MAX_SALT_CHARS
from router.api.request_body import parse_body, read_fields

MAX_INPUTS = 2048
"""Limits the inputs of one request, as OpenAI does."""


class EmbeddedText(CompletionRequest):
    """An `EmbeddedText` is a text, or a list of token ids, of which an embedding is wanted and no answer."""

    pooling: Literal["last", "mean"]
    is_normalised: bool = True

    @property
    def prompt_outputs(self) -> PromptOutputs:
        return PromptOutputs(self.pooling, self.is_normalised)


class EmbeddedChat(ChatRequest):
    """An `EmbeddedChat` is a conversation, media included, of which an embedding is wanted and no answer."""

    pooling: Literal["last", "mean"]
    is_normalised: bool = True

    @property
    def token_limit(self) -> int | None:
        return 0

    @property
    def prompt_outputs(self) -> PromptOutputs:
        return PromptOutputs(self.pooling, self.is_normalised)


class EmbeddingRequest(BaseModel):
    """An `EmbeddingRequest` has inputs (OpenAI's form) or messages (vLLM's extension, for media)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    model: str
    input: str | list[int] | list[str] | list[list[int]] | None = None
    messages: list[Any] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    normalize: bool = True
    """Says whether the embedding has the length 1 (vLLM's extension)."""
    add_special_tokens: bool = True
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=MAX_SALT_CHARS)

    @field_validator("input", mode="before")
    @classmethod
    def _check_inputs(cls, value: object) -> object:
        return value if value is None else check_prompts(value, "input")

    def each(self, pooling: Literal["last", "mean"]) -> list[EmbeddedText | EmbeddedChat]:
        """Returns one request per input, in order. Raises InvalidRequest."""
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("a request must have either `input` or `messages`", param="input")
        shared: dict[str, object] = {
            "model": self.model,
            "user": self.user,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
        }
        shared |= {"pooling": pooling, "is_normalised": self.normalize}
        if self.input is None:
            chosen = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
            chat = read_fields(EmbeddedChat, shared | {name: getattr(self, name) for name in chosen})
            check_chat(chat)
            return [chat]
        shared |= {"max_tokens": 0, "add_special_tokens": self.add_special_tokens, "prompt": self.input}
        texts = read_fields(EmbeddedText, shared).each()
        if len(texts) > MAX_INPUTS:
            raise InvalidRequest(f"a request may have at most {MAX_INPUTS} inputs, not {len(texts)}", param="input")
        return [*texts]


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Parses the body of a request. Raises InvalidRequest, whose `param` names the first offending field."""
    return parse_body(EmbeddingRequest, body, MAX_TOKEN_VALUES)


def embedding_place(param: str) -> str:
    """Returns the name of a field in a request for embeddings, whose inputs are prompts."""
    return re.sub(r"^prompt(?=$|\.)", "input", param)


def check_dimensions(request: EmbeddingRequest, hidden_size: int) -> None:
    """Raises InvalidRequest if the request wants another number of dimensions than the model has."""
    if request.dimensions not in (None, hidden_size):
        message = f"the embeddings of this model have {hidden_size} dimensions, not {request.dimensions}"
        raise InvalidRequest(message, param="dimensions")


def embeddings_answer(
    request: EmbeddingRequest, model: str, embeddings: Sequence[bytes], usages: Sequence[Usage]
) -> bytes:
    """Returns the body of an answer. Each embedding is float32, little-endian."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(embedding).decode()
            if request.encoding_format == "base64"
            else np.frombuffer(embedding, "<f4").tolist(),
        }
        for index, embedding in enumerate(embeddings)
    ]
    num_tokens = sum(usage.num_prompt_tokens for usage in usages)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})
