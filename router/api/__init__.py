"""Holds OpenAI's HTTP formats: it reads requests, and writes responses, chunks and errors. It knows nothing of how
requests are served.
"""

from router.api.chat_request import (
    PART_TYPE_TO_MODALITY,
    ChatRequest,
    MediaPart,
    Part,
    TextPart,
    check_context,
    check_limits,
    parse_chat,
    parts_of,
    video_options,
)
from router.api.chat_response import (
    DONE,
    ChoiceText,
    ChunkWriter,
    Head,
    ScoredToken,
    TokenBytes,
    Usage,
    completion,
    error_event,
    logprobs_object,
    model_object,
)
from router.api.http_errors import envelope, http_error, status_of

__all__ = [
    "DONE",
    "PART_TYPE_TO_MODALITY",
    "ChatRequest",
    "ChoiceText",
    "ChunkWriter",
    "Head",
    "MediaPart",
    "Part",
    "ScoredToken",
    "TextPart",
    "TokenBytes",
    "Usage",
    "check_context",
    "check_limits",
    "completion",
    "envelope",
    "error_event",
    "http_error",
    "logprobs_object",
    "model_object",
    "parse_chat",
    "parts_of",
    "status_of",
    "video_options",
]
