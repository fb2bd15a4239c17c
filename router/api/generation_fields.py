"""Defines the parameters that every endpoint which generates text takes: `GenerationFields`, from which the requests of
single endpoints derive, and `TokenDetailFields`, which adds what only some of them take. Names and bounds are OpenAI's,
and vLLM's where OpenAI has none.

`check_generation` refuses what only the router's configuration and the model know to be out of range, and
`refuse_unsupported` refuses parameters that would change the output and that Weft can't honour. Other unknown fields
are tolerated and listed (`GenerationFields.ignored_fields`). The module knows nothing of messages, prompts or media.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator

from fabric.contracts import InvalidRequest, ModelNotFound, PromptOutputs
from router.api.field_errors import shown
from router.api.request_body import quoted
from router.router_config import RouterConfig

INT64_MAX = 2**63 - 1
MAX_BIASED_TOKENS = 1024
"""Limits the work per step; OpenAI takes 300."""
MAX_LISTED_FIELDS = 64
MAX_DEADLINE_MS = 3_600_000
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARS = 256
NAMED_MODELS = 8
"""The error for an unknown model names this many that are served."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    include_usage: bool = False


class WeftOptions(BaseModel):
    """Holds the options that only Weft has (`weft`). Unknown keys are refused, because nothing else defines them."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    ttft_deadline_ms: int | None = Field(None, ge=1, le=MAX_DEADLINE_MS)
    """The first token should come within this many milliseconds of the request's arrival. A request for which the
    router predicts a later first token is refused at once (429)."""
    explain: bool = False
    """Asks for the record of the request (`GET /weft/requests/{id}`) in the answer."""
    keep_pairs: bool = False
    """Asks that the record has the score of every pair of a worker and an encoder, if the client may see them."""


class GenerationFields(BaseModel):
    """Holds how one request generates. Validation of a list stops at its first flaw: the client gets only that one, and
    a list may have tens of thousands."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: str
    max_tokens: int | None = Field(None, ge=1)
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
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    """This is OpenAI's parameter: `flex` asks for the class `batch`, which costs others nothing; every other value asks
    for what the tenant's own class gives."""
    weft: WeftOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_CHARS)
    user: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """This is vLLM's parameter: one of `json`, `regex`, `choice`, `json_object`."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, FailFast()] = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        if value is not None and not isinstance(value, str | list):
            raise ValueError(f"`stop` must be a string or a list of strings, not {shown(value)}")
        return [value] if isinstance(value, str) else value

    @field_validator("guided_json", mode="before")
    @classmethod
    def _check_guided_json(cls, value: object) -> object:
        """Checks the schema before the union of its types is tried, whose errors would name every type."""
        if value is not None and not isinstance(value, str | dict):
            raise ValueError(f"`guided_json` must be a JSON schema, as an object or as its text, not {shown(value)}")
        return value

    @property
    def token_limit(self) -> int | None:
        """Returns the limit of generated tokens."""
        return self.max_tokens

    @property
    def token_limit_name(self) -> str:
        """Returns the name of the field that states the limit."""
        return "max_tokens"

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_top_logprobs(self) -> int | None:
        """Returns how many of the most probable tokens are wanted at each position, or None if no log-probabilities
        are."""
        return None

    @property
    def prompt_outputs(self) -> PromptOutputs:
        """Returns what is wanted of the prompt itself."""
        return PromptOutputs()

    @property
    def prompt_place(self) -> str:
        """Returns where the prompt stands in the client's request."""
        return "prompt"

    @property
    def has_media(self) -> bool:
        """Tells whether the request has a part that is not text."""
        return False

    @property
    def continues_text(self) -> bool:
        """Tells whether the output continues a text of the prompt, and is no text of its own."""
        return False

    @property
    def is_structured(self) -> bool:
        """Tells whether the output may have to match something (see `router.prompt.generation_options`)."""
        asked = (self.response_format, self.structured_outputs, self.guided_json, self.guided_regex, self.guided_choice)
        return any(each is not None for each in asked)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_explanation(self) -> bool:
        return self.weft is not None and self.weft.explain

    @property
    def wants_pairs(self) -> bool:
        return self.weft is not None and self.weft.keep_pairs

    @property
    def ignored_fields(self) -> list[str]:
        """Returns the fields that were sent and change nothing here, sorted. If there are very many, it returns the
        first of them and how many more there are. The list is kept with the request's trace."""
        names = self.model_extra or {}
        listed = [quoted(name) for name in heapq.nsmallest(MAX_LISTED_FIELDS, names)]
        num_more = len(names) - len(listed)
        return [*listed, f"and {num_more} more"] if num_more else listed


class TokenDetailFields(GenerationFields):
    """Adds the parameters of endpoints whose answers may have more of the tokens than their text."""

    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Asks for the log-probabilities of the prompt's tokens, and of this many most probable ones at each position
    (vLLM's extension). The prefix cache is then not used."""
    return_token_ids: bool | None = None
    """This is vLLM's extension: it adds `prompt_token_ids` next to the choices, and `token_ids` in each choice (in each
    chunk, when streamed)."""

    @property
    def prompt_outputs(self) -> PromptOutputs:
        return PromptOutputs(num_top_logprobs=self.prompt_logprobs)


# ------------------------------------------------------------ limits


def check_generation(fields: GenerationFields, config: RouterConfig, vocab_size: int) -> None:
    """Raises ModelNotFound or InvalidRequest if the request exceeds a limit; `param` names the field."""
    check_model(fields.model, config)
    if fields.num_choices > config.max_num_choices:
        raise InvalidRequest(f"`n` must be at most {config.max_num_choices}, not {fields.num_choices}", param="n")
    if fields.priority is not None and fields.priority < config.min_priority:
        raise InvalidRequest(
            f"`priority` must be at least {config.min_priority}, not {fields.priority}", param="priority"
        )
    if fields.stream and isinstance(fields, TokenDetailFields) and fields.prompt_logprobs is not None:
        raise InvalidRequest("`prompt_logprobs` can't be streamed; leave out `stream`", param="prompt_logprobs")
    _check_stops(fields, config, vocab_size)


def num_prompt_scores(fields: GenerationFields, num_tokens: int) -> int:
    """Counts the log-probabilities of a prompt of `num_tokens` in the answer. Each choice may repeat them."""
    num_top = fields.prompt_outputs.num_top_logprobs
    return 0 if num_top is None else num_tokens * (1 + num_top) * fields.num_choices


def check_scores(fields: GenerationFields, num_tokens: int, num_before: int, config: RouterConfig) -> None:
    """Raises InvalidRequest if the answer would have too many log-probabilities of prompts. `num_before` counts those
    of its earlier prompts."""
    own = num_prompt_scores(fields, num_tokens)
    if own and num_before + own > config.max_prompt_logprobs:
        is_own = isinstance(fields, TokenDetailFields) and fields.prompt_logprobs is not None
        name = "prompt_logprobs" if is_own else "logprobs"
        message = (
            f"the answer would have {num_before + own} log-probabilities of prompt tokens, and the limit is "
            f"{config.max_prompt_logprobs} (limits.max_prompt_logprobs); lower `{name}`, or shorten the prompt"
        )
        raise InvalidRequest(message, param=name)


def check_model(wanted: str, config: RouterConfig) -> None:
    """Raises ModelNotFound if a request names neither the model that is served nor one of its adapters."""
    if wanted != config.model_name and wanted not in config.adapters:
        raise model_not_found(wanted, config)


def model_not_found(wanted: str, config: RouterConfig) -> ModelNotFound:
    """Returns the error for a request of the model `wanted`, which is not served. It names what is, of many adapters
    the first ones."""
    names = [f"`{name}`" for name in config.model_names[:NAMED_MODELS]]
    num_more = len(config.adapters) + 1 - len(names)
    served = ", ".join([*names, f"and {num_more} more (`GET /v1/models`)"] if num_more else names)
    return ModelNotFound(f"the model `{wanted[:128]}` does not exist; this server serves {served}", param="model")


def _check_stops(fields: GenerationFields, config: RouterConfig, vocab_size: int) -> None:
    stops, stop_ids = fields.stop or [], fields.stop_token_ids or []
    if len(stops) > config.max_stop_strings:
        message = f"`stop` may have at most {config.max_stop_strings} strings, not {len(stops)}"
        raise InvalidRequest(message, param="stop")
    wrong = next((len(stop) for stop in stops if not 1 <= len(stop) <= config.max_stop_chars), None)
    if wrong is not None:
        message = f"a stop string must have 1 to {config.max_stop_chars} characters, not {wrong}"
        raise InvalidRequest(message, param="stop")
    if len(stop_ids) > config.max_stop_token_ids:
        message = f"`stop_token_ids` may have at most {config.max_stop_token_ids} ids, not {len(stop_ids)}"
        raise InvalidRequest(message, param="stop_token_ids")
    unknown = next((token_id for token_id in stop_ids if not 0 <= token_id < vocab_size), None)
    if unknown is not None:
        message = f"a stop token id must be one of 0 to {vocab_size - 1}, not {shown(unknown)}"
        raise InvalidRequest(message, param="stop_token_ids")


# ------------------------------------------------------------ parameters that are not supported

Neutral = Callable[[object], bool]


def _is_empty(value: object) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""


def _equals(*neutral: object) -> Neutral:
    def is_neutral(value: object) -> bool:
        return value is None or any(type(value) is not bool and value == each for each in neutral)

    return is_neutral


def _is(neutral: bool) -> Neutral:
    def is_neutral(value: object) -> bool:
        return value is None or value is neutral

    return is_neutral


def _is_text_only(value: object) -> bool:
    return value is None or value == ["text"]


PARAM_TO_NEUTRAL: dict[str, Neutral] = {
    # These parameters are OpenAI's.
    "functions": _is_empty,
    "function_call": _equals("none", "auto"),
    "modalities": _is_text_only,
    "audio": _is_empty,
    "prediction": _is_empty,
    "web_search_options": _is_empty,
    # These parameters are vLLM's.
    "length_penalty": _equals(1),
    "best_of": _equals(1),
    "use_beam_search": _is(False),
    "bad_words": _is_empty,
    "allowed_token_ids": _is_empty,
    "echo": _is(False),
    "continue_final_message": _is(False),
    "add_special_tokens": _is(False),
    "skip_special_tokens": _is(True),
    "include_stop_str_in_output": _is(False),
    "truncate_prompt_tokens": _is_empty,
    "documents": _is_empty,
    "suffix": _is_empty,
    "chat_template": _is_empty,
    "media_io_kwargs": _is_empty,
    "logits_processors": _is_empty,
    "guided_grammar": _is_empty,
    "prompt_logprobs": _equals(),
    "return_token_ids": _is(False),
}
"""Maps each parameter that is not supported to a test for the values that ask for what happens anyway; other values are
refused. A request whose class has a field of this name honours the parameter."""


def refuse_unsupported(extra: Mapping[str, object]) -> None:
    """Raises InvalidRequest naming the first unsupported field. `extra` holds the fields beyond those of the request's
    class."""
    for name, value in extra.items():
        is_neutral = PARAM_TO_NEUTRAL.get(name)
        if is_neutral is not None and not is_neutral(value):
            raise InvalidRequest(f"`{name}` is not supported by this server", param=name)
