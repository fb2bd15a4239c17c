"""Defines the chat completions request as OpenAI's clients send it, and reads and checks it. All parameters that Weft
knows stand here: `ChatRequest` has those that it honours, and `PARAM_TO_NEUTRAL` those that it refuses.

`parse_chat` turns a body into a `ChatRequest`. Before it parses, `check_shape` counts the body's values; afterwards,
`refuse_unsupported` refuses parameters that change the output and that Weft can't honour yet, and `check_media_kwargs`
refuses options that contradict each other. Unknown fields are tolerated and listed (`ChatRequest.ignored_fields`).
`parts_of` reads the content of a message, `video_options` applies the request's sampling of videos to the deployment's
defaults, and `check_limits` and `check_context` check the limits that cost nothing to check: names, counts, lengths.

The module checks shapes, ranges and limits only. It does not know what a medium holds (the medium's plugin checks
that), whether the model takes it, or how many tokens anything becomes (`router.prompt` finds out).
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator

from fabric.contracts import ContextLengthExceeded, InvalidRequest, ModelNotFound
from modalities.family import MediaOptions
from router.api.field_errors import describe_flaw, shown
from router.router_config import RouterConfig

# ------------------------------------------------------------ the request

INT64_MAX = 2**63 - 1
MAX_BIASED_TOKENS = 1024
"""Limits the work per step; OpenAI takes 300."""
MAX_LISTED_FIELDS = 64
MAX_FRAMES = 16_384
"""Limits the work per item; the token budget thins frames out long before this limit."""
MAX_DEADLINE_MS = 3_600_000
Role = Literal["system", "developer", "user", "assistant", "tool"]
Sampling = Literal["fps", "uniform", "keyframe"]


class ChatMessage(BaseModel):
    """A `ChatMessage` is one message of the request. `parts_of` reads `content` and names the offending part."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Role
    content: Any = None
    name: str | None = None
    tool_call_id: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    include_usage: bool = False


class MediaKwargs(BaseModel):
    """Holds the options for all videos of a request (`mm_processor_kwargs`), under the names of transformers and vLLM.
    Unknown keys are refused, not ignored, because honouring them would change the answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    fps: float | None = Field(None, gt=0, le=240)
    num_frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    """This is the number of frames, evenly spread over the video. There are fewer if the video or the model's own limit
    has fewer, or if the budget is spent; the number is a multiple of what the model looks at together."""
    max_frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    sampling: Sampling | None = None
    use_audio_in_video: bool | None = None
    """Says whether the model gets the sound tracks of videos; by default it does if it can process sound."""


class WeftOptions(BaseModel):
    """Holds the options that only Weft has (`weft`). Unknown keys are refused, because nothing else defines them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    ttft_deadline_ms: int | None = Field(None, ge=1, le=MAX_DEADLINE_MS)
    """The first token should come within this many milliseconds of the request's arrival. A request for which the
    router predicts a later first token is refused at once (429)."""
    explain: bool = False
    """Asks for the record of the request (`GET /weft/requests/{id}`) in the answer."""


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
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    """This is OpenAI's parameter: `flex` asks for the class `batch`, which costs others nothing; every other value asks
    for what the tenant's own class gives."""
    weft: WeftOptions | None = None
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
        """Tells whether the output may have to match something (see `router.prompt.generation_options`)."""
        asked = (self.response_format, self.structured_outputs, self.guided_json, self.guided_regex, self.guided_choice)
        return any(each is not None for each in asked)

    @property
    def has_media(self) -> bool:
        """Tells whether a message has a part that is not text. It looks at types only."""
        contents = (message.content for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return any(isinstance(part, Mapping) and part.get("type") not in TEXT_PART_TYPES for part in parts)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_explanation(self) -> bool:
        return self.weft is not None and self.weft.explain

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
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    if chat.mm_processor_kwargs is not None:
        check_media_kwargs(chat.mm_processor_kwargs)
    return chat


def _refusal(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']}")
    param = ".".join(map(_quoted, first["loc"])) or None
    if first["type"] == "missing":
        return InvalidRequest(f"`{param}` is required", param=param)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"`{param}` is not supported by this server", param=param)
    first = error.errors(include_url=False)[0]  # The input of a missing field would be a copy of the whole body.
    return InvalidRequest(describe_flaw(first, "the body" if param is None else f"`{param}`"), param=param)


def _quoted(step: int | str) -> str:
    """Returns one step of a path in the body. A key that a client made up is escaped, because it must not look like a
    line of a log."""
    if isinstance(step, int) or re.fullmatch(r"[\w-]{1,64}", step) is not None:
        return str(step)
    return repr(step[:64])


# ------------------------------------------------------------ the content of a message

PART_TYPE_TO_MODALITY = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "file",
}
"""Maps the part types that OpenAI and its users know to modalities. A type without a plugin is an unsupported modality,
not an unknown part."""
TEXT_PART_TYPES = ("text", "refusal")
MAX_UUID_LENGTH = 256
Detail = Literal["auto", "low", "high"]


class TextPart(NamedTuple):
    text: str


class MediaPart(NamedTuple):
    part_type: str
    fields: Mapping[str, object]
    param: str
    detail: Detail = "auto"
    """Says how closely the model should look at a picture."""


Part = TextPart | MediaPart


def _never_media(part_type: str) -> bool:
    return False


def parts_of(message: ChatMessage, index: int, is_media: Callable[[str], bool] = _never_media) -> str | list[Part]:
    """Returns the content of the message with index `index`: its text, or its parts, each medium with its path in the
    request (`messages.0.content.1`). `is_media` tells whether a part type beyond the common ones has a parser. Raises
    InvalidRequest."""
    path = f"messages.{index}"
    if (message.model_extra or {}).get("tool_calls"):
        raise InvalidRequest("tool calls are not supported by this server", param=f"{path}.tool_calls")
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant":
        return ""
    if not isinstance(content, Sequence) or not content:
        flaw = f"`content` must be a string or a non-empty array of parts, not {shown(content)}"
        raise InvalidRequest(flaw, param=f"{path}.content")
    return [_part(part, f"{path}.content.{at}", is_media) for at, part in enumerate(content)]


def _part(part: object, param: str, is_media: Callable[[str], bool]) -> Part:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"a content part must be an object, not {shown(part)}", param=param)
    kind = part.get("type")
    if kind in TEXT_PART_TYPES:
        text = part.get(kind)
        if not isinstance(text, str):
            raise InvalidRequest(f"a `{kind}` part needs a string under `{kind}`, not {shown(text)}", param=param)
        return TextPart(text)
    if not isinstance(kind, str):
        raise InvalidRequest(f"a content part needs a string under `type`, not {shown(kind)}", param=param)
    if kind not in PART_TYPE_TO_MODALITY and not is_media(kind):
        known = ", ".join(("text", *PART_TYPE_TO_MODALITY))
        raise InvalidRequest(f"the content part type {shown(kind)} is unknown; known types are {known}", param=param)
    _check_uuid(part, kind, param)
    return MediaPart(kind, part, param, _detail(part, kind, param))


def _detail(part: Mapping[str, object], kind: str, param: str) -> Detail:
    """Returns the `detail` of a part. Raises InvalidRequest for a value that OpenAI does not define, and for `low` on
    anything but a picture."""
    value = part.get(kind)
    found = value.get("detail") if isinstance(value, Mapping) else None
    path = f"{param}.{kind}.detail"
    if found is None or found == "auto":
        return "auto"
    if found not in ("low", "high"):
        raise InvalidRequest(f"`detail` must be `auto`, `low` or `high`, not {shown(found)}", param=path)
    if found == "low" and PART_TYPE_TO_MODALITY.get(kind) != "image":
        raise InvalidRequest(f"only pictures have a `low` detail; a `{kind}` part takes `auto` or `high`", param=path)
    return "low" if found == "low" else "high"


def _check_uuid(part: Mapping[str, object], kind: str, param: str) -> None:
    """Checks a client's name for a medium (vLLM's extension), which stands next to the medium or within it. The name is
    a label without effect: a medium is identified by its content, so that no client can refer to another client's
    medium. Raises InvalidRequest for a name that is not a string of 1 to `MAX_UUID_LENGTH` characters, and for a name
    without the medium."""
    value = part.get(kind)
    inner = value if isinstance(value, Mapping) else {}
    uuid = part.get("uuid", inner.get("uuid"))
    if uuid is None:
        return
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        message = f"a `uuid` must be a string of 1 to {MAX_UUID_LENGTH} characters, not {shown(uuid)}"
        raise InvalidRequest(message, param=f"{param}.uuid")
    has_medium = bool(set(inner) - {"uuid", "detail"}) if isinstance(value, Mapping) else bool(value)
    if kind in PART_TYPE_TO_MODALITY and not has_medium:
        raise InvalidRequest("a `uuid` can't replace the content of a medium; send the content too", param=param)


# ------------------------------------------------------------ how media are sampled


def check_media_kwargs(kwargs: MediaKwargs) -> None:
    """Raises InvalidRequest for two options that contradict each other."""
    path = "mm_processor_kwargs"
    if kwargs.num_frames is not None and kwargs.fps is not None:
        raise InvalidRequest("`num_frames` and `fps` exclude each other; send one of them", param=f"{path}.num_frames")
    if kwargs.num_frames is not None and kwargs.max_frames is not None:
        message = "`num_frames` and `max_frames` exclude each other; send one of them"
        raise InvalidRequest(message, param=f"{path}.num_frames")
    if kwargs.fps is not None and kwargs.sampling not in (None, "fps"):
        message = f"`fps` has no effect on `{kwargs.sampling}` sampling; leave it out, or set `sampling` to `fps`"
        raise InvalidRequest(message, param=f"{path}.fps")


def video_options(defaults: MediaOptions, kwargs: MediaKwargs | None) -> MediaOptions:
    """Returns the deployment's defaults, changed by the request's options. A number of frames implies evenly spread
    frames, and a rate implies sampling at that rate, unless the request names the sampling itself."""
    if kwargs is None:
        return defaults
    implied = "uniform" if kwargs.num_frames is not None else "fps" if kwargs.fps is not None else defaults.sampling
    return dataclasses.replace(
        defaults,
        sampling=kwargs.sampling or implied,
        fps=defaults.fps if kwargs.fps is None else kwargs.fps,
        max_frames=kwargs.num_frames or kwargs.max_frames or defaults.max_frames,
    )


# ------------------------------------------------------------ limits


def check_limits(chat: ChatRequest, config: RouterConfig, vocab_size: int) -> None:
    """Raises ModelNotFound or InvalidRequest if the request exceeds a limit; `param` names the field."""
    if chat.model != config.model_name:
        raise model_not_found(chat.model, config.model_name)
    if chat.num_choices > config.max_num_choices:
        raise InvalidRequest(f"`n` must be at most {config.max_num_choices}, not {chat.num_choices}", param="n")
    if len(chat.messages) > config.max_messages:
        message = f"a request may have at most {config.max_messages} messages, not {len(chat.messages)}"
        raise InvalidRequest(message, param="messages")
    if chat.priority is not None and chat.priority < config.min_priority:
        raise InvalidRequest(
            f"`priority` must be at least {config.min_priority}, not {chat.priority}", param="priority"
        )
    _check_stops(chat, config, vocab_size)


def model_not_found(wanted: str, served: str) -> ModelNotFound:
    """Returns the error for a request of the model `wanted` at a router that serves only the model `served`."""
    return ModelNotFound(f"the model `{wanted[:128]}` does not exist; this server serves `{served}`", param="model")


def _check_stops(chat: ChatRequest, config: RouterConfig, vocab_size: int) -> None:
    stops, stop_ids = chat.stop or [], chat.stop_token_ids or []
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


def check_context(num_prompt_tokens: int, chat: ChatRequest, max_model_len: int) -> None:
    """Raises ContextLengthExceeded if prompt and answer together do not fit into the context."""
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens, but the prompt has {num_prompt_tokens}, and the answer "
            "needs at least one; shorten the prompt, or send fewer or smaller media",
            param="messages",
        )
    wanted = chat.token_limit
    if wanted is not None and num_prompt_tokens + wanted > max_model_len:
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens, but the request asks for "
            f"{num_prompt_tokens + wanted} ({num_prompt_tokens} in the prompt, {wanted} to generate)",
            param="max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens",
        )


# ------------------------------------------------------------ the size of a body

MAX_JSON_VALUES = 2**16
"""Limits the values in one body: 4,096 messages of several parts fit, with room to spare. Parsing this many takes some
20 ms."""
PIECE_BYTES = 2**20
"""A body is examined in pieces of this many bytes."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_SEPARATORS = b",:[{"
"""Every JSON value except the first follows one of these bytes."""
_IS_SEPARATOR: npt.NDArray[np.bool_] = np.isin(np.arange(256), list(_SEPARATORS))


def check_shape(body: bytes) -> None:
    """Raises InvalidRequest if the body has more values than a request may have. It does not check whether the body is
    JSON at all, nor what the values mean.

    The values are counted before the body is parsed, because a parser makes an object of each value. Two bytes of a
    body (`0,` or `{}`) may become a hundred bytes of memory, and a microsecond with the interpreter's lock held, during
    which no other request is served. Media are long strings and cost little; only values count."""
    if num_separators(body) <= MAX_JSON_VALUES:  # Nearly every body passes here, with separators in strings counted.
        return
    if num_values(body, MAX_JSON_VALUES) > MAX_JSON_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_JSON_VALUES} JSON values, which is the limit")


def num_separators(body: bytes) -> int:
    """Counts the separators in the whole body, including those in strings. It stops counting after the limit."""
    count = 0
    for begin in range(0, len(body), PIECE_BYTES):
        count += sum(body.count(separator, begin, begin + PIECE_BYTES) for separator in _SEPARATORS)
        if count > MAX_JSON_VALUES:
            break
    return count


def num_values(body: bytes, most: int) -> int:
    """Returns the number of separators outside of strings (RFC 8259). It stops counting after `most`. If the body is
    JSON, it has at most one value more than separators; an empty array or object has a separator without a value in
    it."""
    count, is_inside, num_trailing = 0, False, 0
    for begin in range(0, len(body), PIECE_BYTES):
        piece = np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - begin), begin)
        # A quote belongs to the text of a string if an odd number of backslashes stands before it.
        before = -1 - num_trailing
        others = np.where(piece == _BACKSLASH, before, np.arange(len(piece)))
        last_other = np.concatenate([[before], np.maximum.accumulate(others)])
        quotes = np.flatnonzero(piece == _QUOTE)
        quotes = quotes[(quotes - 1 - last_other[quotes]) % 2 == 0]
        separators = np.flatnonzero(_IS_SEPARATOR[piece])
        num_quotes_before = np.searchsorted(quotes, separators) + is_inside
        count += int(np.count_nonzero(num_quotes_before % 2 == 0))
        is_inside = bool((len(quotes) + is_inside) % 2)
        num_trailing = len(piece) - 1 - int(last_other[-1])
        if count > most:
            break
    return count


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
    "tools": _is_empty,
    "tool_choice": _equals("none", "auto"),
    "functions": _is_empty,
    "function_call": _equals("none", "auto"),
    "modalities": _is_text_only,
    "audio": _is_empty,
    "prediction": _is_empty,
    "reasoning_effort": _equals("none"),
    "verbosity": _equals("medium"),
    "web_search_options": _is_empty,
    # These parameters are vLLM's.
    "length_penalty": _equals(1),
    "best_of": _equals(1),
    "use_beam_search": _is(False),
    "bad_words": _is_empty,
    "allowed_token_ids": _is_empty,
    "prompt_logprobs": _is_empty,
    "echo": _is(False),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
    "add_special_tokens": _is(False),
    "skip_special_tokens": _is(True),
    "include_stop_str_in_output": _is(False),
    "truncate_prompt_tokens": _is_empty,
    "documents": _is_empty,
    "chat_template": _is_empty,
    "chat_template_kwargs": _is_empty,
    "media_io_kwargs": _is_empty,
    "logits_processors": _is_empty,
    "guided_grammar": _is_empty,
}
"""Maps each parameter that is not supported to a test for the values that ask for what happens anyway; other values are
refused. To honour a parameter, remove its row here and add the field to `ChatRequest`."""


def refuse_unsupported(extra: Mapping[str, object]) -> None:
    """Raises InvalidRequest naming the first unsupported field. `extra` holds the fields beyond those of
    `ChatRequest`."""
    for name, value in extra.items():
        is_neutral = PARAM_TO_NEUTRAL.get(name)
        if is_neutral is not None and not is_neutral(value):
            raise InvalidRequest(f"`{name}` is not supported by this server", param=name)
