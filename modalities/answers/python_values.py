"""Reads values that are written as Python literals, and passes them on as JSON while they come.

Strings, numbers, booleans, `None`, lists and dictionaries with strings as keys are values; everything else breaks what
is read. Nothing is ever evaluated. The words of JSON (`true`, `false`, `null`) mean the same as Python's. The module
knows nothing of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from modalities.answers.json_scanner import WHITESPACE, JsonScanner, ScanStatus
from modalities.answers.text_source import Reading, TextSource

MAX_DEPTH = 64
"""Limits the nesting of lists and dictionaries, because each level is a level of recursion."""
_WORD_TO_JSON = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE_TO_CHAR = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\n": "",
    **{char: char for char in "\\'\"/"},
}
_ESCAPE_TO_LENGTH = {"x": 2, "u": 4, "U": 8}
_QUOTE_TO_SPECIAL = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}
_HEX = frozenset("0123456789abcdefABCDEF")

OnText = Callable[[str], None]


def read_python_value(source: TextSource, on_text: OnText, depth: int = 0) -> Reading[bool]:
    """Reads a value and passes it on as JSON; returns whether it is whole. If it breaks, what was passed on is the
    beginning of a JSON value."""
    char = yield from source.peek()
    if char in _QUOTE_TO_SPECIAL:
        return (yield from read_python_string(source, on_text))
    if char in "[{" and char and depth < MAX_DEPTH:
        return (yield from _read_items(source, on_text, depth + 1))
    if char == "-" or char.isdecimal():
        return (yield from _read_number(source, on_text))
    word = yield from source.skip_one_of(tuple(_WORD_TO_JSON))
    if word:
        on_text(_WORD_TO_JSON[word])
    return bool(word)


def read_python_string(source: TextSource, on_text: OnText) -> Reading[bool]:
    """Reads a string in single or double quotes, without a prefix, and passes it on as a JSON string. Line breaks may
    stand in it, although Python wants three quotes then: models write them. An escape that Python does not know keeps
    its backslash."""
    quote = yield from source.peek()
    source.position += 1
    on_text('"')
    while (yield from source.more()):
        place = _QUOTE_TO_SPECIAL[quote].search(source.text, source.position)
        on_text(_escaped(source.take(place.start() if place else len(source.text))))
        if not place:
            continue
        source.position += 1
        if place[0] == quote:
            on_text('"')
            return True
        if not (yield from _read_escape(source, on_text)):
            return False
    return False


def _read_escape(source: TextSource, on_text: OnText) -> Reading[bool]:
    """Reads what follows a backslash. A surrogate stays an escape, because its other half may follow."""
    char = yield from source.peek()
    if not char:
        return False
    source.position += 1
    if char not in _ESCAPE_TO_LENGTH:
        on_text(_escaped(_ESCAPE_TO_CHAR.get(char, "\\" + char)))
        return True
    digits: list[str] = []
    while len(digits) < _ESCAPE_TO_LENGTH[char]:
        digit = yield from source.peek()
        if digit not in _HEX:
            return False
        digits.append(digit)
        source.position += 1
    code = int("".join(digits), 16)
    if code > 0x10FFFF:
        return False
    on_text(f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else _escaped(chr(code)))
    return True


def _read_number(source: TextSource, on_text: OnText) -> Reading[bool]:
    """Reads a number that JSON writes in the same way. It ends at the first character behind it."""
    scanner = JsonScanner()
    while scanner.status is ScanStatus.MORE and (yield from source.more()):
        on_text(source.take(scanner.feed(source.text, source.position)))
    return scanner.status is ScanStatus.WHOLE


def _read_items(source: TextSource, on_text: OnText, depth: int) -> Reading[bool]:
    """Reads a list or a dictionary. A comma may stand behind the last item."""
    is_list = (yield from source.peek()) == "["
    closing = "]" if is_list else "}"
    source.position += 1
    on_text("[" if is_list else "{")
    between = ""
    while True:
        yield from source.skip_all(WHITESPACE)
        if (yield from source.skip(closing)):
            on_text(closing)
            return True
        on_text(between)
        if not is_list:
            if (yield from source.peek()) not in _QUOTE_TO_SPECIAL:
                return False
            if not (yield from read_python_string(source, on_text)):
                return False
            yield from source.skip_all(WHITESPACE)
            if not (yield from source.skip(":")):
                return False
            on_text(": ")
            yield from source.skip_all(WHITESPACE)
        if not (yield from read_python_value(source, on_text, depth)):
            return False
        yield from source.skip_all(WHITESPACE)
        if not (yield from source.skip(",")) and (yield from source.peek()) != closing:
            return False
        between = ", "


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
