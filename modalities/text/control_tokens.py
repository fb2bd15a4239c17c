"""Keeps control tokens (`<|im_end|>`, `</s>`) out of text from outside, by marks in the text before it is rendered.

`ControlTokens` puts the marks into texts and cuts the rendered text at them. `strings` and `with_strings` find and
replace the texts of a conversation. The module knows nothing of tokenizers and templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fabric.contracts import InvalidRequest

STRUCTURAL_KEYS = ("role", "type")
MARK_RANGES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlTokens:
    """Holds the control tokens of one tokenizer. Each has two or more characters and no white space at its ends.

    A mark is one character that occurs in none of the texts. It is inserted into every string from outside wherever a
    control token could arise: inside each control token that the string spells, and at the string's ends where it could
    join with its neighbouring text after rendering. The rendered text is then cut at those marks that are inside a
    control token, and only there, so that harmless text is tokenised exactly as if there were no marks.

    This does not cover a template that rewrites its input's letters (upper case, slices inside words) into a control
    token. A template that measures or compares a text with a mark sees the mark and may render that text differently.
    The class knows nothing of tokenizers or templates."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = tuple(sorted(set(tokens), key=lambda token: (-len(token), token)))
        assert all(len(token) >= 2 and token == token.strip() for token in self.tokens)
        alternatives = "|".join(map(re.escape, self.tokens)) or "(?!)"
        self._pattern = re.compile(alternatives)
        self._starts_pattern = re.compile(f"(?={alternatives})")
        self._prefixes = frozenset(token[:end] for token in self.tokens for end in range(1, len(token)))
        self._suffixes = frozenset(token[start:] for token in self.tokens for start in range(1, len(token)))
        self._max_length = max(map(len, self.tokens), default=0)

    def is_contained(self, text: str) -> bool:
        """Returns true if the text spells a control token."""
        return self._pattern.search(text) is not None

    def first_start(self, text: str) -> int:
        """Returns the position of the first control token in the text, or the text's length if it has none."""
        match = self._pattern.search(text)
        return len(text) if match is None else match.start()

    def is_harmless(self, text: str, is_structural: bool = False) -> bool:
        """Returns true if no control token can arise from this text, regardless of the text around it."""
        if is_structural or self.is_contained(text):
            return not self.is_contained(text)
        return not (self._opens(text) or self._closes(text) or self._is_inside(text))

    def marked_inside(self, text: str, mark: str) -> str:
        """Returns the text with the mark after the first character of every control token, overlapping ones too."""
        cuts = [match.start() + 1 for match in self._starts_pattern.finditer(text)]
        return mark.join(text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def marked(self, text: str, mark: str) -> str:
        """Returns the text with marks as in `marked_inside` and at the ends that could join with their surroundings.
        The marks at the ends stand inside the surrounding white space, so that a template can still trim it."""
        core = text.strip()
        before, _, after = text.partition(core) if core else (text, "", "")
        head = mark if self._closes(text) else ""
        tail = mark if self._opens(text) or self._is_inside(text) else ""
        return f"{before}{head}{self.marked_inside(core, mark)}{tail}{after}"

    def pieces(self, text: str, mark: str) -> list[str]:
        """Returns the text without marks, cut where a mark is inside a control token. If the pieces are tokenised one
        by one, no piece yields a control token that contained a mark."""
        parts = text.split(mark)
        plain = "".join(parts)
        cuts = list(self._cuts(plain, parts))
        return [plain[start:end] for start, end in zip([0, *cuts], [*cuts, len(plain)], strict=True)]

    def _cuts(self, plain: str, parts: Sequence[str]) -> Iterator[int]:
        """Yields ascending positions in `plain`: that of the first mark inside each control token that has one."""
        marks, end = [], 0
        for part in parts[:-1]:
            end += len(part)
            marks.append(end)
        next_mark = position = 0
        while match := self._pattern.search(plain, position):
            while next_mark < len(marks) and marks[next_mark] <= match.start():
                next_mark += 1
            if next_mark < len(marks) and marks[next_mark] < match.end():
                position = marks[next_mark]
                yield position
            else:
                position = match.end()

    def _opens(self, text: str) -> bool:
        tail = text.rstrip()[-self._max_length :]
        return any(tail[start:] in self._prefixes for start in range(len(tail)))

    def _closes(self, text: str) -> bool:
        head = text.lstrip()[: self._max_length]
        return any(head[:end] in self._suffixes for end in range(1, len(head) + 1))

    def _is_inside(self, text: str) -> bool:
        core = text.strip()
        return 0 < len(core) < self._max_length and any(core in token for token in self.tokens)


class Text(NamedTuple):
    text: str
    is_structural: bool
    """Is true for a key, a role or a type. Templates compare these, so only a whole control token in them is broken
    up."""


def strings(value: object, is_structural: bool = False) -> Iterator[Text]:
    """Yields every string in a JSON-like value, keys included. Raises InvalidRequest for a value that is not JSON."""
    if isinstance(value, str):
        yield Text(value, is_structural)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key, True)
            yield from strings(item, key in STRUCTURAL_KEYS)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)
    elif value is not None and not isinstance(value, (bool, int, float)):
        # Other objects are refused because they would bring their methods into the template's sandbox.
        raise InvalidRequest(
            f"messages must consist of JSON values, not of a value of type {type(value).__name__}", param="messages"
        )


def with_strings(value: object, free: Callable[[str], str], structural: Callable[[str], str]) -> object:
    """Returns a copy of `value` in which `free` maps every free string and `structural` maps keys, roles and types."""
    if isinstance(value, str):
        return free(value)
    if isinstance(value, Mapping):
        return {
            (structural(key) if isinstance(key, str) else key): structural(item)
            if key in STRUCTURAL_KEYS and isinstance(item, str)
            else with_strings(item, free, structural)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [with_strings(item, free, structural) for item in value]
    return value


def unused_mark(texts: Iterable[str]) -> str:
    """Returns a private-use character that occurs in none of the texts. Raises InvalidRequest if they use all."""
    used = set().union(*texts)
    for code in (code for codes in MARK_RANGES for code in codes):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequest("the text must not contain every private-use character of Unicode", param="messages")
