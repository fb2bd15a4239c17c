"""Reads a call that is written as a JSON object, and the argument values of calls.

Such an object has a `name` and `arguments` (or `parameters`), in any order. Arguments are passed on as they come and as
the model wrote them. If they come before the name, or are a string that contains JSON, they are held back until they
are known to belong to a call. An `id` and a `type` are dropped, and any other member breaks the object, so that an
answer that is JSON of another kind is not held back for long.

If an object breaks before its arguments have begun to flow, nothing of it was emitted, and the caller makes it text. If
it breaks later, the pieces that were emitted stay, and what follows them is read as if the call had ended there. If the
arguments themselves break, a client sees arguments that are not whole JSON, as it does when a token limit cuts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from modalities.answers.json_scanner import WHITESPACE, JsonScanner, ScanStatus, json_value_kind
from modalities.answers.pieces import PieceSink
from modalities.answers.text_source import Reading, TextSource

ARGUMENT_KEYS = ("arguments", "parameters")
DROPPED_KEYS = ("id", "type")


def read_json_call(source: TextSource, sink: PieceSink, names: Collection[str]) -> Reading[bool]:
    """Reads the object of a call; returns whether it is whole. A name that is not in `names` breaks it."""
    call = _JsonCall(source, sink, names)
    if not (yield from source.skip("{")):
        return False
    yield from source.skip_all(WHITESPACE)
    while (yield from call.read_member()):
        yield from source.skip_all(WHITESPACE)
        if (yield from source.skip("}")):
            return call.end()
        if not (yield from source.skip(",")):
            return False
        yield from source.skip_all(WHITESPACE)
    return False


def read_object(source: TextSource, on_text: Callable[[str], None]) -> Reading[bool]:
    """Reads a JSON object, passing its text on as it comes; returns whether it is whole."""
    if (yield from source.peek()) != "{":
        return False
    return (yield from _read_value(source, on_text))


def _read_value(source: TextSource, on_text: Callable[[str], None]) -> Reading[bool]:
    scanner = JsonScanner()
    while scanner.status is ScanStatus.MORE and (yield from source.more()):
        on_text(source.take(scanner.feed(source.text, source.position)))
    return scanner.status is ScanStatus.WHOLE


def _read_string(source: TextSource) -> Reading[str | None]:
    """Returns the value of a JSON string, or None for what is not one."""
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from _read_value(source, parts.append)):
        return None
    value = json.loads("".join(parts))
    assert isinstance(value, str)
    return value


class _JsonCall:
    """A `_JsonCall` holds what is known of a call while its object is being read."""

    def __init__(self, source: TextSource, sink: PieceSink, names: Collection[str]) -> None:
        self._source, self._sink, self._names = source, sink, names
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_started = False

    def read_member(self) -> Reading[bool]:
        """Reads a key and its value; returns whether both are well formed."""
        source = self._source
        key = yield from _read_string(source)
        if key is None:
            return False
        yield from source.skip_all(WHITESPACE)
        if not (yield from source.skip(":")):
            return False
        yield from source.skip_all(WHITESPACE)
        if key == "name" and self._name is None:
            return (yield from self._read_name())
        if key in ARGUMENT_KEYS and self._arguments is None and not self._is_started:
            return (yield from self._read_arguments())
        return key in DROPPED_KEYS and (yield from _read_value(source, _drop))

    def end(self) -> bool:
        """Returns whether the object, which has ended, is a call. One without arguments has an empty object."""
        if self._name is None:
            return False
        if not self._is_started:
            self._start("{}")
        self._source.forget()
        return True

    def _read_name(self) -> Reading[bool]:
        name = yield from _read_string(self._source)
        if name not in self._names:
            return False
        self._name = name
        if self._arguments is not None:
            self._start(self._arguments)
        return True

    def _read_arguments(self) -> Reading[bool]:
        if (yield from self._source.peek()) == '"':
            arguments = yield from _read_string(self._source)
            if arguments is None or json_value_kind(arguments) != "object" or not _is_unicode(arguments):
                return False
        elif self._name is None:
            parts: list[str] = []
            if not (yield from read_object(self._source, parts.append)):
                return False
            arguments = "".join(parts)
        else:
            if (yield from self._source.peek()) != "{":
                return False
            self._start("")
            is_whole = yield from read_object(self._source, self._sink.arguments)
            if is_whole:
                self._source.keep()
            return is_whole
        if self._name is None:
            self._arguments = arguments
        else:
            self._start(arguments)
        return True

    def _start(self, arguments: str) -> None:
        assert self._name is not None
        self._is_started = True
        self._source.forget()
        self._sink.start_call(self._name)
        if arguments:
            self._sink.arguments(arguments)
            self._source.keep()


def _is_unicode(text: str) -> bool:
    """Says whether the text has no lone surrogate, which an escape can name but no encoding can write."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _drop(text: str) -> None:
    """Ignores the text of a member that no call has."""
