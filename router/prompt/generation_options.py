"""Derives from a request how its tokens are drawn (`sampling_of`), when generation ends (`stop_conditions`), and
what its output must match (`grammar_of`): all that a worker is told about generating, besides the prompt.

`grammar_of` turns what a client asks for as structured output into one grammar in llguidance's notation, or refuses it
with a 400 that states the reason. It supports OpenAI's `response_format` and vLLM's `structured_outputs` and
`guided_*`. `check_grammar` compiles it once, without a tokenizer; the worker compiles it again with one.

The module knows nothing of media or prompts, and draws no tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher

from fabric.contracts import InvalidRequest, SamplingParams, StopConditions
from modalities.answers import JSON_WHITESPACE, closed_schema
from modalities.text import plain_reason
from router.api import GenerationFields, quoted, shown
from router.router_config import GrammarLimits

# ------------------------------------------------------------ sampling and stops


def sampling_of(fields: GenerationFields, vocab_size: int, grammar: str = "") -> SamplingParams:
    """Returns the sampling parameters, with OpenAI's defaults. A request without a seed gets one here, so that a
    migrated attempt draws the same tokens. Raises InvalidRequest for a bias on something that is not a token id."""
    return SamplingParams(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(0, fields.top_k or 0),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
        is_seed_given=fields.seed is not None,
        min_p=fields.min_p or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        num_top_logprobs=fields.num_top_logprobs,
        grammar=grammar,
        logit_bias=tuple(_biases(fields.logit_bias or {}, vocab_size).items()),
    )


def stop_conditions(
    fields: GenerationFields, num_prompt_tokens: int, max_model_len: int, eos_token_ids: Sequence[int]
) -> StopConditions:
    """Returns the stop conditions. A request without a token limit may fill the context. Raises InvalidRequest if
    `min_tokens` is above the limit."""
    room = max_model_len - num_prompt_tokens
    max_tokens = room if fields.token_limit is None else fields.token_limit
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"`min_tokens` must be at most {max_tokens}, the limit of generated tokens, not {min_tokens}"
        raise InvalidRequest(message, param="min_tokens")
    return StopConditions(
        max_tokens=max_tokens,
        eos_token_ids=tuple(eos_token_ids),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=min_tokens,
    )


def _biases(logit_bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in logit_bias.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            message = f"a key of `logit_bias` must be a token id of 0 to {vocab_size - 1}, not {shown(name)}"
            raise InvalidRequest(message, param="logit_bias")
        biases[int(name)] = bias
    return biases


# ------------------------------------------------------------ structured output

PATTERNS_TOGETHER = 4
"""All regular expressions of a schema, or of all tools, may together have as many bytes as so many of the longest."""
JSON_OBJECT: dict[str, Any] = {"type": "object"}
DEFAULT_LIMITS = GrammarLimits()
KINDS = ("json", "regex", "choice", "json_object")


class Grammar(NamedTuple):
    """A `Grammar` is what an output must match; any text matches the empty one."""

    text: str
    param: str
    """Names the field of the request that asks for it."""


FREE = Grammar("", "")


def grammar_of(fields: GenerationFields, limits: GrammarLimits = DEFAULT_LIMITS) -> Grammar:
    """Returns the grammar that the request asks for; it is not compiled yet (`check_grammar`). Raises InvalidRequest,
    also for a grammar beyond the limits; `param` names the field."""
    asked = {**_of_response_format(fields), **_of_structured_outputs(fields), **_of_guided(fields)}
    if not asked:
        return FREE
    if len(asked) > 1:
        names = ", ".join(f"`{name}`" for name in asked)
        message = f"only one field may ask for structured output, but the request has {names}"
        raise InvalidRequest(message, param=list(asked)[1])
    ((param, (kind, value)),) = asked.items()
    builders = {"json": _of_schema, "regex": _of_regex, "choice": _of_choice}
    return Grammar(builders[kind](value, param, limits), param)


def structure_field(fields: GenerationFields) -> str:
    """Returns the name of the first field that asks for structured output; it is empty if none does."""
    names = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
    return next((name for name in names if getattr(fields, name) is not None), "")


def too_slow(param: str, limits: GrammarLimits) -> InvalidRequest:
    """Returns the error for a grammar that takes longer to compile than the limit."""
    return InvalidRequest(
        f"`{param}` takes more than {limits.compile_timeout_s:g} s to compile, which is the limit", param=param
    )


# ------------------------------------------------------------ reading the request: param -> (kind, value)

Asked = dict[str, tuple[str, Any]]


def _of_response_format(fields: GenerationFields) -> Asked:
    form = fields.response_format
    if form is None or form.get("type") == "text":
        return {}
    if form.get("type") == "json_object":
        return {"response_format": ("json", JSON_OBJECT)}
    if form.get("type") != "json_schema":
        kinds = "`text`, `json_object` or `json_schema`"
        message = f"the `type` of `response_format` must be {kinds}, not {shown(form.get('type'))}"
        raise InvalidRequest(message, param="response_format.type")
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if schema is None:
        param = "response_format.json_schema.schema"
        raise InvalidRequest(f"`{param}` is required if the type is `json_schema`", param=param)
    return {"response_format.json_schema.schema": ("json", schema)}


def _of_structured_outputs(fields: GenerationFields) -> Asked:
    given = {name: value for name, value in (fields.structured_outputs or {}).items() if value not in (None, False)}
    unknown = sorted(given.keys() - set(KINDS))
    if unknown:
        param = f"structured_outputs.{quoted(unknown[0])}"
        raise InvalidRequest(f"`{param}` is not supported by this server; it takes {', '.join(KINDS)}", param=param)
    return {
        f"structured_outputs.{name}": ("json", JSON_OBJECT) if name == "json_object" else (name, value)
        for name, value in given.items()
    }


def _of_guided(fields: GenerationFields) -> Asked:
    """Reads the parameters under vLLM's former names."""
    given = {
        "guided_json": fields.guided_json,
        "guided_regex": fields.guided_regex,
        "guided_choice": fields.guided_choice,
    }
    return {name: (name.removeprefix("guided_"), value) for name, value in given.items() if value is not None}


# ------------------------------------------------------------ one builder per kind


def _of_schema(schema: object, param: str, limits: GrammarLimits) -> str:
    """Returns the grammar of a JSON schema; `schema` is a JSON object, or the text of one."""
    if isinstance(schema, str):
        _check_size(schema, param, limits)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(
                f"the text of `{param}` must be a JSON schema, but it is not valid JSON", param=param
            ) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"`{param}` must be a JSON schema, which is an object, not {shown(schema)}", param=param)
    _check_shape(schema, param, limits)
    check_patterns([schema], param, limits)
    # Clients may not set options of the library.
    text = json.dumps(closed_schema({key: value for key, value in schema.items() if key != "x-guidance"}))
    _check_size(text, param, limits)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": JSON_WHITESPACE})
    except ValueError as error:  # The library refuses numbers that JSON does not have, and very long ones.
        raise InvalidRequest(f"`{param}` is not a JSON schema that this server can use", param=param) from error


def _of_regex(regex: object, param: str, limits: GrammarLimits) -> str:
    """Returns the grammar of a regular expression that matches the whole text, whether or not it is anchored."""
    if not isinstance(regex, str) or not regex:
        raise InvalidRequest(f"`{param}` must be a regular expression, not {shown(regex)}", param=param)
    _check_size(regex, param, limits)
    _check_patterns([regex], param, limits)
    return LLMatcher.grammar_from_regex(regex)


def _of_choice(choices: object, param: str, limits: GrammarLimits) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequest(f"`{param}` must be a non-empty list of strings, none of them empty", param=param)
    if len(choices) > limits.max_choices:
        raise InvalidRequest(
            f"`{param}` may have at most {limits.max_choices} choices, not {len(choices)}", param=param
        )
    if sum(map(len, choices)) > limits.max_bytes:
        raise _too_large(param, limits)
    lark = "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
    _check_size(lark, param, limits)
    return LLMatcher.grammar_from_lark(lark)


# ------------------------------------------------------------ the limits of a grammar


def _check_size(text: str, param: str, limits: GrammarLimits) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{param}` is not valid Unicode: it has a lone surrogate", param=param) from None
    if num_bytes > limits.max_bytes:
        raise InvalidRequest(f"`{param}` may have at most {limits.max_bytes} bytes, not {num_bytes}", param=param)


def _too_large(param: str, limits: GrammarLimits) -> InvalidRequest:
    return InvalidRequest(f"`{param}` has more than {limits.max_bytes} bytes, which is the limit", param=param)


def _check_shape(schema: object, param: str, limits: GrammarLimits) -> None:
    """Checks the depth of a schema and the length of its strings, before the schema is written out as text."""
    level: list[object] = [schema]
    num_chars = 0
    for _ in range(limits.max_depth):
        num_chars += sum(len(one) for one in level if isinstance(one, str))
        num_chars += sum(len(key) for one in level if isinstance(one, dict) for key in one)
        if num_chars > limits.max_bytes:
            raise _too_large(param, limits)
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise InvalidRequest(
        f"the schema in `{param}` is nested more than {limits.max_depth} levels deep, which is the limit", param=param
    )


def check_patterns(schemas: Sequence[object], param: str, limits: GrammarLimits) -> None:
    """Raises InvalidRequest if the regular expressions in these schemas are too long. The time and the memory of a
    lexer grow with the square of their lengths, in work that the library does not limit."""
    patterns: list[str] = []
    left = list(schemas)
    while left:
        outer = left.pop()
        if isinstance(outer, dict):
            inside = outer.get("patternProperties")
            patterns += inside if isinstance(inside, dict) else []
            patterns += [one] if isinstance(one := outer.get("pattern"), str) else []
            left.extend(outer.values())
        elif isinstance(outer, list):
            left.extend(outer)
    _check_patterns(patterns, param, limits)


def _check_patterns(patterns: Sequence[str], param: str, limits: GrammarLimits) -> None:
    sizes = [len(pattern.encode(errors="surrogatepass")) for pattern in patterns]
    if max(sizes, default=0) > limits.max_pattern_bytes:
        message = f"a regular expression of `{param}` may have at most {limits.max_pattern_bytes} bytes"
        raise InvalidRequest(f"{message}, not {max(sizes)}", param=param)
    if sum(sizes) > PATTERNS_TOGETHER * limits.max_pattern_bytes:
        most = PATTERNS_TOGETHER * limits.max_pattern_bytes
        message = f"all regular expressions of `{param}` together may have at most {most} bytes, not {sum(sizes)}"
        raise InvalidRequest(message, param=param)


def check_schema(schema: object, param: str, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
    """Raises InvalidRequest if a schema is larger or deeper than a grammar's may be."""
    _check_shape(schema, param, limits)
    _check_size(json.dumps(schema), param, limits)


def check_grammar(grammar: str, param: str, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
    """Compiles a grammar within the limits of its size, which are counted and not timed, so that the same grammar is
    refused on every machine. May take half a second. Raises InvalidRequest."""
    if not grammar:
        return
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits.compiling.of_library())
    if is_error:
        raise unusable(param, plain_reason("\n".join(messages)))


def unusable(param: str, reason: str) -> InvalidRequest:
    """Returns the error for a grammar that can't be used."""
    return InvalidRequest(f"`{param}` can't be used: {reason}", param=param)
