"""Defines the request of `/v1/completions`, which continues texts as they are, without a chat template.

`parse_completion` reads a body, and `CompletionRequest.each` splits a request with several prompts into one request per
prompt. The module checks shapes and ranges only; it does not know how many tokens a text becomes.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, PrivateAttr, field_validator

from fabric.contracts import InvalidRequest, PromptOutputs
from router.api.field_errors import shown
from router.api.generation_fields import MAX_TOP_LOGPROBS, TokenDetailFields, refuse_unsupported
from router.api.request_body import parse_body

MAX_PROMPTS = 64
"""Limits the prompts of one request; each of them is a request of its own to the cluster."""
MAX_TOKEN_VALUES = 2**20
"""Limits the JSON values in the body, because a prompt may be a list of token ids."""
DEFAULT_MAX_TOKENS = 16
"""Is OpenAI's default for completions."""
Prompt = str | list[int]
Prompts = str | list[int] | list[str] | list[list[int]]


class CompletionRequest(TokenDetailFields):
    """A `CompletionRequest` holds the parameters of a completion that Weft honours."""

    prompt: Prompts
    max_tokens: int | None = Field(DEFAULT_MAX_TOKENS, ge=0)
    """Limits the generated tokens; 0 needs `echo`, and gives the prompt back with its log-probabilities."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    """Says whether a choice begins with its prompt."""
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool = True
    """Says whether the tokenizer puts its beginning of sequence ahead of a text (vLLM's extension)."""
    _place: str = PrivateAttr("prompt")

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        return check_prompts(value, "prompt")

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def continues_text(self) -> bool:
        return True

    @property
    def prompt_outputs(self) -> PromptOutputs:
        """Returns what is wanted of the prompt itself: its log-probabilities if it is echoed with them, and if nothing
        else is generated."""
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            return PromptOutputs(num_top_logprobs=max(self.logprobs or 0, self.prompt_logprobs or 0))
        return super().prompt_outputs

    def each(self) -> list[Self]:
        """Returns one request per prompt, in order."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self]
        return [self._only(index) for index in range(len(self.prompt))]

    def _only(self, index: int) -> Self:
        only = self.model_copy(update={"prompt": self.prompt[index]})
        only._place = f"prompt.{index}"
        return only

    @property
    def prompt_place(self) -> str:
        """Returns where the prompt of a request with one prompt stands in the client's request."""
        return self._place

    @property
    def text(self) -> str:
        """Returns the prompt of a request with one prompt; it is empty if the prompt consists of token ids."""
        return self.prompt if isinstance(self.prompt, str) else ""

    @property
    def token_ids(self) -> list[int]:
        """Returns the token ids of a request with one prompt; there are none if the prompt is a text."""
        return [] if isinstance(self.prompt, str) else [each for each in self.prompt if isinstance(each, int)]


def check_prompts(value: object, name: str) -> object:
    """Returns the value of a field that holds prompts. It is checked before the union of its types is tried, whose
    errors would name every type. Raises ValueError."""
    kinds = "a string, a list of strings, a list of token ids, or a list of such lists"
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{name}` must be {kinds}, not {shown(value)}")
    first = value[0]
    for each in value:
        if isinstance(each, bool) or not isinstance(each, str | int | list) or type(each) is not type(first):
            raise ValueError(f"`{name}` must be {kinds}, but it holds {shown(each)}")
        if isinstance(each, list) and not each:
            raise ValueError(f"`{name}` holds an empty list, but each list of token ids needs at least one")
        if isinstance(each, list) and (wrong := [inner for inner in each if type(inner) is not int]):
            raise ValueError(f"`{name}` must be {kinds}, but a list in it holds {shown(wrong[0])}")
    return value


def parse_completion(body: bytes) -> CompletionRequest:
    """Parses and checks the body of a request. Raises InvalidRequest, whose `param` names the first offending field."""
    request = parse_body(CompletionRequest, body, MAX_TOKEN_VALUES)
    refuse_unsupported(request.model_extra or {})
    num_prompts = len(request.each())
    if num_prompts > MAX_PROMPTS:
        raise InvalidRequest(f"a request may have at most {MAX_PROMPTS} prompts, not {num_prompts}", param="prompt")
    if request.best_of not in (None, request.num_choices):
        message = f"`best_of` must be equal to `n`, which is {request.num_choices}, not {request.best_of}"
        raise InvalidRequest(message, param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("`max_tokens` may be 0 only with `echo`", param="max_tokens")
    if request.stream and request.echo and request.logprobs is not None:
        raise InvalidRequest("`echo` with `logprobs` can't be streamed; leave out `stream`", param="stream")
    if request.max_tokens == 0 and request.num_choices > 1:
        raise InvalidRequest(f"`n` must be 1 if `max_tokens` is 0, not {request.num_choices}", param="n")
    return request
