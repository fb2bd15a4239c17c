"""How many values a JSON body holds, counted before it is parsed: a parser makes an object of each of them.

Two bytes of a body (`0,` or `{}`) may become a hundred bytes of memory and a microsecond with the interpreter's lock
held, in which no other request is served. Media are long strings, and cost little; only values count. Pure.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric.errors import InvalidRequest

MAX_JSON_VALUES = 2**16
"""In one body: 4,096 messages of several parts, with room to spare. Parsing so many takes some 20 ms."""
PIECE_BYTES = 2**20
"""That are looked at in one call."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_SEPARATORS = b",:[{"
"""Each value but the first follows one of them."""
_IS_SEPARATOR: npt.NDArray[np.bool_] = np.isin(np.arange(256), list(_SEPARATORS))


def check_shape(body: bytes) -> None:
    """Raises InvalidRequest for a body of more values than a request has. Whether it is JSON at all is not checked."""
    if num_separators(body) <= MAX_JSON_VALUES:  # in strings and outside: nearly every body
        return
    if num_values(body, MAX_JSON_VALUES) > MAX_JSON_VALUES:
        raise InvalidRequest(f"the body holds more than {MAX_JSON_VALUES} JSON values")


def num_separators(body: bytes) -> int:
    """In the whole body, strings included; not counted on beyond the limit."""
    count = 0
    for begin in range(0, len(body), PIECE_BYTES):
        count += sum(body.count(separator, begin, begin + PIECE_BYTES) for separator in _SEPARATORS)
        if count > MAX_JSON_VALUES:
            break
    return count


def num_values(body: bytes, most: int) -> int:
    """As many as there are separators outside of strings (RFC 8259); not counted on beyond `most`. At most the number
    of values if the body is JSON, which may have one more."""
    count, is_inside, num_trailing = 0, False, 0
    for begin in range(0, len(body), PIECE_BYTES):
        piece = np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - begin), begin)
        # A quote is part of a string where an odd number of backslashes leads up to it.
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
