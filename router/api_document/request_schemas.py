"""Makes the JSON schemas of requests from the models of `router.api` that parse them, so that a field has one
definition.

What the models leave to later checks is described here: the parts of a message's content, and lists that are read item
by item. A schema takes everything that the server takes; limits that only the model or the configuration know are not
in it, and a request that exceeds one is answered 400.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.api import (
    FILE,
    IMAGE_EMBEDS,
    PART_TYPE_TO_MODALITY,
    TRANSCRIPT_FORMATS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponsesRequest,
    SpeechRequest,
    TokenizeRequest,
)

Schema = dict[str, Any]
MODELS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    SpeechRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
REF = "#/components/schemas/"
FIELD_TO_DESCRIPTION = {
    "model": "The name of the served model, or of one of its adapters.",
    "messages": "The conversation so far, the oldest message first.",
    "prompt": "The text to go on with, or its token ids, or a list of either.",
    "max_tokens": "Limits the generated tokens.",
    "max_completion_tokens": "Limits the generated tokens; it is the newer name of `max_tokens`, and wins over it.",
    "max_output_tokens": "Limits the generated tokens.",
    "temperature": "Divides the logits before a token is sampled; 0 always takes the most probable token.",
    "top_p": "Samples only from the most probable tokens whose probabilities add up to this.",
    "top_k": "Samples only from this many most probable tokens; 0 and -1 take all.",
    "min_p": "Samples only from tokens with at least this share of the largest probability.",
    "repetition_penalty": "Divides the scores of tokens that were there before; 1 changes nothing.",
    "presence_penalty": "Is subtracted from the scores of tokens that the answer has.",
    "frequency_penalty": "Is subtracted from the score of a token for each time that the answer has it.",
    "seed": "Makes the sampling repeatable.",
    "stop": "Ends the answer before any of these strings.",
    "stop_token_ids": "Ends the answer at any of these tokens.",
    "ignore_eos": "Goes on after the model's own end of the answer.",
    "min_tokens": "Generates at least this many tokens.",
    "n": "The number of choices.",
    "stream": "Asks for the answer as server-sent events, while it is made.",
    "stream_options": "Options of a streamed answer.",
    "include_usage": "Asks for a chunk with the token counts, ahead of `[DONE]`.",
    "cache_salt": "Keeps the caches of requests with different salts apart.",
    "user": "Is tolerated, and changes nothing.",
    "response_format": "Makes the answer JSON (`json_object`), or JSON of a schema (`json_schema`).",
    "guided_json": "Makes the answer JSON of this schema.",
    "guided_regex": "Makes the answer match this regular expression.",
    "guided_choice": "Makes the answer one of these texts.",
    "logprobs": "Asks for the log-probabilities of the tokens of the answer.",
    "top_logprobs": "Asks for this many most probable tokens at each position.",
    "tools": "The functions that the model may call.",
    "tool_choice": "Says whether the model may, must or must not call a function, and which one.",
    "input": "What the model is asked for.",
    "encoding_format": "Asks for numbers, or for base64 of little-endian float32.",
    "dimensions": "Must be the size of the model's embeddings.",
    "instructions": "Is a message of the system, ahead of the input.",
    "tokens": "The ids of the tokens.",
    "add_generation_prompt": "Says whether the prompt ends where an answer begins; in a chat it does by default.",
    "continue_final_message": "Ends the prompt where the content of the last message ends.",
    "return_token_strs": "Asks for the text of each token.",
    "mm_processor_kwargs": "Says how the media of the request are sampled.",
    "weft": "Options that only Weft has.",
    "role": "Says who wrote the message.",
    "audio": "Says how a spoken answer sounds.",
    "speed": "Is 1: the model speaks at one speed.",
}
"""Describes the fields that have OpenAI's meaning, or vLLM's, and no docstring of their own."""
UUID: Schema = {
    "type": ["string", "null"],
    "minLength": 1,
    "maxLength": 256,
    "description": "The client's own name for the medium; later requests may send the name alone.",
}
IMAGE_DETAILS = ["auto", "low", "high", "original", None]
MODALITY_TO_NOUN = {"image": "picture", "audio": "sound", "video": "video"}


def request_schemas(modalities: Collection[str], *, takes_features: bool = False) -> dict[str, Schema]:
    """Returns the schemas of all requests and of what they consist of, by name. Contents of messages have only parts
    of the `modalities` that are served, and features of pictures only if they are taken."""
    _, made = models_json_schema([(model, "validation") for model in MODELS], ref_template=REF + "{model}")
    schemas: dict[str, Schema] = {name: _tidied(schema) for name, schema in made["$defs"].items()}
    parts = part_schemas(modalities, takes_features=takes_features)
    content = [{"type": "string"}, {"type": "array", "minItems": 1, "items": any_of(parts)}, {"type": "null"}]
    described = "A text, or the parts of which the message consists; only an assistant's message may have none."
    schemas[ChatMessage.__name__]["properties"]["content"] = {"anyOf": content, "description": described}
    _refine(schemas)
    return schemas | parts | {"InputItem": input_item(parts), "TranscriptionForm": transcription_form()}


def transcription_form() -> Schema:
    """Returns the schema of the form that asks for a transcript, whose fields are texts and one file."""
    text = {"type": "string"}
    return {
        "type": "object",
        "required": ["file", "model"],
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream", "description": "The sound."},
            "model": text | {"description": FIELD_TO_DESCRIPTION["model"]},
            "language": text | {"description": "The language that is spoken, as a code such as `en`."},
            "prompt": text | {"description": "Guides the model."},
            "response_format": {"enum": list(TRANSCRIPT_FORMATS), "description": "The form of a whole answer."},
            "include[]": {
                "type": "array",
                "items": {"enum": ["logprobs"]},
                "description": "Asks for the log-probabilities of the tokens, in the format `json`.",
            },
            "temperature": {"type": "number", "minimum": 0, "maximum": 2},
            "stream": {"enum": ["true", "false"], "description": FIELD_TO_DESCRIPTION["stream"]},
        },
    }


def ref(name: str) -> Schema:
    """Returns a reference to the schema with this name."""
    return {"$ref": REF + name}


def any_of(names: Collection[str]) -> Schema:
    """Returns the schema of what fits one of the named schemas."""
    return {"anyOf": [ref(name) for name in names]}


def _tidied(schema: Schema) -> Schema:
    """Returns a schema of pydantic's without what says nothing: titles that repeat names, and defaults of null."""
    schema.pop("title", None)
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        if field.get("default", 0) is None:
            del field["default"]
        described = field.get("description") or FIELD_TO_DESCRIPTION.get(name)
        if described:
            field["description"] = " ".join(described.split())
    return schema


def _refine(schemas: dict[str, Schema]) -> None:
    """Describes what the models read in steps of their own."""
    messages = {"type": "array", "minItems": 1, "items": ref("ChatMessage")}
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        stop = schemas[name]["properties"]["stop"]
        stop["anyOf"] = [{"type": "string"}, *stop["anyOf"]]
    for name in ("EmbeddingRequest", "TokenizeRequest"):
        schemas[name]["properties"]["messages"]["anyOf"][0] = messages
    schemas["TokenizeRequest"]["properties"]["tools"]["anyOf"][0]["items"] = ref("FunctionTool")
    schemas["ResponsesRequest"]["properties"]["input"]["anyOf"][1]["items"] = ref("InputItem")
    for name, field in (("CompletionRequest", "prompt"), ("EmbeddingRequest", "input")):
        for kind in schemas[name]["properties"][field]["anyOf"]:
            if kind["type"] == "array":
                kind["minItems"] = 1
                if kind["items"]["type"] == "array":
                    kind["items"]["minItems"] = 1


# ------------------------------------------------------------ the content of messages


def part_schemas(modalities: Collection[str], *, takes_features: bool) -> dict[str, Schema]:
    """Returns the schemas of the parts of a message's content, by name."""
    schemas = {
        "TextPart": _part("text", {"text": {"type": "string"}}, "A text."),
        "RefusalPart": _part("refusal", {"refusal": {"type": "string"}}, "An assistant's refusal."),
    }
    for part_type, modality in PART_TYPE_TO_MODALITY.items():
        if modality in modalities and part_type not in ("input_audio", IMAGE_EMBEDS):
            noun = MODALITY_TO_NOUN.get(modality, modality)
            schemas[f"{modality.capitalize()}Part"] = _part(part_type, {part_type: _source(modality)}, f"A {noun}.")
    if "audio" in modalities:
        sound = {"data": {"type": "string", "description": "base64"}, "format": {"type": "string"}}
        content = {"type": ["object", "null"], "properties": sound}
        schemas["InputAudioPart"] = _part("input_audio", {"input_audio": content}, "A sound, as base64.")
    if takes_features:
        schemas["ImageEmbedsPart"] = _features_part()
    file = {name: {"type": ["string", "null"]} for name in ("file_data", "file_url", "filename")}
    described = "A text file, or a medium that the model takes, with its content in a `data:` URL."
    content = {"type": ["object", "null"], "properties": file | {"uuid": UUID}}
    schemas["FilePart"] = _part(FILE, {FILE: content}, described)
    return schemas


def _features_part() -> Schema:
    tensor = {"type": ["string", "null"], "description": "A file in the safetensors format, as base64."}
    numbers: Schema = {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "array"}]}}
    fields = {"uuid": UUID, IMAGE_EMBEDS: tensor}
    for name, meaning in (
        ("image_grid_thw", "Holds (1, height, width) in patches, for models that place tokens by them."),
        ("image_sizes", "Holds (height, width) in pixels, for models whose number of tokens follows from them."),
    ):
        fields[name] = {"anyOf": [tensor, numbers], "description": meaning}
    content = {"anyOf": [tensor, {"type": "object", "properties": fields, "additionalProperties": False}]}
    described = "The features of a picture, computed elsewhere: a tensor of the shape (tokens, width)."
    return _part(IMAGE_EMBEDS, {IMAGE_EMBEDS: content}, described)


def _source(modality: str) -> Schema:
    """Returns the schema of what names a medium: a URL, alone or with further fields."""
    url = {"type": ["string", "null"], "description": "A `data:` URL, or `https:` where the operator allows it."}
    details = [each for each in IMAGE_DETAILS if each != "low" or modality == "image"]
    fields = {"url": url, "detail": {"enum": details}, "uuid": UUID}
    return {"anyOf": [{"type": "string"}, {"type": "object", "properties": fields}, {"type": "null"}]}


def _part(part_type: str, content: Mapping[str, Schema], description: str) -> Schema:
    is_text = part_type in ("text", "refusal")
    return {
        "type": "object",
        "description": description,
        "required": ["type", *content] if is_text else ["type"],
        "properties": {"type": {"const": part_type}, **content, **({} if is_text else {"uuid": UUID})},
    }


def _input_media() -> list[Schema]:
    """Returns the schemas of the parts that only the input of a response may have."""
    text = {"type": ["string", "null"]}
    url = text | {"description": "A `data:` URL, or `https:` where the operator allows it."}
    image = {"image_url": url, "detail": {"enum": IMAGE_DETAILS}, "uuid": UUID}
    file = {"file_data": text, "file_url": text, "filename": text, "uuid": UUID}
    return [
        {"type": "object", "required": ["type"], "properties": {"type": {"const": kind}} | fields}
        for kind, fields in (("input_image", image), ("input_file", file))
    ]


def input_item(parts: Collection[str]) -> Schema:
    """Returns the schema of one item of the input of a response."""
    texts: Schema = {"type": "object", "required": ["type", "text"], "properties": {"text": {"type": "string"}}}
    texts["properties"]["type"] = {"enum": ["input_text", "output_text", "text"]}
    kinds = [texts, *_input_media(), *(ref(name) for name in parts if name != "TextPart")]
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": kinds}}, {"type": "null"}]}
    types = ["message", "function_call", "function_call_output", "reasoning"]
    return {
        "type": "object",
        "description": "A message, a call of a function, what it has returned, or the reasoning of an earlier answer.",
        "properties": {
            "type": {"enum": types, "default": "message"},
            "role": {"type": "string", "description": "Is that of a message."},
            "content": content | {"description": "Holds a text, or parts such as `input_text` and `input_image`."},
            "call_id": {"type": "string", "description": "Connects a call with what it has returned."},
            "name": {"type": "string", "description": "Names the function of a call."},
            "arguments": {"type": "string", "description": "Holds the arguments of a call, as JSON."},
            "output": content | {"description": "Holds what a function has returned."},
        },
    }
