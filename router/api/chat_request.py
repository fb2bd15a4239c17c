"""Defines the chat completions request as OpenAI's clients send it, and reads and checks it.

`parse_chat` turns a body into a `ChatRequest`. Afterwards, `check_media_kwargs` refuses options that contradict each
other, `check_messages` and `check_context` check the limits that cost nothing to check, and `video_options` applies the
request's sampling of videos to the deployment's defaults. `chat_message` reads what a message holds.

The module checks shapes, ranges and limits only. It does not know what a medium holds (the medium's plugin checks
that), whether the model takes it, or how many tokens anything becomes (`router.prompt` finds out).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from fabric.contracts import ContextLengthExceeded, InvalidRequest
from modalities.family import MediaOptions
from router.api.chat_message import TEXT_PART_TYPES, ChatMessage
from router.api.generation_fields import (
    INT64_MAX,
    MAX_TOP_LOGPROBS,
    GenerationFields,
    TokenDetailFields,
    refuse_unsupported,
)
from router.api.request_body import parse_body
from router.api.tool_fields import FunctionTool, ToolChoiceField, check_tools
from router.router_config import RouterConfig

MAX_FRAMES = 16_384
"""Limits the work per item; the token budget thins frames out long before this limit."""
Sampling = Literal["fps", "uniform", "keyframe"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class MediaKwargs(BaseModel):
    """Holds the options for all media of a request (`mm_processor_kwargs`), under the names of transformers and vLLM.
    Unknown keys are refused, not ignored, because honouring them would change the answer."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    fps: float | None = Field(None, gt=0, le=240)
    num_frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    """This is the number of frames, evenly spread over the video. There are fewer if the video or the model's own limit
    has fewer, or if the budget is spent; the number is a multiple of what the model looks at together."""
    max_frames: int | None = Field(None, ge=1, le=MAX_FRAMES)
    max_pixels: int | None = Field(None, ge=1, le=INT64_MAX)
    """Limits the pixels of each picture that the model looks at, down to the smallest form that the model takes."""
    min_pixels: int | None = Field(None, ge=1, le=INT64_MAX)
    """Asks for at least so many pixels of each picture: a smaller one is scaled up, to what the model takes at most."""
    sampling: Sampling | None = None
    use_audio_in_video: bool | None = None
    """Says whether the model gets the sound tracks of videos; by default it does if it can process sound."""


AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"]
MAX_FIRST_CHUNK_FRAMES = 1024
MAX_VOICE_CHARS = 64


class AudioOutput(BaseModel):
    """Says how a spoken answer sounds (`audio`)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    voice: str | None = Field(None, min_length=1, max_length=MAX_VOICE_CHARS)
    """Names one of the model's voices; without it, the model's first one speaks."""
    format: AudioFormat | None = None
    """Is the form of the sound: by default `pcm16` in a stream, which can have no other, and `wav` otherwise."""


class ChatRequest(TokenDetailFields):
    """A `ChatRequest` holds the parameters of a chat completion that Weft honours."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    mm_processor_kwargs: MediaKwargs | None = None
    """This is vLLM's parameter: it says how the request's media are sampled."""
    on_encode_failure: Literal["error", "reduce", "text_only"] | None = None
    """Says what happens to the request if a medium can't be encoded; the deployment sets the default."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[FunctionTool] | None, FailFast()] = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    """Says whether an answer may hold several calls; OpenAI's default is that it may."""
    reasoning_effort: ReasoningEffort | None = None
    """Is a variable of the chat template, for models that read it; `none` also sets `enable_thinking` to false."""
    verbosity: Verbosity | None = None
    """Is tolerated: a hint that changes nothing."""
    include_reasoning: bool | None = None
    """Says whether an answer holds the model's reasoning (vLLM's extension); by default it does."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Holds variables of the chat template (vLLM's extension), such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Says whether the prompt ends where the assistant's answer begins (vLLM's extension); by default it does."""
    continue_final_message: bool | None = None
    """Asks for the rest of the last message, which is an assistant's, instead of a new one (vLLM's extension): the
    prompt ends where the content of that message ends. It excludes `add_generation_prompt`."""
    echo: bool | None = None
    """Puts the content of the last message before the answer, if that message is an assistant's (vLLM's extension)."""

    modalities: Annotated[list[Literal["text", "audio"]] | None, FailFast()] = Field(None, min_length=1)
    """Says what the answer is made of; `["text", "audio"]` asks for a spoken answer, with its text."""
    audio: AudioOutput | None = None
    initial_codec_chunk_frames: int | None = Field(None, ge=1, le=MAX_FIRST_CHUNK_FRAMES)
    """Sets how many codec frames (80 ms each in Qwen3-Omni) of a spoken answer are decoded first (vLLM-Omni's
    extension); by default the load decides."""

    @property
    def wants_audio(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def answer_text(self) -> str | None:
        """Returns the answer if the client gives it and wants to hear it, otherwise None."""
        return None

    @property
    def token_limit(self) -> int | None:
        """Returns the limit of generated tokens; the newer name `max_completion_tokens` wins over `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_place(self) -> str:
        return "messages"

    @property
    def begins_answer(self) -> bool:
        """Tells whether the prompt ends where an answer of the assistant begins."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def continues_text(self) -> bool:
        return bool(self.continue_final_message)

    @property
    def final_text(self) -> str | None:
        """Returns the text of the last message, its parts joined by new lines as vLLM joins them, or None if the
        message is not an assistant's or has other content than text."""
        message = self.messages[-1]
        return _text_of(message.content) if message.role == "assistant" else None

    @property
    def echoed_text(self) -> str:
        """Returns the text that stands before the answer."""
        return (self.final_text or "") if self.echo else ""

    @property
    def has_media(self) -> bool:
        """Tells whether a message has a part that is not text. It looks at types only."""
        contents = (message.content for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return any(isinstance(part, Mapping) and part.get("type") not in TEXT_PART_TYPES for part in parts)


def _text_of(content: object) -> str | None:
    """Returns the text of a message's content, or None if it has anything but text."""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    texts = [part[part["type"]] for part in parts if _is_text_part(part)]
    return "\n".join(texts) if len(texts) == len(parts) else None


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in TEXT_PART_TYPES and isinstance(part.get(part["type"]), str)


def parse_chat(body: bytes) -> ChatRequest:
    """Parses and checks the body of a request. Raises InvalidRequest, whose `param` names the first offending field; it
    also refuses, and never ignores, a parameter that would change the output and is not supported."""
    chat = parse_body(ChatRequest, body)
    check_chat(chat)
    return chat


def check_chat(chat: ChatRequest) -> None:
    """Raises InvalidRequest for fields that can't be honoured, or not together."""
    refuse_unsupported(chat.model_extra or {})
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    if chat.mm_processor_kwargs is not None:
        check_media_kwargs(chat.mm_processor_kwargs)
    check_tools(chat.tools or (), chat.tool_choice)
    if chat.continue_final_message:
        _check_continued(chat)
    if chat.audio is not None and not chat.wants_audio:
        message = "`audio` needs `modalities` to contain `audio`"
        raise InvalidRequest(message, param="audio")


def _check_continued(chat: ChatRequest) -> None:
    """Raises InvalidRequest if the last message can't be continued."""
    last, path = chat.messages[-1], f"messages.{len(chat.messages) - 1}"
    if chat.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` exclude each other; at most one may be true"
        raise InvalidRequest(message, param="continue_final_message")
    if last.role != "assistant":
        message = f"`continue_final_message` needs a last message of the role `assistant`, not `{last.role}`"
        raise InvalidRequest(message, param=f"{path}.role")
    if last.tool_calls:
        message = "`continue_final_message` needs a last message without calls; leave out its `tool_calls`"
        raise InvalidRequest(message, param=f"{path}.tool_calls")
    if chat.final_text is None:
        message = "`continue_final_message` needs a last message whose `content` is a string or an array of text parts"
        raise InvalidRequest(message, param=f"{path}.content")


# ------------------------------------------------------------ how media are sampled


def check_media_kwargs(kwargs: MediaKwargs) -> None:
    """Raises InvalidRequest for two options that contradict each other."""
    path = "mm_processor_kwargs"
    if kwargs.num_frames is not None and kwargs.fps is not None:
        raise InvalidRequest("`num_frames` and `fps` exclude each other; send one of them", param=f"{path}.num_frames")
    if kwargs.num_frames is not None and kwargs.max_frames is not None:
        message = "`num_frames` and `max_frames` exclude each other; send one of them"
        raise InvalidRequest(message, param=f"{path}.num_frames")
    least, most = kwargs.min_pixels, kwargs.max_pixels
    if least is not None and most is not None and least > most:
        message = f"`min_pixels` is {least}, which is more than the `max_pixels` of {most}"
        raise InvalidRequest(message, param=f"{path}.min_pixels")
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


def check_messages(chat: ChatRequest, config: RouterConfig) -> None:
    """Raises InvalidRequest if the request has too many messages."""
    if len(chat.messages) > config.max_messages:
        message = f"`messages` may have at most {config.max_messages} elements, not {len(chat.messages)}"
        raise InvalidRequest(message, param="messages")


def check_context(num_prompt_tokens: int, fields: GenerationFields, max_model_len: int) -> None:
    """Raises ContextLengthExceeded if prompt and answer together do not fit into the context."""
    if num_prompt_tokens > max_model_len - (fields.token_limit != 0):
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens, but the prompt has {num_prompt_tokens}, and the answer "
            "needs at least one; shorten the prompt, or send fewer or smaller media",
            param=fields.prompt_place,
        )
    wanted = fields.token_limit
    if wanted is not None and num_prompt_tokens + wanted > max_model_len:
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens, but the request asks for "
            f"{num_prompt_tokens + wanted} ({num_prompt_tokens} in the prompt, {wanted} to generate)",
            param=fields.token_limit_name,
        )
