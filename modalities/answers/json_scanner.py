"""Follows one JSON value (RFC 8259) character by character as it comes, without a second look at any of them.

The scanner says where the value ends and where it breaks. It builds nothing, so its state is small, and depth costs one
character each instead of a level of recursion. It knows nothing of calls.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable

WHITESPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_BLANKS = re.compile(r"[ \t\n\r]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")
_OPEN_TO_CLOSE = {"{": "}", "[": "]"}
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_NUMBER_STEPS: dict[str, tuple[tuple[frozenset[str], str], ...]] = {
    "sign": ((frozenset("0"), "zero"), (_DIGITS, "integer")),
    "zero": ((frozenset("."), "point"), (frozenset("eE"), "e")),
    "integer": ((_DIGITS, "integer"), (frozenset("."), "point"), (frozenset("eE"), "e")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), (frozenset("eE"), "e")),
    "e": ((frozenset("+-"), "e sign"), (_DIGITS, "exponent")),
    "e sign": ((_DIGITS, "exponent"),),
    "exponent": ((_DIGITS, "exponent"),),
}
_NUMBER_ENDS = frozenset({"zero", "integer", "fraction", "exponent"})

_Read = Callable[[str, int], int]


class ScanStatus(enum.Enum):
    MORE = enum.auto()
    """The value has not ended."""
    WHOLE = enum.auto()
    """The value has ended."""
    BROKEN = enum.auto()
    """The text is no JSON."""


class JsonScanner:
    """A `JsonScanner` reads one value, which begins at the first character that it gets."""

    def __init__(self) -> None:
        self.status = ScanStatus.MORE
        self._closers: list[str] = []
        self._is_key = False
        self._number = ""
        self._rest = ""
        self._num_hex = 0
        self._read: _Read = self._value

    def feed(self, text: str, start: int = 0) -> int:
        """Returns the index after the last character from `start` on that belongs to the value. If the value breaks,
        this is the index of the character that does not fit. A number ends at the first character behind it."""
        at = start
        while at < len(text) and self.status is ScanStatus.MORE:
            at = self._read(text, at)
        return at

    @property
    def can_end(self) -> bool:
        """Says whether the text so far is a whole value; a number may still go on."""
        is_number = self._read == self._in_number and not self._closers and self._number in _NUMBER_ENDS
        return self.status is ScanStatus.WHOLE or (self.status is ScanStatus.MORE and is_number)

    def _broken(self, at: int) -> int:
        self.status = ScanStatus.BROKEN
        return at

    def _ended_value(self) -> None:
        if self._closers:
            self._read = self._after_value
        else:
            self.status = ScanStatus.WHOLE

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _OPEN_TO_CLOSE:
            self._closers.append(_OPEN_TO_CLOSE[char])
            self._read = self._first_key if char == "{" else self._first_value
        elif char == '"':
            self._is_key = False
            self._read = self._in_string
        elif char in _LITERALS:
            self._rest = _LITERALS[char]
            self._read = self._in_literal
        elif char == "-" or char in _DIGITS:
            self._number = {"-": "sign", "0": "zero"}.get(char, "integer")
            self._read = self._in_number
        elif char in WHITESPACE and self._closers:
            return self._skip_blanks(text, at)
        else:
            return self._broken(at)
        return at + 1

    def _skip_blanks(self, text: str, at: int) -> int:
        blanks = _BLANKS.match(text, at)
        assert blanks is not None
        return blanks.end()

    def _first_value(self, text: str, at: int) -> int:
        if text[at] in WHITESPACE:
            return self._skip_blanks(text, at)
        if text[at] == "]":
            return self._close(at)
        return self._value(text, at)

    def _first_key(self, text: str, at: int) -> int:
        return self._close(at) if text[at] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] in WHITESPACE:
            return self._skip_blanks(text, at)
        if text[at] != '"':
            return self._broken(at)
        self._is_key = True
        self._read = self._in_string
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] in WHITESPACE:
            return self._skip_blanks(text, at)
        if text[at] != ":":
            return self._broken(at)
        self._read = self._value
        return at + 1

    def _after_value(self, text: str, at: int) -> int:
        if text[at] in WHITESPACE:
            return self._skip_blanks(text, at)
        if text[at] == self._closers[-1]:
            return self._close(at)
        if text[at] != ",":
            return self._broken(at)
        self._read = self._key if self._closers[-1] == "}" else self._value
        return at + 1

    def _close(self, at: int) -> int:
        self._closers.pop()
        self._ended_value()
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        assert plain is not None
        at = plain.end()
        if at == len(text):
            return at
        if text[at] == '"':
            if self._is_key:
                self._read = self._colon
            else:
                self._ended_value()
        elif text[at] == "\\":
            self._read = self._in_escape
        else:
            return self._broken(at)
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._num_hex = 4
            self._read = self._in_hex
        elif text[at] in '"\\/bfnrt':
            self._read = self._in_string
        else:
            return self._broken(at)
        return at + 1

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._broken(at)
        self._num_hex -= 1
        if not self._num_hex:
            self._read = self._in_string
        return at + 1

    def _in_literal(self, text: str, at: int) -> int:
        if text[at] != self._rest[0]:
            return self._broken(at)
        self._rest = self._rest[1:]
        if not self._rest:
            self._ended_value()
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        for chars, state in _NUMBER_STEPS[self._number]:
            if text[at] in chars:
                self._number = state
                return at + 1
        if self._number not in _NUMBER_ENDS:
            return self._broken(at)
        self._ended_value()
        return at


def json_value_kind(text: str) -> str:
    """Returns the JSON type of a text that is one whole value with whitespace around it: `object`, `array`, `string`,
    `number`, `boolean` or `null`. Returns an empty string for any other text."""
    text = text.strip(WHITESPACE)
    scanner = JsonScanner()
    if not text or scanner.feed(text) != len(text) or not scanner.can_end:
        return ""
    names = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return names.get(text[0], "number")
