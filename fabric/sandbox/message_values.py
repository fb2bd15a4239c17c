"""Turns values into bytes and arrays, and back, without running anything that the bytes choose.

A process that reads files of strangers may fall into the hands of a file, and its parent reads its answers. Pickles
call what they name, and even a pickle that may name classes alone can set their attributes. Here bytes are data: a tree
of MessagePack, whose lists begin with a tag. The reader makes collections, arrays of numbers, members of enums, errors,
and instances of dataclasses and named tuples, whose fields it fills in without calling a constructor. It finds classes
only in modules that are imported already. It does not compare the values of fields with their annotations.

The module does not know how bytes travel, or what they mean.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fabric.contracts import WeftError

_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIqQlLefdFD"}
"""Maps the names of all dtypes that arrays may have to these dtypes: numbers in this machine's byte order. Others would
let bytes pose as pointers to objects."""
_PLAIN = (type(None), bool, int, float, str, bytes)
"""Lists the types that MessagePack has."""


class _Tag(IntEnum):
    LIST = 0
    TUPLE = 1
    SET = 2
    FROZENSET = 3
    DICT = 4
    ARRAY = 5
    NUMBER = 6
    """Marks a scalar of numpy."""
    ENUM = 7
    INSTANCE = 8
    WEFT_ERROR = 9
    ERROR = 10
    """Marks an exception of Python itself."""


_COLLECTION_TO_TAG: dict[type, _Tag] = {
    list: _Tag.LIST,
    tuple: _Tag.TUPLE,
    set: _Tag.SET,
    frozenset: _Tag.FROZENSET,
}
_TAG_TO_COLLECTION: dict[_Tag, Any] = {tag: kind for kind, tag in _COLLECTION_TO_TAG.items()}


class NotAMessage(Exception):
    """Means that the other side wrote something that is no message."""


def encode_values(message: object) -> tuple[bytes, list[memoryview]]:
    """Returns the bytes of a message, and the memory of its arrays, in the order in which the bytes name them. An array
    that is not contiguous is copied. Raises TypeError for what is no value."""
    arrays: list[memoryview] = []
    return msgspec.msgpack.encode(_packed(message, arrays)), arrays


def decode_values(body: memoryview, arrays: Sequence[memoryview]) -> object:
    """Returns the message of these bytes. Its arrays use the given memory, and are writable if that is. Raises
    NotAMessage."""
    try:
        return _unpacked(msgspec.msgpack.decode(body), deque(arrays))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise NotAMessage(f"the message can't be read: {error!s:.200}") from error


# ------------------------------------------------------------ writing


def _packed(value: object, arrays: list[memoryview]) -> object:
    kind: type[Any] = type(value)
    if kind in _PLAIN:
        return value
    if (tag := _COLLECTION_TO_TAG.get(kind)) is not None:
        items: Any = value
        return [tag, *(_packed(item, arrays) for item in items)]
    if isinstance(value, dict):
        return [_Tag.DICT, *(_packed(part, arrays) for pair in value.items() for part in pair)]
    if isinstance(value, np.ndarray):
        whole = np.asarray(value, order="C")
        arrays.append(whole.reshape(-1).view(np.uint8).data)
        return [_Tag.ARRAY, _known_dtype(value.dtype), *value.shape]
    if isinstance(value, np.generic):
        return [_Tag.NUMBER, _known_dtype(value.dtype), value.tobytes()]
    if isinstance(value, Enum):
        return [_Tag.ENUM, *_place_of(kind), value.name]
    if isinstance(value, WeftError):
        return [_Tag.WEFT_ERROR, *_place_of(kind), value.message, value.param, value.retry_after_s]
    if isinstance(value, Exception):
        return [_Tag.ERROR, *_place_of(kind), *(_packed(each, arrays) for each in value.args)]
    parts = (_packed(getattr(value, name), arrays) for name in _fields_of(kind))
    return [_Tag.INSTANCE, *_place_of(kind), *parts]


def _known_dtype(dtype: npt.DTypeLike) -> str:
    name = np.dtype(dtype).str
    if name not in _DTYPES:
        raise TypeError(f"a message may not have an array of {dtype}")
    return name


def _place_of(kind: type[Any]) -> tuple[str, str]:
    """Returns the module and the name by which the reader finds a class. Raises TypeError for a class that it can't
    find there."""
    if _class_at(kind.__module__, kind.__qualname__) is not kind:
        raise TypeError(f"{kind!r} is not a name of its module")
    return kind.__module__, kind.__qualname__


# ------------------------------------------------------------ reading


def _unpacked(tree: object, arrays: deque[memoryview]) -> Any:
    if not isinstance(tree, list):
        if type(tree) not in _PLAIN:
            raise TypeError(f"a message may not have {type(tree).__name__}")
        return tree
    tag, *parts = tree
    tag = _Tag(tag)
    if tag in _TAG_TO_COLLECTION:
        return _TAG_TO_COLLECTION[tag](_unpacked(part, arrays) for part in parts)
    if tag is _Tag.DICT:
        values = [_unpacked(part, arrays) for part in parts]
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag is _Tag.ARRAY:
        name, *shape = parts
        if any(size < 0 for size in shape):
            raise ValueError(f"an array has the shape {shape}")
        return np.ndarray(shape, _DTYPES[name], arrays.popleft())
    if tag is _Tag.NUMBER:
        name, data = parts
        return np.frombuffer(data, _DTYPES[name], 1)[0]
    kind, rest = _class_at(*parts[:2]), parts[2:]
    if tag is _Tag.ENUM and issubclass(kind, Enum):
        return kind[rest[0]]
    if tag is _Tag.WEFT_ERROR and issubclass(kind, WeftError):
        message, param, retry_after_s = rest
        return kind(message, param=param, retry_after_s=retry_after_s)
    if tag is _Tag.ERROR and issubclass(kind, Exception) and kind.__module__ == "builtins":
        return kind(*(_unpacked(part, arrays) for part in rest))
    if tag is _Tag.INSTANCE:
        return _instance(kind, [_unpacked(part, arrays) for part in rest])
    raise TypeError(f"{kind!r} does not fit the tag {tag.name}")


def _class_at(module_name: str, name: str) -> type[Any]:
    """Returns a class of a module that is imported already. It asks no module for a name that it has not defined yet,
    because modules may import others then. Raises TypeError."""
    module = sys.modules.get(module_name)
    found = getattr(module, "__dict__", {}).get(name)
    if not isinstance(found, type):
        raise TypeError(f"there is no class {module_name:.80}.{name:.80}")
    return found


def _instance(kind: type[Any], values: list[object]) -> object:
    """Returns an instance of a dataclass or a named tuple without calling a function of the class."""
    names = _fields_of(kind)
    if len(values) != len(names):
        raise TypeError(f"{kind!r} has {len(names)} fields, not {len(values)}")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _fields_of(kind: type[Any]) -> tuple[str, ...]:
    """Returns the names of the fields of a dataclass or a named tuple. Raises TypeError for other classes."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, tuple) and isinstance(names := getattr(kind, "_fields", None), tuple):
        return names
    raise TypeError(f"a message may not have {kind!r}")
