"""Lists the limits on a request that no key of the config sets, for `weft check`. The module enforces none of them."""

from __future__ import annotations

from router.api.chat_message import MAX_UUID_LENGTH
from router.api.chat_request import MAX_FIRST_CHUNK_FRAMES, MAX_FRAMES, MAX_VOICE_CHARS
from router.api.completion_request import MAX_PROMPTS, MAX_TOKEN_VALUES
from router.api.embedding_request import MAX_INPUTS
from router.api.file_part import MAX_TEXT_BYTES
from router.api.generation_fields import (
    MAX_BIASED_TOKENS,
    MAX_DEADLINE_MS,
    MAX_LISTED_FIELDS,
    MAX_SALT_CHARS,
    MAX_TOP_LOGPROBS,
)
from router.api.request_body import MAX_JSON_VALUES
from router.api.speech_request import MAX_INPUT_CHARS
from router.api.tool_fields import MAX_TOOL_NAME_CHARS, MAX_TOOLS
from router.api.transcription_request import MAX_FIELD_BYTES, MAX_PARTS

FIXED_LIMITS = {
    "JSON values of a body": MAX_JSON_VALUES,
    "JSON values of a body with prompts of token ids": MAX_TOKEN_VALUES,
    "prompts of a completion": MAX_PROMPTS,
    "inputs of a request for embeddings": MAX_INPUTS,
    "parts of a form": MAX_PARTS,
    "bytes of a field of a form": MAX_FIELD_BYTES,
    "bytes of a text file": MAX_TEXT_BYTES,
    "characters of a uuid": MAX_UUID_LENGTH,
    "frames that a request asks for": MAX_FRAMES,
    "characters of a text that is read aloud": MAX_INPUT_CHARS,
    "characters of the name of a voice": MAX_VOICE_CHARS,
    "frames of the first chunk of a spoken answer": MAX_FIRST_CHUNK_FRAMES,
    "tools": MAX_TOOLS,
    "characters of the name of a tool": MAX_TOOL_NAME_CHARS,
    "characters of cache_salt": MAX_SALT_CHARS,
    "entries of logit_bias": MAX_BIASED_TOKENS,
    "alternatives of a token (top_logprobs)": MAX_TOP_LOGPROBS,
    "ms of a deadline": MAX_DEADLINE_MS,
    "unknown fields that are listed": MAX_LISTED_FIELDS,
}
"""Maps what is limited to the limit."""
