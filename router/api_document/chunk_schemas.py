"""Describes the events of streamed answers as JSON schemas, closed like those of `answer_schemas`.

Each schema is that of the JSON in one event's `data`. The events are written in `router.api`.
"""

from __future__ import annotations

from router.api_document.answer_schemas import (
    COUNT,
    FINGERPRINT,
    FINISH,
    HEAD,
    IDS_ASKED,
    OPEN,
    TEXT,
    TRANSCRIPT,
    TRANSCRIPT_SCORES,
    WEFT,
    array,
    closed,
    completion_choice,
    const,
    nullable,
    one_of_values,
)
from router.api_document.request_schemas import Schema, any_of, ref


def chunk_schemas() -> dict[str, Schema]:
    """Returns the schemas of events and of what they consist of, by name."""
    return _chat() | _completions() | _responses() | _transcripts() | _speech()


def _chat() -> dict[str, Schema]:
    function = closed({"arguments": TEXT}, {"name": TEXT})
    call = closed({"index": COUNT, "function": function}, {"id": TEXT, "type": const("function")})
    sound = closed({"id": TEXT}, {"transcript": TEXT, "data": TEXT, "expires_at": COUNT})
    pieces = {"content": nullable(TEXT), "reasoning_content": TEXT, "tool_calls": array(call), "audio": sound}
    pieces |= {"refusal": const(None)}
    choice = closed(
        {
            "index": COUNT,
            "delta": closed({}, {"role": const("assistant")} | pieces),
            "logprobs": nullable(ref("ChoiceLogprobs")),
            "finish_reason": nullable(FINISH),
        },
        {"token_ids": IDS_ASKED},
    )
    optional = {"usage": nullable(ref("Usage")), "prompt_token_ids": IDS_ASKED}
    chunk = {"object": const("chat.completion.chunk"), "choices": array(choice)}
    return {
        "ChatCompletionChunk": closed(HEAD | chunk, FINGERPRINT | optional | WEFT),
        "ChatCompletionEvent": any_of(["ChatCompletionChunk", "ErrorAnswer"]),
    }


def _completions() -> dict[str, Schema]:
    choices = array(completion_choice(nullable(one_of_values("stop", "length"))))
    chunk = {"object": const("text_completion"), "choices": choices}
    return {
        "CompletionChunk": closed(HEAD | chunk, {"usage": nullable(ref("Usage"))} | FINGERPRINT | WEFT),
        "CompletionEvent": any_of(["CompletionChunk", "ErrorAnswer"]),
    }


def _transcripts() -> dict[str, Schema]:
    delta = {"type": const("transcript.text.delta"), "delta": TEXT}
    return {
        "TranscriptDelta": closed(delta, TRANSCRIPT_SCORES),
        "TranscriptDone": closed({"type": const("transcript.text.done")} | TRANSCRIPT, TRANSCRIPT_SCORES),
        "TranscriptEvent": any_of(["TranscriptDelta", "TranscriptDone", "ErrorAnswer"]),
    }


def _speech() -> dict[str, Schema]:
    usage = closed({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})
    return {
        "SpeechDelta": closed({"type": const("speech.audio.delta"), "audio": TEXT}),
        "SpeechDone": closed({"type": const("speech.audio.done"), "usage": usage}),
        "SpeechEvent": any_of(["SpeechDelta", "SpeechDone", "ErrorAnswer"]),
    }


def _responses() -> dict[str, Schema]:
    """Returns the schemas of the events of a response. All of them are numbered, and those of an item name it."""
    item = {"item_id": TEXT, "output_index": COUNT}
    part = item | {"content_index": COUNT}
    any_part = any_of(["OutputText", "ReasoningText"])
    whole = ("created", "in_progress", "completed", "incomplete", "failed")
    fields: dict[str, dict[str, Schema]] = {f"response.{name}": {"response": ref("Response")} for name in whole}
    for name in ("added", "done"):
        fields[f"response.output_item.{name}"] = {"output_index": COUNT, "item": ref("OutputItem")}
        fields[f"response.content_part.{name}"] = part | {"part": any_part}
    fields |= {
        "response.output_text.delta": part | {"delta": TEXT, "logprobs": array(OPEN)},
        "response.output_text.done": part | {"text": TEXT, "logprobs": array(OPEN)},
        "response.reasoning_text.delta": part | {"delta": TEXT},
        "response.reasoning_text.done": part | {"text": TEXT},
        "response.function_call_arguments.delta": item | {"delta": TEXT},
        "response.function_call_arguments.done": item | {"arguments": TEXT, "name": TEXT},
        "error": {name: {} for name in ("message", "param", "code")} | {"error": ref("Error")},
    }
    events = [closed({"type": const(kind), "sequence_number": COUNT} | own) for kind, own in fields.items()]
    return {"ResponseEvent": {"anyOf": events, "description": "The event's type is also in its `event` line."}}
