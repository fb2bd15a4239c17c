"""Describes each endpoint that generates: how its body is read, which requests that makes of the cluster, and who
writes the answer.

The module knows nothing of HTTP connections, or of how requests are served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.api import (
    FORMAT_TO_MEDIA_TYPE,
    Head,
    parse_chat,
    parse_completion,
    parse_responses,
    parse_speech,
    parse_transcription,
)
from router.edge.answers import AnswerTools, AnswerWriter, ChatAnswer, CompletionAnswer
from router.edge.cross_site import BodyType
from router.edge.responses_adapter import ResponsesAnswer
from router.edge.spoken_answer import ReadAloudAnswer, SpokenChatAnswer
from router.edge.transcript_answer import TranscriptAnswer
from router.prompt import PromptRequest
from router.router_config import RouterConfig
from router.run import JoinedStreams

WriterOf = Callable[[JoinedStreams, Head, AnswerTools], AnswerWriter]


class Asked(NamedTuple):
    """An `Asked` is what one body asks for."""

    requests: Sequence[PromptRequest]
    is_streamed: bool
    writer: WriterOf | None = None
    """Makes the writer of the answer; None for an answer that has no text."""
    media_type: str = "application/json"
    """Is the type of a whole answer."""
    place: Callable[[str], str] = str
    """Returns a text with the places of the requests replaced by those in the body."""
    stream_type: str = ""
    """Is the type of a streamed answer that does not consist of server-sent events."""


class BodyTerms(NamedTuple):
    """Holds what reading a body needs besides the body."""

    content_type: str
    config: RouterConfig


class Endpoint(NamedTuple):
    """An `Endpoint` is one that generates."""

    id_prefix: str
    """Begins the ids of its answers."""
    read: Callable[[bytes, BodyTerms], Asked]
    """Reads a body. Raises InvalidRequest."""
    body_type: BodyType = "json"


def read_chat(body: bytes, terms: BodyTerms) -> Asked:
    chat = parse_chat(body)
    kind = SpokenChatAnswer if chat.wants_audio else ChatAnswer
    return Asked([chat], bool(chat.stream), lambda source, head, tools: kind(source, chat, head, tools))


def read_completion(body: bytes, terms: BodyTerms) -> Asked:
    request = parse_completion(body)
    return Asked(
        request.each(),
        bool(request.stream),
        lambda source, head, tools: CompletionAnswer(source, request, head, tools),
    )


def read_responses(body: bytes, terms: BodyTerms) -> Asked:
    asked = parse_responses(body)
    return Asked(
        [asked.chat],
        bool(asked.request.stream),
        lambda source, head, tools: ResponsesAnswer(source, asked, head, tools),
        place=asked.place,
    )


def read_transcription(body: bytes, terms: BodyTerms) -> Asked:
    asked = parse_transcription(body, terms.content_type, terms.config.transcription_prompt)
    return Asked(
        [asked.chat],
        asked.is_streamed,
        lambda source, head, tools: TranscriptAnswer(source, asked, tools),
        "text/plain; charset=utf-8" if asked.form == "text" else "application/json",
        asked.place,
    )


def read_speech(body: bytes, terms: BodyTerms) -> Asked:
    asked = parse_speech(body)
    media_type = FORMAT_TO_MEDIA_TYPE[asked.form]
    return Asked(
        [asked.chat],
        asked.is_streamed,
        lambda source, head, tools: ReadAloudAnswer(source, asked),
        media_type,
        asked.place,
        "" if asked.has_events else media_type,
    )


CHAT = Endpoint("chatcmpl-", read_chat)
COMPLETIONS = Endpoint("cmpl-", read_completion)
RESPONSES = Endpoint("resp_", read_responses)
SPEECH = Endpoint("speech-", read_speech)
TRANSCRIPTIONS = Endpoint("transcript-", read_transcription, "form")
