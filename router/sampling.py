"""Derives from a chat request how its tokens are drawn and when generation ends. It knows nothing of media or
prompts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from fabric.errors import InvalidRequest
from fabric.messages import SamplingParams, StopConditions
from router.api.request import ChatRequest


def sampling_of(chat: ChatRequest, vocab_size: int, grammar: str = "") -> SamplingParams:
    """Returns the sampling parameters, with OpenAI's defaults. A request without a seed gets one here, so that a
    migrated attempt draws the same tokens. Raises InvalidRequest for a bias on something that is not a token id."""
    return SamplingParams(
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        top_k=max(0, chat.top_k or 0),
        seed=secrets.randbits(63) if chat.seed is None else chat.seed,
        min_p=chat.min_p or 0.0,
        repetition_penalty=1.0 if chat.repetition_penalty is None else chat.repetition_penalty,
        presence_penalty=chat.presence_penalty or 0.0,
        frequency_penalty=chat.frequency_penalty or 0.0,
        num_top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        grammar=grammar,
        logit_bias=tuple(_biases(chat.logit_bias or {}, vocab_size).items()),
    )


def stop_conditions(
    chat: ChatRequest, num_prompt_tokens: int, max_model_len: int, eos_token_ids: Sequence[int]
) -> StopConditions:
    """Returns the stop conditions. A request without a token limit may fill the context. Raises InvalidRequest if
    `min_tokens` is above the limit."""
    room = max_model_len - num_prompt_tokens
    max_tokens = room if chat.token_limit is None else chat.token_limit
    min_tokens = chat.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens ({min_tokens}) is above the limit of {max_tokens} tokens", param="min_tokens")
    return StopConditions(
        max_tokens=max_tokens,
        eos_token_ids=tuple(eos_token_ids),
        stop_token_ids=tuple(chat.stop_token_ids or ()),
        ignore_eos=bool(chat.ignore_eos),
        min_tokens=min_tokens,
    )


def _biases(logit_bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in logit_bias.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            raise InvalidRequest(f"logit_bias: {name[:32]!r} is no token id of this model", param="logit_bias")
        biases[int(name)] = bias
    return biases
