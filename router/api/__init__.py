"""Holds OpenAI's HTTP formats, so that the rest of the router works on values of its own.

`chat_request` reads and checks a request, `chat_response` writes answers and their chunks, `http_errors` gives each
error its status and its envelope, and `field_errors` puts what is wrong with a field into words. `router.prompt` makes
prompts from what `parse_chat` and `parts_of` return, `router.run` collects a `Usage` and log-probabilities, and
`router.edge` sends what `completion`, `ChunkWriter` and `http_error` write. `deploy.config` uses `describe_flaw` for
the keys of a config file. The folder knows nothing of HTTP connections, or of how requests are served.
"""

from router.api.chat_request import (
    PART_TYPE_TO_MODALITY,
    ChatRequest,
    MediaPart,
    Part,
    TextPart,
    check_context,
    check_limits,
    model_not_found,
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
from router.api.field_errors import describe_flaw, shown
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
    "describe_flaw",
    "envelope",
    "error_event",
    "http_error",
    "logprobs_object",
    "model_not_found",
    "model_object",
    "parse_chat",
    "parts_of",
    "shown",
    "status_of",
    "video_options",
]
