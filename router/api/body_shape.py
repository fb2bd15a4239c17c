"""Counts how many values a JSON body holds before the body is parsed, because a parser makes an object of each value.

Two bytes of a body (`0,` or `{}`) may become a hundred bytes of memory, and a microsecond with the interpreter's lock
held, during which no other request is served. Media are long strings and cost little; only values count. The module is
pure, and knows nothing of what the values mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric.errors import InvalidRequest

MAX_JSON_VALUES = 2**16
"""Limits the values in one body: 4,096 messages of several parts fit, with room to spare. Parsing this many takes some
20 ms."""
PIECE_BYTES = 2**20
"""A body is examined in pieces of this many bytes."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_SEPARATORS = b",:[{"
"""Every JSON value except the first follows one of these bytes."""
_IS_SEPARATOR: npt.NDArray[np.bool_] = np.isin(np.arange(256), list(_SEPARATORS))


def check_shape(body: bytes) -> None:
    """Raises InvalidRequest if the body has more values than a request may have. It does not check whether the body is
    JSON at all."""
    if num_separators(body) <= MAX_JSON_VALUES:  # Nearly every body passes here, with separators in strings counted.
        return
    if num_values(body, MAX_JSON_VALUES) > MAX_JSON_VALUES:
        raise InvalidRequest(f"the body holds more than {MAX_JSON_VALUES} JSON values")


def num_separators(body: bytes) -> int:
    """Counts the separators in the whole body, including those in strings. It stops counting after the limit."""
    count = 0
    for begin in range(0, len(body), PIECE_BYTES):
        count += sum(body.count(separator, begin, begin + PIECE_BYTES) for separator in _SEPARATORS)
        if count > MAX_JSON_VALUES:
            break
    return count


def num_values(body: bytes, most: int) -> int:
    """Returns the number of separators outside of strings (RFC 8259). It stops counting after `most`. If the body is
    JSON, it has at most one value more than separators; an empty array or object has a separator without a value in
    it."""
    count, is_inside, num_trailing = 0, False, 0
    for begin in range(0, len(body), PIECE_BYTES):
        piece = np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - begin), begin)
        # A quote belongs to the text of a string if an odd number of backslashes stands before it.
        before = -1 - num_trailing
        others = np.where(piece == _BACKSLASH, before, np.arange(len(piece)))
        last_other = np.concatenate([[before], np.maximum.accumulate(others)])
        quotes = np.flatnonzero(piece == _QUOTE)
        quotes = quotes[(quotes - 1 - last_other[quotes]) % 2 == 0]
        separators = np.flatnonzero(_IS_SEPARATOR[piece])
        num_quotes_before = np.searchsorted(quotes, separators) + is_inside
        count += int(np.count_nonzero(num_quotes_before % 2 == 0))
        is_inside = bool((len(quotes) + is_inside) % 2)
        num_trailing = len(piece) - 1 - int(last_other[-1])
        if count > most:
            break
    return count
