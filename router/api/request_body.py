"""Reads the JSON body of a request into a model of pydantic: `parse_body` counts the body's values before it parses,
and turns what pydantic finds into a 400 that names the first offending field. `read_fields` does the same for fields
that were parsed before.

The module knows nothing of what any field means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from fabric.contracts import InvalidRequest
from router.api.field_errors import describe_flaw

M = TypeVar("M", bound=BaseModel)
MAX_JSON_VALUES = 2**16
"""Limits the values in one body: 4,096 messages of several parts fit, with room to spare. Parsing this many takes some
20 ms."""


def parse_body(kind: type[M], body: bytes, most_values: int = MAX_JSON_VALUES) -> M:
    """Returns the body as a `kind`. Raises InvalidRequest, whose `param` names the first offending field; also if the
    body has more than `most_values` JSON values."""
    check_shape(body, most_values)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error, kind) from None


def read_fields(kind: type[M], fields: Mapping[str, object]) -> M:
    """Returns the fields as a `kind`. Raises InvalidRequest, whose `param` names the first offending field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise refusal(error, kind) from None


def refusal(error: ValidationError, kind: type[BaseModel]) -> InvalidRequest:
    """Returns the 400 for what pydantic has found first in the fields of a `kind`."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']}")
    steps = list(steps_in(kind, first["loc"]))
    param = ".".join(map(quoted, steps)) or None
    if len(steps) < len(first["loc"]):
        return InvalidRequest(f"`{param}` has none of the forms that it may have", param=param)
    if first["type"] == "missing":
        return InvalidRequest(f"`{param}` is required", param=param)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"`{param}` is not supported by this server", param=param)
    first = error.errors(include_url=False)[0]  # The input of a missing field would be a copy of the whole body.
    sentence = describe_flaw(first, "the body" if param is None else f"`{param}`")
    return InvalidRequest(sentence.replace("must be a mapping", "must be an object", 1), param=param)


def steps_in(kind: type[BaseModel], location: Sequence[int | str]) -> Iterator[int | str]:
    """Yields the steps of a location in the body of a `kind`, up to the first field that has one of several types. What
    follows there is pydantic's name of a type, which means nothing to a client."""
    of: Any = kind
    for step in location:
        of = only_type(of)
        if isinstance(of, type) and issubclass(of, BaseModel):
            field = of.model_fields.get(str(step))
            of = None if field is None else field.annotation
        elif get_origin(of) is list:
            (of,) = get_args(of)
        elif get_origin(of) is dict:
            _, of = get_args(of)
        else:
            return
        yield step


def only_type(annotation: Any) -> Any:
    """Returns the one type, besides null, that an annotation permits, or the annotation if it permits several."""
    if get_origin(annotation) is Annotated:
        return only_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [each for each in get_args(annotation) if each is not type(None)]
        return only_type(kinds[0]) if len(kinds) == 1 else annotation
    return annotation


def quoted(step: int | str) -> str:
    """Returns one step of a path in the body. A key that a client made up is escaped, because it must not look like a
    line of a log."""
    if isinstance(step, int) or re.fullmatch(r"[\w-]{1,64}", step) is not None:
        return str(step)
    return repr(step[:64])


# ------------------------------------------------------------ the size of a body

PIECE_BYTES = 2**20
"""A body is examined in pieces of this many bytes."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_SEPARATORS = b",:[{"
"""Every JSON value except the first follows one of these bytes."""
_IS_SEPARATOR: npt.NDArray[np.bool_] = np.isin(np.arange(256), list(_SEPARATORS))


def check_shape(body: bytes, most: int = MAX_JSON_VALUES) -> None:
    """Raises InvalidRequest if the body has more values than a request may have. It does not check whether the body is
    JSON at all, nor what the values mean.

    The values are counted before the body is parsed, because a parser makes an object of each value. Two bytes of a
    body (`0,` or `{}`) may become a hundred bytes of memory, and a microsecond with the interpreter's lock held, during
    which no other request is served. Media are long strings and cost little; only values count."""
    if num_separators(body, most) <= most:  # Nearly every body passes here, with separators in strings counted.
        return
    if num_values(body, most) > most:
        raise InvalidRequest(f"the body has more than {most} JSON values, which is the limit")


def num_separators(body: bytes, most: int) -> int:
    """Counts the separators in the whole body, including those in strings. It stops counting after
    `most`."""
    count = 0
    for begin in range(0, len(body), PIECE_BYTES):
        piece = np.frombuffer(body, np.uint8, min(PIECE_BYTES, len(body) - begin), begin)
        count += sum(int(np.count_nonzero(piece == separator)) for separator in _SEPARATORS)
        if count > most:
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
