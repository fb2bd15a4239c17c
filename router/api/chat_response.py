"""Builds the answers of chat completions as JSON in OpenAI's shapes: whole completions, and the chunks of a streamed
one. A whole answer (`completion`) and a streamed one (`ChunkWriter`) stand together because they consist of the same
pieces.

The module decides nothing, and knows nothing of requests or of how an answer is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from router.api.answer_parts import Degraded, Explained, Head, Usage, sse_event, weft_part


class CompletedCall(NamedTuple):
    """A `CompletedCall` is a call of a tool in an answer."""

    call_id: str
    name: str
    arguments: str
    """This is JSON."""

    def to_json(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class ChoiceText(NamedTuple):
    """A `ChoiceText` is one choice of a whole answer."""

    choice: int
    text: str
    finish_reason: str
    details: dict[str, object] | None = None
    """Holds further fields that the client asked for: `token_ids`, `logprobs`."""
    reasoning: str = ""
    calls: Sequence[CompletedCall] = ()
    audio: Mapping[str, object] | None = None
    """Holds the sound of a spoken choice, with its text as `transcript`."""

    @property
    def message(self) -> dict[str, object]:
        """Returns the message. Its content is None if it consists of calls alone, or is spoken."""
        content = None if (self.calls and not self.text) or self.audio is not None else self.text
        fields: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        fields |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        fields |= {} if self.audio is None else {"audio": self.audio}
        return fields | ({"tool_calls": [call.to_json() for call in self.calls]} if self.calls else {})


def completion(
    head: Head,
    choices: Sequence[ChoiceText],
    usage: Usage,
    prompt_token_ids: Sequence[int] | None = None,
    degraded: Degraded = (),
    explained: Explained = None,
    prompt_logprobs: Sequence[object] | None = None,
) -> bytes:
    """Returns the body of an answer that is not streamed. `prompt_token_ids`, `explained` and `prompt_logprobs` are
    given only if the client asked for them."""
    listed = [
        {
            "index": each.choice,
            "message": each.message,
            "logprobs": None,
            "finish_reason": each.finish_reason,
        }
        | (each.details or {})
        for each in choices
    ]
    whole = {"choices": listed, "usage": usage.to_json()} | _ids(prompt_token_ids) | weft_part(degraded, explained)
    whole |= {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}
    return msgspec.json.encode(head.to_json("chat.completion") | whole)


_EMPTY_CONTENT = b'"content":""'
_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Builds the server-sent events of one answer. With `has_usage_chunk`, every chunk except the last says `usage:
    null`.

    Most chunks differ only in a piece of text, so what surrounds it is encoded once per choice."""

    def __init__(self, head: Head, has_usage_chunk: bool) -> None:
        self.has_usage_chunk = has_usage_chunk
        self._head = head.to_json("chat.completion.chunk")
        self._usage: dict[str, object] = {"usage": None} if has_usage_chunk else {}
        self._choice_to_frame: dict[int, tuple[bytes, bytes]] = {}
        """Holds, per choice, the bytes before and after the text of an event that has nothing but text, because these
        are the same in each of them."""

    def role(self, choice: int, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, extra=_ids(prompt_token_ids))

    def text(self, choice: int, text: str, details: dict[str, object] | None = None) -> bytes:
        if details:
            return self._chunk(choice, {"content": text}, None, details)
        frame = self._choice_to_frame.get(choice)
        if frame is None:
            before, _, after = self._chunk(choice, {"content": ""}, None).partition(_EMPTY_CONTENT)
            frame = self._choice_to_frame[choice] = before + _EMPTY_CONTENT[:-2], after
        return b"%b%b%b" % (frame[0], _encode(text), frame[1])

    def reasoning(self, choice: int, text: str, details: dict[str, object] | None = None) -> bytes:
        return self._chunk(choice, {"reasoning_content": text}, None, details)

    def call_start(
        self, choice: int, index: int, call: CompletedCall, details: dict[str, object] | None = None
    ) -> bytes:
        """Returns the chunk that begins the call with number `index` of a choice; its arguments are still empty."""
        return self._chunk(choice, {"tool_calls": [{"index": index} | call.to_json()]}, None, details)

    def call_arguments(self, choice: int, index: int, text: str, details: dict[str, object] | None = None) -> bytes:
        """Returns the chunk with the next piece of a call's arguments."""
        delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return self._chunk(choice, delta, None, details)

    def details(self, choice: int, details: dict[str, object]) -> bytes:
        """Returns a chunk that carries only token ids or log-probabilities."""
        return self._chunk(choice, {}, None, details)

    def finish(
        self, choice: int, reason: str, details: dict[str, object] | None = None, degraded: Degraded = ()
    ) -> bytes:
        return self._chunk(choice, {}, reason, details, extra=weft_part(degraded))

    def last(self, usage: Usage, degraded: Degraded = (), explained: Explained = None) -> bytes:
        """Returns the chunk after the last one of the choices, with what concerns the whole answer: the usage, and the
        record of the request. It returns nothing if the client asked for neither."""
        if not self.has_usage_chunk and explained is None:
            return b""
        counted = {"usage": usage.to_json()} if self.has_usage_chunk else {}
        return sse_event(self._head | {"choices": []} | counted | weft_part(degraded, explained))

    def _chunk(
        self,
        choice: int,
        delta: Mapping[str, object],
        finish_reason: str | None,
        details: dict[str, object] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> bytes:
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        whole = {"choices": [entry | (details or {})]} | self._usage | dict(extra or {})
        return sse_event(self._head | whole)


def model_object(
    name: str, created: int, max_model_len: int, modalities: Sequence[str], voices: Sequence[str] = ()
) -> dict[str, object]:
    """Returns the model as a list of models has it. `modalities` names the media that it takes here, beside text, and
    `voices` those in which it speaks."""
    spoken: dict[str, object] = {"output_modalities": ["text", "audio"], "voices": list(voices)} if voices else {}
    return spoken | {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "weft",
        "max_model_len": max_model_len,
        "input_modalities": ["text", *modalities],
    }


def adapter_origin(source: str, parent: str) -> dict[str, object]:
    """Returns what the object of an adapter has besides that of a model, as vLLM writes it: where its files come from,
    and the model that it changes."""
    return {"root": source, "parent": parent}


def _ids(prompt_token_ids: Sequence[int] | None) -> dict[str, object]:
    return {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
