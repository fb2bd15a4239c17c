"""Defines the request of `/v1/audio/transcriptions`, which is a form with a file, and turns it into a chat request
about a sound.

A model that hears is asked in words to write down what it hears, so there are no time stamps. Formats that consist of
them are refused, and `verbose_json` has no segments. The module checks shapes only; it does not know what the file
holds.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fabric.contracts import InvalidRequest
from router.api.chat_request import ChatRequest
from router.api.field_errors import shown
from router.api.request_body import quoted, read_fields

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 64
MAX_FIELD_BYTES = 64 * 1024
"""Limits every field of the form but the file."""
TranscriptFormat = Literal["json", "text", "verbose_json"]
TRANSCRIPT_FORMATS: tuple[str, ...] = get_args(TranscriptFormat)
SOUND_PLACE = "messages.0.content.0"
"""Is the place of the sound in the chat request."""


class FormPart(NamedTuple):
    """A `FormPart` is one part of a form."""

    name: str
    data: bytes


class Transcription(NamedTuple):
    """A `Transcription` is what a form asks for."""

    chat: ChatRequest
    form: TranscriptFormat
    language: str
    """Is the code of the language that the form names, or empty."""
    is_streamed: bool
    wants_logprobs: bool
    """Says whether the answer has the log-probabilities of its tokens."""

    def place(self, text: str) -> str:
        """Returns the name of a field of the chat as the form has it."""
        return "file" if text.startswith(SOUND_PLACE) else text


def parse_transcription(body: bytes, content_type: str, instruction: str) -> Transcription:
    """Parses and checks the body of a request. `instruction` is what the model is asked to do. Raises InvalidRequest,
    whose `param` names the offending field."""
    fields: dict[str, FormPart] = {}
    parts = form_parts(body, content_type)
    for part in parts:
        fields.setdefault(part.name.removesuffix("[]"), part)
    file = fields.pop("file", None)
    if file is None or not file.data:
        raise InvalidRequest("`file` is required, and it must not be empty", param="file")
    texts = {name: _text(part) for name, part in fields.items()}
    if "model" not in texts:
        raise InvalidRequest("`model` is required", param="model")
    form = texts.get("response_format", "json")
    if form not in TRANSCRIPT_FORMATS:
        known = "`json`, `text` or `verbose_json`"
        message = f"`response_format` must be {known}, not {shown(form)}; this server makes no time stamps"
        raise InvalidRequest(message, param="response_format")
    if texts.get("timestamp_granularities"):
        raise InvalidRequest("this server makes no time stamps", param="timestamp_granularities")
    wants_logprobs = _wants_logprobs([_text(part) for part in parts if part.name in ("include", "include[]")], form)
    question = _question(texts, instruction)
    sound = {"type": "audio_url", "audio_url": {"url": f"data:;base64,{base64.b64encode(file.data).decode()}"}}
    messages = [{"role": "user", "content": [sound, {"type": "text", "text": question}]}]
    options = {"temperature": _number(texts, "temperature", 0.0), "cache_salt": texts.get("cache_salt")}
    options |= {"logprobs": wants_logprobs}
    chat = read_fields(ChatRequest, {"model": texts["model"], "messages": messages, **options})
    is_streamed = _truth(texts, "stream")
    return Transcription(chat, cast(TranscriptFormat, form), texts.get("language", ""), is_streamed, wants_logprobs)


def _wants_logprobs(included: Sequence[str], form: str) -> bool:
    """Tells whether a form asks for log-probabilities by its fields `include[]`. As with OpenAI, only the format `json`
    has a place for them."""
    unknown = next((each for each in included if each != "logprobs"), None)
    if unknown is not None:
        raise InvalidRequest(f"`include` may only have `logprobs`, not {shown(unknown)}", param="include")
    if included and form != "json":
        message = f"`include` needs the `response_format` `json`, because `{form}` has no place for log-probabilities"
        raise InvalidRequest(message, param="include")
    return bool(included)


def _question(texts: Mapping[str, str], instruction: str) -> str:
    """Returns what the model is asked. OpenAI's `prompt` guides it, and `language` tells it the language."""
    language = texts.get("language", "")
    if language and not (len(language) <= 35 and language.replace("-", "").isalnum()):
        raise InvalidRequest(f"`language` must be a code such as `en`, not {shown(language)}", param="language")
    hints = [f"The language is {language}."] if language else []
    return " ".join([instruction, *hints, *([texts["prompt"]] if texts.get("prompt") else [])])


def _text(part: FormPart) -> str:
    try:
        return part.data.decode()
    except UnicodeDecodeError as error:
        name = quoted(part.name)
        raise InvalidRequest(f"`{name}` must be UTF-8", param=name) from error


def _number(texts: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(texts.get(name) or default)
    except ValueError as error:
        raise InvalidRequest(f"`{name}` must be a number, not {shown(texts[name])}", param=name) from error


def _truth(texts: Mapping[str, str], name: str) -> bool:
    word = texts.get(name, "false").lower()
    if word not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"`{name}` must be `true` or `false`, not {shown(word)}", param=name)
    return word in ("true", "1")


# ------------------------------------------------------------ forms


def form_parts(body: bytes, content_type: str) -> list[FormPart]:
    """Returns the parts of a form (RFC 7578). Raises InvalidRequest if the body is none, or as soon as a field is too
    long."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind == b"multipart/form-data" and not boundary:
        message = "the header `Content-Type: multipart/form-data` has no `boundary`, which separates the form's parts"
        raise InvalidRequest(f"{message}; the client's library adds it if it writes this header itself")
    if kind != b"multipart/form-data" or not boundary:
        message = f"the body must be a form (`multipart/form-data`), not {shown(content_type[:64])}"
        raise InvalidRequest(message)
    reader = _FormReader()
    try:
        parser = MultipartParser(boundary, reader.callbacks)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest("the body is not a valid form") from error
    if not reader.is_ended:
        raise InvalidRequest("the form has no end, so a part of it is missing")
    return reader.parts


class _FormReader:
    """Collects what the parser finds. A part's data are copied once."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.is_ended = False
        self._header = bytearray()
        self._value = bytearray()
        self._name = ""
        self._data = bytearray()
        self.callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._extend,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        if len(self.parts) >= MAX_PARTS:
            raise InvalidRequest(f"a form may have at most {MAX_PARTS} parts")
        self._name, self._data = "", bytearray()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode(errors="replace")
        self._header.clear()
        self._value.clear()

    def _extend(self, data: bytes, start: int, end: int) -> None:
        is_file = self._name.removesuffix("[]") == "file"
        if not is_file and len(self._data) + end - start > MAX_FIELD_BYTES:
            name = quoted(self._name)
            raise InvalidRequest(f"`{name}` may have at most {MAX_FIELD_BYTES} bytes", param=name)
        self._data.extend(memoryview(data)[start:end])

    def _end(self) -> None:
        self.parts.append(FormPart(self._name, bytes(self._data)))

    def _finish(self) -> None:
        self.is_ended = True
