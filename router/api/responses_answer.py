"""Builds the answers of `/v1/responses` as JSON in OpenAI's shapes: whole responses, and the events of a streamed one.

A `ResponseWriter` takes the pieces of the answer in order and collects the items of the output; each call returns the
events that it makes, for an answer that is streamed. The module knows nothing of how an answer is made.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fabric.contracts import WeftError
from router.api.answer_parts import Degraded, Explained, Head, Usage, sse_event, weft_part
from router.api.http_errors import error_object
from router.api.responses_request import ResponsesRequest

Logprobs = Sequence[Mapping[str, object]]


class ResponseWriter:
    """A `ResponseWriter` writes one response. At most one item of its output is open, to which pieces are added."""

    def __init__(self, head: Head, request: ResponsesRequest) -> None:
        self._fields = _echo(request) | {
            "id": head.completion_id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
        }
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._logprobs: list[Mapping[str, object]] = []
        self._is_open = False
        self._num_events = 0
        self._reason: str | None = None

    # ------------------------------------------------------------ pieces

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, text: str, logprobs: Logprobs = ()) -> bytes:
        """Adds a piece of the text."""
        events = self._open("message", {"id": _new_id("msg"), "role": "assistant", "content": []}, _text_part)
        self._texts.append(text)
        self._logprobs += logprobs
        return events + self._delta("response.output_text.delta", text, content_index=0, logprobs=list(logprobs))

    def reasoning(self, text: str) -> bytes:
        """Adds a piece of the reasoning."""
        events = self._open("reasoning", {"id": _new_id("rs"), "summary": [], "content": []}, _reasoning_part)
        self._texts.append(text)
        return events + self._delta("response.reasoning_text.delta", text, content_index=0)

    def call_start(self, call_id: str, name: str) -> bytes:
        """Begins a call of a tool."""
        events = self._close()
        item = {"id": _new_id("fc"), "call_id": call_id, "name": name, "arguments": ""}
        return events + self._open("function_call", item, None)

    def call_arguments(self, text: str) -> bytes:
        """Adds a piece of the arguments of the latest call."""
        self._texts.append(text)
        return self._delta("response.function_call_arguments.delta", text)

    def finish(self, reason: str, is_call_open: bool = False) -> bytes:
        """Ends the output. The reason `length` makes the response incomplete; `is_call_open` says that the arguments of
        the latest call were cut, so that no event may say that they are done."""
        self._reason = reason
        return self._close("incomplete" if reason == "length" or is_call_open else "completed", is_call_open)

    # ------------------------------------------------------------ ends

    def completed(self, usage: Usage, degraded: Degraded = (), explained: Explained = None) -> bytes:
        """Returns the last event of a response that was made."""
        response = self._final(usage) | weft_part(degraded, explained)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: WeftError) -> bytes:
        """Returns the last events of a response that has failed; SDKs raise an exception on the second one."""
        described = error_object(error)
        reported = {"code": "server_error", "message": error.message}
        events = self._event("response.failed", response=self._response("failed") | {"error": reported})
        return events + self._event("error", **described, error=described)

    def whole(self, usage: Usage, degraded: Degraded = (), explained: Explained = None) -> bytes:
        """Returns the body of a response that is not streamed."""
        return msgspec.json.encode(self._final(usage) | weft_part(degraded, explained))

    # ------------------------------------------------------------ helpers

    def _final(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._reason == "length"
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.num_completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        return self._fields | {"status": status, "output": [dict(item) for item in self._items]}

    def _open(self, kind: str, item: dict[str, Any], part: Any) -> bytes:
        """Opens an item, unless one of this kind is open that takes more pieces."""
        if self._is_open and part is not None and self._items[-1]["type"] == kind:
            return b""
        events = self._close()
        self._items.append({"type": kind, "status": "in_progress"} | item)
        self._is_open = True
        events += self._event("response.output_item.added", output_index=self._index, item=self._items[-1])
        if part is not None:
            events += self._part_event("added", part("", []))
        return events

    def _close(self, status: str = "completed", is_call_open: bool = False) -> bytes:
        """Closes the open item, if there is one."""
        if not self._is_open:
            return b""
        item, text, logprobs = self._items[-1], "".join(self._texts), self._logprobs
        self._texts, self._logprobs, self._is_open = [], [], False
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            events = b"" if is_call_open else self._item_event(done, arguments=text, name=item["name"])
        elif item["type"] == "message":
            part = _text_part(text, logprobs)
            item["content"] = [part]
            events = self._item_event("response.output_text.done", content_index=0, text=text, logprobs=logprobs)
            events += self._part_event("done", part)
        else:
            part = _reasoning_part(text, ())
            item["content"] = [part]
            events = self._item_event("response.reasoning_text.done", content_index=0, text=text)
            events += self._part_event("done", part)
        return events + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _delta(self, kind: str, text: str, **fields: object) -> bytes:
        return self._item_event(kind, delta=text, **fields)

    def _part_event(self, kind: str, part: object) -> bytes:
        return self._item_event(f"response.content_part.{kind}", content_index=0, part=part)

    def _item_event(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        payload = fields | {"type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return sse_event(payload, kind)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _text_part(text: str, logprobs: Logprobs) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _reasoning_part(text: str, _: Logprobs) -> dict[str, object]:
    return {"type": "reasoning_text", "text": text}


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of a response that repeat the request, with the defaults that applied."""
    extra = request.model_extra or {}
    text = {} if request.text is None else request.text.model_dump(exclude_none=True)
    reasoning = request.reasoning
    return {
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": extra.get("max_tool_calls"),
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": extra.get("prompt_cache_key"),
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": extra.get("safety_identifier"),
        "service_tier": "flex" if request.service_tier == "flex" else "default",
        "store": False,
        "background": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
