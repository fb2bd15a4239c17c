"""Holds OpenAI's HTTP formats, so that the rest of the router works on values of its own.

Requests: `request_body` parses JSON, `generation_fields` defines what every endpoint that generates takes, and
`chat_request` (with `chat_message`, `file_part` and `tool_fields`), `completion_request`, `responses_request`,
`embedding_request`, `transcription_request`, `speech_request` and `token_requests` define the rest. Answers:
`answer_parts` holds what answers consist of, `chat_response`, `completion_response` and `responses_answer` write them
and their chunks, and `audio_formats` writes the sound of a spoken one.
Errors: `http_errors` gives each error its status and its envelope, and `field_errors` puts what is wrong with a field
into words. `fixed_limits` lists the limits that no key of the config sets.

`router.prompt` makes prompts from requests, `router.run` collects a `Usage` and log-probabilities, and `router.edge`
sends what the writers return. `deploy.config_file` uses `describe_flaw` for the keys of a config file. The folder knows
nothing of HTTP connections, or of how requests are served.
"""

from router.api.answer_parts import (
    DONE,
    Degraded,
    Explained,
    Head,
    ScoredToken,
    TokenBytes,
    Usage,
    error_event,
    logprobs_object,
    prompt_logprobs_list,
    scores_list,
    sse_event,
    usage_sum,
)
from router.api.audio_formats import FORMAT_TO_MEDIA_TYPE, PCM, WAV, encoded_audio, wav_header
from router.api.chat_message import (
    FILE,
    IMAGE_EMBEDS,
    PART_TYPE_TO_MODALITY,
    ChatMessage,
    MediaPart,
    Part,
    TextPart,
    parts_of,
)
from router.api.chat_request import (
    ChatRequest,
    check_chat,
    check_context,
    check_messages,
    parse_chat,
    video_options,
)
from router.api.chat_response import ChoiceText, ChunkWriter, CompletedCall, adapter_origin, completion, model_object
from router.api.completion_request import CompletionRequest, parse_completion
from router.api.completion_response import CompletionChunkWriter, CompletionText, TextOffset, text_completion
from router.api.embedding_request import (
    EmbeddedChat,
    EmbeddedText,
    EmbeddingRequest,
    check_dimensions,
    embedding_place,
    embeddings_answer,
    parse_embedding,
)
from router.api.field_errors import describe_flaw, shown
from router.api.fixed_limits import FIXED_LIMITS
from router.api.generation_fields import (
    GenerationFields,
    TokenDetailFields,
    check_generation,
    check_model,
    check_scores,
    model_not_found,
    num_prompt_scores,
)
from router.api.http_errors import ERROR_TO_STATUS, envelope, http_error, status_of
from router.api.request_body import quoted
from router.api.responses_answer import ResponseWriter
from router.api.responses_request import ResponsesChat, ResponsesRequest, parse_responses
from router.api.speech_request import Speech, SpeechRequest, parse_speech
from router.api.token_requests import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
    text_answer,
    tokens_answer,
)
from router.api.tool_fields import ToolCall, chosen_names
from router.api.transcription_request import TRANSCRIPT_FORMATS, Transcription, parse_transcription

__all__ = [
    "DONE",
    "ERROR_TO_STATUS",
    "FILE",
    "FIXED_LIMITS",
    "FORMAT_TO_MEDIA_TYPE",
    "IMAGE_EMBEDS",
    "PART_TYPE_TO_MODALITY",
    "PCM",
    "TRANSCRIPT_FORMATS",
    "WAV",
    "ChatMessage",
    "ChatRequest",
    "ChoiceText",
    "ChunkWriter",
    "CompletedCall",
    "CompletionChunkWriter",
    "CompletionRequest",
    "CompletionText",
    "Degraded",
    "DetokenizeRequest",
    "EmbeddedChat",
    "EmbeddedText",
    "EmbeddingRequest",
    "Explained",
    "GenerationFields",
    "Head",
    "MediaPart",
    "Part",
    "ResponseWriter",
    "ResponsesChat",
    "ResponsesRequest",
    "ScoredToken",
    "Speech",
    "SpeechRequest",
    "TextOffset",
    "TextPart",
    "TokenBytes",
    "TokenDetailFields",
    "TokenizeRequest",
    "ToolCall",
    "Transcription",
    "Usage",
    "adapter_origin",
    "check_chat",
    "check_context",
    "check_dimensions",
    "check_generation",
    "check_messages",
    "check_model",
    "check_scores",
    "chosen_names",
    "completion",
    "describe_flaw",
    "embedding_place",
    "embeddings_answer",
    "encoded_audio",
    "envelope",
    "error_event",
    "http_error",
    "logprobs_object",
    "model_not_found",
    "model_object",
    "num_prompt_scores",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_embedding",
    "parse_responses",
    "parse_speech",
    "parse_tokenize",
    "parse_transcription",
    "parts_of",
    "prompt_logprobs_list",
    "quoted",
    "scores_list",
    "shown",
    "sse_event",
    "status_of",
    "text_answer",
    "text_completion",
    "tokens_answer",
    "usage_sum",
    "video_options",
    "wav_header",
]
