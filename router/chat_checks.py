"""Checks the limits of a chat request that cost nothing to check: names, counts, lengths. It knows nothing of media or
tokens.
"""

from __future__ import annotations

from fabric.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from router.api.request import ChatRequest
from router.config import RouterConfig


def check_limits(chat: ChatRequest, config: RouterConfig, vocab_size: int) -> None:
    """Raises ModelNotFound or InvalidRequest if the request exceeds a limit; `param` names the field."""
    if chat.model != config.model_name:
        raise ModelNotFound(f"the model `{chat.model[:128]}` does not exist", param="model")
    if chat.num_choices > config.max_num_choices:
        raise InvalidRequest(f"n may be at most {config.max_num_choices}, not {chat.num_choices}", param="n")
    if len(chat.messages) > config.max_messages:
        raise InvalidRequest(f"at most {config.max_messages} messages", param="messages")
    if chat.priority is not None and chat.priority < config.min_priority:
        raise InvalidRequest(f"priority may be {config.min_priority} or more, not {chat.priority}", param="priority")
    _check_stops(chat, config, vocab_size)


def _check_stops(chat: ChatRequest, config: RouterConfig, vocab_size: int) -> None:
    stops, stop_ids = chat.stop or [], chat.stop_token_ids or []
    if len(stops) > config.max_stop_strings:
        raise InvalidRequest(f"at most {config.max_stop_strings} stop strings", param="stop")
    if any(not stop or len(stop) > config.max_stop_chars for stop in stops):
        raise InvalidRequest(f"a stop string has 1 to {config.max_stop_chars} characters", param="stop")
    if len(stop_ids) > config.max_stop_token_ids:
        raise InvalidRequest(f"at most {config.max_stop_token_ids} stop token ids", param="stop_token_ids")
    if any(not 0 <= token_id < vocab_size for token_id in stop_ids):
        raise InvalidRequest("a stop token id is not in the vocabulary", param="stop_token_ids")


def check_context(num_prompt_tokens: int, chat: ChatRequest, max_model_len: int) -> None:
    """Raises ContextLengthExceeded if prompt and answer together do not fit into the context."""
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens; the prompt has {num_prompt_tokens}, "
            "and room for one more is needed",
            param="messages",
        )
    wanted = chat.token_limit
    if wanted is not None and num_prompt_tokens + wanted > max_model_len:
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens, but {num_prompt_tokens + wanted} were asked for "
            f"({num_prompt_tokens} in the prompt, {wanted} to generate)",
            param="max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens",
        )
