"""Renders chat templates (Jinja in a sandbox) as transformers' `apply_chat_template` renders them.

It knows nothing of token ids. The environment (options, filters, globals, the `generation` tag) follows
transformers/utils/chat_template_utils.py of 5.23; a parity test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from fabric.errors import ConfigError, InvalidRequest

# A client may not set these names: they hold the conversation and the template itself (CVE-2025-62426).
RESERVED_VARIABLES = frozenset({"add_generation_prompt", "chat_template", "messages", "self"})
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Holds one compiled template. `special_tokens` are variables of it (`eos_token`). Threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """Compiles the template. Raises ConfigError if the source is no template."""
        self._special_tokens = dict(special_tokens)
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template can't be compiled: {error}") from error
        literals = {data.data for data in tree.find_all(nodes.TemplateData)}
        literals |= {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
        self.literal_text = "\0".join(sorted(literals))
        """Holds all text that the template can write by itself: its literals, joined by NUL."""

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> str:
        """Returns the rendered conversation. Raises InvalidRequest if the template refuses the messages or fails on
        them, and for a reserved variable."""
        if reserved := sorted((RESERVED_VARIABLES | self._special_tokens.keys()) & variables.keys()):
            raise InvalidRequest(f"{reserved[0]} can't be set by a request", param="chat_template_kwargs")
        prepared = [_with_reasoning_names(message) for message in messages]
        defaults: dict[str, object] = {"tools": None, "documents": None, **self._special_tokens}
        context = {**defaults, **variables, "messages": prepared, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # The template computes with the client's data, so these type errors come from the request, not from Weft.
            kind = type(error).__name__
            raise InvalidRequest(f"the chat template can't render the messages ({kind})", param="messages") from error


def _with_reasoning_names(message: Mapping[str, object]) -> dict[str, object]:
    """Returns the message without None fields, and with its reasoning under the two names that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in REASONING_FIELDS if key in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


class _GenerationTag(Extension):
    """Renders `{% generation %}`, which marks the assistant's text for training, as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """Replaces `dict` in templates, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Replaces `namespace` in templates, without underscore attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # This lets `namespace(self=...)` work, as in jinja2.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template can't store {name!r} in a namespace")


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Writes plain JSON; Jinja's own `tojson` escapes it for HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], undefined=jinja2.Undefined
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
