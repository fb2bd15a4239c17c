"""Refuses parameters that change the output and that Weft can't honour yet, unless their value asks for what happens
anyway.

To honour one, remove its row and add the field to `ChatRequest`. The module knows nothing of the parameters that are
honoured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fabric.errors import InvalidRequest

Neutral = Callable[[object], bool]


def _is_empty(value: object) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""


def _equals(*neutral: object) -> Neutral:
    def is_neutral(value: object) -> bool:
        return value is None or any(type(value) is not bool and value == each for each in neutral)

    return is_neutral


def _is(neutral: bool) -> Neutral:
    def is_neutral(value: object) -> bool:
        return value is None or value is neutral

    return is_neutral


def _is_text_only(value: object) -> bool:
    return value is None or value == ["text"]


PARAM_TO_NEUTRAL: dict[str, Neutral] = {
    # These parameters are OpenAI's.
    "tools": _is_empty,
    "tool_choice": _equals("none", "auto"),
    "functions": _is_empty,
    "function_call": _equals("none", "auto"),
    "modalities": _is_text_only,
    "audio": _is_empty,
    "prediction": _is_empty,
    "reasoning_effort": _equals("none"),
    "verbosity": _equals("medium"),
    "web_search_options": _is_empty,
    # These parameters are vLLM's.
    "length_penalty": _equals(1),
    "best_of": _equals(1),
    "use_beam_search": _is(False),
    "bad_words": _is_empty,
    "allowed_token_ids": _is_empty,
    "prompt_logprobs": _is_empty,
    "echo": _is(False),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
    "add_special_tokens": _is(False),
    "skip_special_tokens": _is(True),
    "include_stop_str_in_output": _is(False),
    "truncate_prompt_tokens": _is_empty,
    "documents": _is_empty,
    "chat_template": _is_empty,
    "chat_template_kwargs": _is_empty,
    "media_io_kwargs": _is_empty,
    "logits_processors": _is_empty,
    "guided_grammar": _is_empty,
}


def refuse_unsupported(extra: Mapping[str, object]) -> None:
    """Raises InvalidRequest naming the first unsupported field. `extra` holds the fields beyond those of
    `ChatRequest`."""
    for name, value in extra.items():
        is_neutral = PARAM_TO_NEUTRAL.get(name)
        if is_neutral is not None and not is_neutral(value):
            raise InvalidRequest(f"{name} is not supported by this server", param=name)
