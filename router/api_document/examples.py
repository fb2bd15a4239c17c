"""Makes the examples of the document: bodies that the served model takes as they are. A test sends each of them.

Media are small enough to stand in the document. Only media of modalities that are served have examples.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

Body = dict[str, Any]


class Example(NamedTuple):
    """An `Example` is a body that a client may send."""

    name: str
    summary: str
    body: Body


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SHAPE_SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
HELLO: list[object] = [{"role": "user", "content": "Hello!"}]
SHORT: Body = {"max_tokens": 64, "temperature": 0}


class SampleFeatures(NamedTuple):
    """A `SampleFeatures` describes features of a picture that the served model takes."""

    num_tokens: int
    width: int
    """Counts the numbers of each token."""
    grid: tuple[int, int, int] | None = None
    size: tuple[int, int] | None = None
    """Holds (width, height) of the picture."""


MAX_FEATURE_BYTES = 16 * 1024
"""Larger features have no example: the document holds each example in full."""


def chat_examples(model: str, modalities: Collection[str], features: SampleFeatures | None = None) -> list[Example]:
    """Returns examples of `/v1/chat/completions`."""
    hello = {"model": model, "messages": HELLO, **SHORT}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE_SCHEMA}}
    begun = {"messages": [*HELLO, {"role": "assistant", "content": "Hi, I"}], "continue_final_message": True}
    examples = [
        Example("text", "A question", hello),
        Example("continued", "The rest of a message that the client has begun", hello | begun),
        Example("stream", "A streamed answer, with token counts at its end", hello | usage),
        Example("tools", "A function that the model may call", hello | {"tools": [WEATHER_TOOL]}),
        Example("json", "An answer that fits a JSON schema", hello | {"response_format": form}),
        Example("logprobs", "Log-probabilities of two choices", hello | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    ]
    for modality in MODALITY_TO_PART:
        if modality in modalities:
            content = [{"type": "text", "text": "What is this?"}, MODALITY_TO_PART[modality]]
            body = hello | {"messages": [{"role": "user", "content": content}]}
            examples.append(Example(modality, f"A question about {MODALITY_TO_NOUN[modality]}", body))
    if features is not None and 2 * features.num_tokens * features.width <= MAX_FEATURE_BYTES:
        content = [{"type": "text", "text": "What is this?"}, features_part(features)]
        body = hello | {"messages": [{"role": "user", "content": content}]}
        examples.append(Example("image_embeds", "A question about a picture whose features the client has", body))
    return examples


def completion_examples(model: str) -> list[Example]:
    """Returns examples of `/v1/completions`."""
    body = {"model": model, "prompt": "Once upon a time", **SHORT}
    scored = {"prompt": [[72, 105], [72, 111]], "max_tokens": 4, "logprobs": 1}
    return [
        Example("text", "A text to go on with", body),
        Example("stream", "A streamed answer", body | {"stream": True}),
        Example("token_ids", "Two prompts of token ids, with log-probabilities", body | scored),
    ]


def response_examples(model: str, modalities: Collection[str]) -> list[Example]:
    """Returns examples of `/v1/responses`."""
    body = {"model": model, "input": "Hello!", "max_output_tokens": 64, "temperature": 0}
    tool = {"type": "function", **WEATHER_TOOL["function"]}  # type: ignore[dict-item]
    examples = [
        Example("text", "A question", body),
        Example("stream", "A streamed response", body | {"stream": True}),
        Example("tools", "A function that the model may call", body | {"tools": [tool]}),
    ]
    if "image" in modalities:
        content = [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": PICTURE},
        ]
        asked = body | {"input": [{"role": "user", "content": content}]}
        examples.append(Example("image", "A question about a picture", asked))
    return examples


def embedding_examples(model: str) -> list[Example]:
    """Returns examples of `/v1/embeddings`."""
    return [
        Example("text", "One text", {"model": model, "input": "Hello!"}),
        Example("texts", "Two texts, as base64", {"model": model, "input": ["Hi", "Ho"], "encoding_format": "base64"}),
    ]


def tokenize_examples(model: str) -> list[Example]:
    """Returns examples of `/tokenize`."""
    messages = [{"role": "user", "content": "Hello!"}]
    return [
        Example("prompt", "A text", {"model": model, "prompt": "Hello!", "return_token_strs": True}),
        Example("messages", "A conversation", {"model": model, "messages": messages}),
    ]


def detokenize_examples(model: str) -> list[Example]:
    """Returns examples of `/detokenize`."""
    return [Example("tokens", "Two tokens", {"model": model, "tokens": [72, 105]})]


# ------------------------------------------------------------ small media


def plain_picture(side: int = 32) -> bytes:
    """Returns a red square as a PNG file."""
    rows = (b"\0" + b"\xd0\x20\x20" * side) * side
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def silence(seconds: float = 0.1, rate: int = 8000) -> bytes:
    """Returns silence as a WAV file of 8-bit samples."""
    samples = b"\x80" * round(seconds * rate)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate, 1, 8)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def features_part(features: SampleFeatures) -> Body:
    """Returns a part with features that are all zero, as float16 in the safetensors format."""
    rows = np.zeros((features.num_tokens, features.width), np.float16)
    value: Body = {"image_embeds": base64.b64encode(save({"image_embeds": rows})).decode()}
    if features.grid is not None:
        value["image_grid_thw"] = list(features.grid)
    if features.size is not None:
        value["image_sizes"] = [features.size[1], features.size[0]]
    return {"type": "image_embeds", "image_embeds": value}


PICTURE = "data:image/png;base64," + base64.b64encode(plain_picture()).decode()
MODALITY_TO_NOUN = {"image": "a picture", "audio": "a sound"}
MODALITY_TO_PART: dict[str, Body] = {
    "image": {"type": "image_url", "image_url": {"url": PICTURE}},
    "audio": {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(silence()).decode(), "format": "wav"},
    },
}
"""Maps a modality to an example of a part. Videos have none, because the smallest ones take kilobytes."""
