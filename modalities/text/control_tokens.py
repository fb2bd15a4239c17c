"""Keeps text from outside from becoming a control token (`<|im_end|>`, `<|image_pad|>`).

A mark, one character that occurs nowhere else, is set into every string from outside wherever a control token could
come out of it: inside each one it spells, and at its ends where it could join with what stands beside it after
rendering. The rendered text is then cut at those marks that ended up inside a control token, and only there, so that
what is harmless is tokenised exactly as if nothing had been done. Does not know tokenizers or templates.

Not covered: a template that rewrites its input's letters (upper case, slices inside words) into a control token. A
template that measures or compares a text with a mark in it sees the mark; it may render that text in another way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fabric.errors import InvalidRequest

STRUCTURAL_KEYS = ("role", "type")
MARK_RANGES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlTokens:
    """The control tokens of one tokenizer. Each has two characters or more and no white space at its ends."""

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
        """True if the text spells a control token."""
        return self._pattern.search(text) is not None

    def is_harmless(self, text: str, is_structural: bool = False) -> bool:
        """True if no control token can come out of this text, wherever it is put."""
        if is_structural or self.is_contained(text):
            return not self.is_contained(text)
        return not (self._opens(text) or self._closes(text) or self._is_inside(text))

    def marked_inside(self, text: str, mark: str) -> str:
        """With the mark after the first character of every control token in the text, overlapping ones too."""
        cuts = [match.start() + 1 for match in self._starts_pattern.finditer(text)]
        return mark.join(text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def marked(self, text: str, mark: str) -> str:
        """As `marked_inside`, and at the ends that could join with their surroundings. The marks at the ends stand
        inside the surrounding white space, so that a template can still trim it."""
        core = text.strip()
        before, _, after = text.partition(core) if core else (text, "", "")
        head = mark if self._closes(text) else ""
        tail = mark if self._opens(text) or self._is_inside(text) else ""
        return f"{before}{head}{self.marked_inside(core, mark)}{tail}{after}"

    def pieces(self, text: str, mark: str) -> list[str]:
        """The text without marks, cut where a mark stood inside a control token. Tokenised one by one, no piece
        yields a control token that a mark stood in."""
        parts = text.split(mark)
        plain = "".join(parts)
        cuts = list(self._cuts(plain, parts))
        return [plain[start:end] for start, end in zip([0, *cuts], [*cuts, len(plain)], strict=True)]

    def _cuts(self, plain: str, parts: Sequence[str]) -> Iterator[int]:
        """Positions in `plain`, ascending: the first mark inside each control token that has one."""
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
    """A key, a role or a type: compared by templates, so that only a whole control token in it is broken."""


def strings(value: object, is_structural: bool = False) -> Iterator[Text]:
    """Every string in a JSON-like value, keys too. Raises InvalidRequest on what is not JSON."""
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
        # Objects would bring their methods into the template's sandbox.
        raise InvalidRequest(f"a {type(value).__name__} can't be put into a chat template", param="messages")


def with_strings(value: object, free: Callable[[str], str], structural: Callable[[str], str]) -> object:
    """A copy with every free string mapped by `free`; keys, roles and types by `structural`."""
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
    """A private-use character that occurs in none of the texts. Raises InvalidRequest if they use them all."""
    used = set().union(*texts)
    for code in (code for codes in MARK_RANGES for code in codes):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequest("the text uses every private-use character there is", param="messages")
