"""Describes the answers of the API as JSON schemas.

An object without `"additionalProperties": True` is closed, so that a test which compares real answers with these
schemas fails when an answer gains a field that is not described. The answers are written in `router.api`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.api_document.request_schemas import Schema, ref
from router.observe import ENCODER_NUMBERS, WORKER_NUMBERS

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
IDS: Schema = {"type": "array", "items": COUNT}
OPEN: Schema = {"type": "object", "additionalProperties": True}


def closed(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None, about: str = "") -> Schema:
    """Returns the schema of an object with these fields and no others."""
    properties = {**required, **(optional or {})}
    schema = {"type": "object", "required": [*required], "properties": properties, "additionalProperties": False}
    return schema | ({"description": about} if about else {})


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def const(value: object) -> Schema:
    return {"const": value}


def one_of_values(*values: object) -> Schema:
    return {"enum": [*values]}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def about(description: str, schema: Schema) -> Schema:
    """Returns a schema with a description."""
    return schema | {"description": description}


FINISH = one_of_values("stop", "length", "tool_calls")
CALL = closed(
    {"id": TEXT, "type": const("function"), "function": closed({"name": TEXT, "arguments": TEXT})},
    about="A call of a function; its arguments are JSON.",
)
HEAD = {"id": TEXT, "created": about("The Unix time in seconds.", COUNT), "model": TEXT}
FINGERPRINT = {"system_fingerprint": about("Names the version of the server and of the model.", TEXT)}
IDS_ASKED = about("Sent if `return_token_ids` asks for them.", IDS)
PROMPT_LOGPROBS = nullable(array(nullable(OPEN)))
WEFT = {"weft": ref("WeftPart")}


TRANSCRIPT_USAGE = closed(
    {
        "type": const("tokens"),
        "input_tokens": COUNT,
        "input_token_details": closed({"text_tokens": COUNT, "audio_tokens": COUNT}),
        "output_tokens": COUNT,
        "total_tokens": COUNT,
    }
)
TRANSCRIPT = {"text": TEXT, "usage": TRANSCRIPT_USAGE}
TRANSCRIPT_SCORES = {"logprobs": about("Sent if `include[]` asks for them.", array(ref("TokenScore")))}


def answer_schemas() -> dict[str, Schema]:
    """Returns the schemas of whole answers and of what they consist of, by name."""
    return _shared() | _chat() | _completions() | _responses() | _embeddings_and_tokens() | _cluster()


def _shared() -> dict[str, Schema]:
    fields = {
        "message": about("Says what is wrong, what was received and what is accepted.", TEXT),
        "type": one_of_values("invalid_request_error", "rate_limit_error", "server_error"),
        "param": about("The place in the body that is wrong.", {"type": ["string", "null"]}),
        "code": about("The name of the error, which stays the same over versions.", TEXT),
    }
    token = {"token": TEXT, "logprob": NUMBER, "bytes": nullable(IDS)}
    prompt = {f"{kind}_tokens": COUNT for kind in ("cached", "text", "image", "audio")}
    details = {**closed(prompt), "additionalProperties": COUNT}
    completion = closed({f"{kind}_tokens": COUNT for kind in ("text", "audio", "reasoning")})
    counts = {f"{kind}_tokens": COUNT for kind in ("prompt", "completion", "total")}
    weft = {
        "degraded": about("The media that the model did not get as they were sent.", array(OPEN)),
        "explain": about("The record of the request, as `/weft/requests/{request_id}` gives it.", OPEN),
    }
    return {
        "Error": closed(fields, about="What went wrong, in OpenAI's form."),
        "ErrorAnswer": closed({"error": ref("Error")}, about="The body of every refusal."),
        "Usage": closed(
            counts | {"prompt_tokens_details": details, "completion_tokens_details": completion},
            about="The exact token counts of a request.",
        ),
        "TokenScore": closed(token),
        "TokenLogprob": closed(token | {"top_logprobs": array(ref("TokenScore"))}),
        "ChoiceLogprobs": closed({"content": nullable(array(ref("TokenLogprob"))), "refusal": {"type": "null"}}),
        "WeftPart": closed({}, weft, "What only Weft's answers have."),
    }


def _chat() -> dict[str, Schema]:
    sound = closed(
        {"id": TEXT, "data": TEXT, "expires_at": COUNT, "transcript": TEXT},
        about="The sound of a spoken answer as base64, and its text.",
    )
    message = closed(
        {"role": const("assistant"), "content": {"type": ["string", "null"]}, "refusal": {"type": "null"}},
        {"reasoning_content": TEXT, "tool_calls": array(ref("FunctionCall")), "audio": sound},
    )
    choice = closed(
        {"index": COUNT, "message": message, "logprobs": nullable(ref("ChoiceLogprobs")), "finish_reason": FINISH},
        {"token_ids": IDS_ASKED},
    )
    whole = {"object": const("chat.completion"), "choices": array(choice), "usage": ref("Usage")}
    asked = {"prompt_token_ids": IDS_ASKED, "prompt_logprobs": PROMPT_LOGPROBS}
    return {"FunctionCall": CALL, "ChatCompletion": closed(HEAD | whole, FINGERPRINT | asked | WEFT)}


def completion_choice(finish: Schema) -> Schema:
    """Returns the schema of a choice of a text completion."""
    return closed(
        {"index": COUNT, "text": TEXT, "logprobs": nullable(ref("CompletionLogprobs")), "finish_reason": finish},
        {"token_ids": IDS_ASKED, "prompt_token_ids": IDS_ASKED, "prompt_logprobs": PROMPT_LOGPROBS},
    )


def _completions() -> dict[str, Schema]:
    logprobs = {
        "tokens": array(TEXT),
        "token_logprobs": array({"type": ["number", "null"]}),
        "top_logprobs": nullable(array(nullable({"type": "object", "additionalProperties": NUMBER}))),
        "text_offset": IDS,
    }
    choices = array(completion_choice(one_of_values("stop", "length")))
    whole = {"object": const("text_completion"), "choices": choices, "usage": ref("Usage")}
    return {"CompletionLogprobs": closed(logprobs), "Completion": closed(HEAD | whole, FINGERPRINT | WEFT)}


# ------------------------------------------------------------ responses

STATUS = one_of_values("in_progress", "completed", "incomplete", "failed")


def _responses() -> dict[str, Schema]:
    text = {"type": const("output_text"), "text": TEXT, "annotations": array(OPEN), "logprobs": array(OPEN)}
    item = {"id": TEXT, "status": one_of_values("in_progress", "completed", "incomplete")}
    parts = array(ref("OutputText"))
    message = closed(item | {"type": const("message"), "role": const("assistant"), "content": parts})
    thoughts = {"type": const("reasoning"), "summary": array(OPEN), "content": array(ref("ReasoningText"))}
    call = item | {"type": const("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT}
    usage = {
        "input_tokens": COUNT,
        "input_tokens_details": closed({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": closed({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
    return {
        "OutputText": closed(text),
        "ReasoningText": closed({"type": const("reasoning_text"), "text": TEXT}),
        "OutputItem": {"anyOf": [message, closed(item | thoughts), closed(call)]},
        "ResponseUsage": closed(usage),
        "Response": closed(_response_fields(), WEFT, "A response, with the fields of its request."),
    }


def _response_fields() -> dict[str, Schema]:
    maybe_text: Schema = {"type": ["string", "null"]}
    maybe_count: Schema = {"type": ["integer", "null"]}
    return {
        "id": TEXT,
        "object": const("response"),
        "created_at": COUNT,
        "model": TEXT,
        "status": STATUS,
        "output": array(ref("OutputItem")),
        "error": nullable(closed({"code": TEXT, "message": TEXT})),
        "incomplete_details": nullable(closed({"reason": const("max_output_tokens")})),
        "instructions": maybe_text,
        "max_output_tokens": maybe_count,
        "max_tool_calls": {},
        "metadata": {"type": "object", "additionalProperties": TEXT},
        "parallel_tool_calls": {"type": "boolean"},
        "previous_response_id": {"type": "null"},
        "prompt_cache_key": {},
        "reasoning": closed({"effort": maybe_text, "summary": {"type": "null"}}),
        "safety_identifier": {},
        "service_tier": one_of_values("default", "flex"),
        "store": const(False),
        "background": const(False),
        "temperature": NUMBER,
        "text": OPEN,
        "tool_choice": {"type": ["string", "object"]},
        "tools": array(OPEN),
        "top_logprobs": COUNT,
        "top_p": NUMBER,
        "truncation": const("disabled"),
        "usage": nullable(ref("ResponseUsage")),
        "user": maybe_text,
    }


# ------------------------------------------------------------ other answers


def _embeddings_and_tokens() -> dict[str, Schema]:
    numbers = {"anyOf": [array(NUMBER), about("base64 of little-endian float32", TEXT)]}
    entry = closed({"object": const("embedding"), "index": COUNT, "embedding": numbers})
    usage = closed({"prompt_tokens": COUNT, "total_tokens": COUNT})
    texts = nullable(array(TEXT))
    return {
        "Embeddings": closed({"object": const("list"), "data": array(entry), "model": TEXT, "usage": usage}),
        "Tokens": closed({"count": COUNT, "max_model_len": COUNT, "tokens": IDS, "token_strs": texts}),
        "Detokenized": closed({"prompt": TEXT}),
        "Transcript": {"anyOf": [closed(TRANSCRIPT, TRANSCRIPT_SCORES), _verbose_transcript()]},
    }


def _verbose_transcript() -> Schema:
    fields = {"task": const("transcribe"), "language": TEXT, "duration": NUMBER, "text": TEXT}
    usage = closed({"type": const("duration"), "seconds": NUMBER})
    return closed(fields | {"usage": usage}, about="The answer in the format `verbose_json`.")


_POOL = {
    "pool": about("Names the pool of a worker.", TEXT),
    "engine": about("Names the engine with which a worker computes, `weft` or `vllm`.", TEXT),
}


def _picture(member: dict[str, Schema]) -> Schema:
    standing = {
        "member_id": TEXT,
        "host": TEXT,
        "modalities": array(TEXT),
        "state": one_of_values("there", "excluded", "leaving"),
        "report_age_s": {"type": ["number", "null"]},
        "num_open": COUNT,
    }
    number: Schema = {"type": ["number", "null"]}
    link = {"encoder_id": TEXT, "worker_id": TEXT, "link": TEXT}
    return closed(
        {
            "model": TEXT,
            "version": TEXT,
            "router_id": TEXT,
            "num_in_flight": COUNT,
            "num_waiting": COUNT,
            "routers": array(closed(member)),
            "encoders": array(closed(standing | dict.fromkeys(ENCODER_NUMBERS, number))),
            "workers": array(closed(standing | _POOL | dict.fromkeys(WORKER_NUMBERS, number))),
            "links": array(closed(link)),
        }
    )


def _cluster() -> dict[str, Schema]:
    model = {"id": TEXT, "object": const("model"), "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT}
    model["input_modalities"] = array(TEXT)
    spoken = {"output_modalities": array(TEXT), "voices": array(TEXT)}
    origin = {
        "root": about("Says where the files of an adapter come from; a model itself has none.", TEXT),
        "parent": about("Names the model that an adapter changes.", TEXT),
    }
    ready = {
        "status": one_of_values("ready", "waiting", "draining"),
        "num_workers": COUNT,
        "num_encoders": COUNT,
        "modalities_without_encoder": array(TEXT),
    }
    member = {"member_id": TEXT, "kind": TEXT, "host": TEXT, "pid": COUNT, "epoch": {"type": ["integer", "string"]}}
    member["config_flaw"] = TEXT
    stage = {"stage": about("Names the stage of a member that speaks.", TEXT)}
    target = closed({"targets": array(TEXT), "labels": {"type": "object", "additionalProperties": TEXT}})
    summary = {"type": "object", "required": ["request_id", "outcome", "router_id"], "properties": {"request_id": TEXT}}
    return {
        "Model": closed(model, spoken | origin),
        "ModelList": closed({"object": const("list"), "data": array(ref("Model"))}),
        "Liveness": closed({"status": one_of_values("ok", "dead")}, {"message": TEXT}),
        "Readiness": closed(ready, {"stages_without_replica": array(COUNT)}),
        "Members": closed(
            {"version": TEXT, "members": array(closed(member, stage | _POOL)), "routers": array(closed(member))}
        ),
        "ClusterPicture": _picture(member),
        "PrometheusTargets": array(target),
        "RequestList": closed({"requests": array(summary), "routers_without_answer": array(TEXT)}),
        "SpanFile": closed({"traceEvents": array(OPEN), "displayTimeUnit": {"const": "ms"}}),
        "RequestRecord": {"type": "object", "required": ["request_id"], "properties": {"request_id": TEXT}},
    }
