"""Tests what messages between processes may hold, and that reading one runs nothing and reaches nothing."""

from __future__ import annotations

import dataclasses
import sys
from enum import Enum, StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.contracts import InvalidMedia, Overloaded
from fabric.sandbox.message_values import NotAMessage, decode_values, encode_values

HERE = __name__


class Colour(Enum):
    RED = 1


class Name(StrEnum):
    FIRST = "first"


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    place: Point
    pixels: Any = None


CALLED: list[str] = []
"""Collects what was called by a message, which must be nothing."""


@dataclasses.dataclass
class Talkative:
    word: str

    def __post_init__(self) -> None:
        CALLED.append(self.word)

    def __setattr__(self, name: str, value: object) -> None:
        CALLED.append(name)
        object.__setattr__(self, name, value)

    def __setstate__(self, state: object) -> None:
        CALLED.append("state")


class Unknown:
    """Is no value."""


def over_the_wire(message: object) -> Any:
    body, arrays = encode_values(message)
    return decode_values(memoryview(body), [memoryview(bytearray(array)) for array in arrays])


def read(*tree: object, arrays: tuple[bytes, ...] = ()) -> object:
    """Reads a message that a hostile process wrote."""
    return decode_values(memoryview(msgspec.msgpack.encode(tree)), [memoryview(array) for array in arrays])


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
values = st.recursive(
    hashable
    | st.sampled_from([*Colour, *Name])
    | st.builds(Point, scalars, scalars)
    | st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(hashable, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.builds(Slotted, st.builds(Point, scalars, scalars), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(values)
def test_values_arrive_as_they_were(value: object) -> None:
    assert shown(over_the_wire(value)) == shown(value)


def shown(value: object) -> str:
    """Returns a text that tells types and values apart, and also equal floats such as NaN."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value)} {sorted(map(shown, value))}"
    if isinstance(value, (list, tuple)):
        return f"{type(value)} {list(map(shown, value))}"
    if isinstance(value, dict):
        return f"{type(value)} {[(shown(key), shown(each)) for key, each in value.items()]}"
    return shown((value.place, value.pixels)) if isinstance(value, Slotted) else f"{type(value)} {value!r}"


def test_errors_arrive_with_what_they_say() -> None:
    found = over_the_wire([InvalidMedia("it is broken", param="part"), Overloaded("wait", retry_after_s=2.5)])
    assert [(type(error), error.message, error.param, error.retry_after_s) for error in found] == [
        (InvalidMedia, "it is broken", "part", None),
        (Overloaded, "wait", None, 2.5),
    ]
    error = over_the_wire(MemoryError("full", 3))
    assert (type(error), error.args) == (MemoryError, ("full", 3))


def test_no_function_of_a_class_runs() -> None:
    written = Talkative("loud")
    CALLED.clear()
    assert over_the_wire(written) == written
    assert CALLED == []


def test_what_is_no_value_is_refused_where_it_is_sent() -> None:
    class Local(NamedTuple):
        x: int

    for value in (Unknown(), len, Unknown, 2**64, Local(1), np.array([None]), np.array(["text"]), KeyboardInterrupt()):
        with pytest.raises((TypeError, OverflowError)):
            encode_values(value)


LIST, TUPLE, SET, FROZENSET, DICT, ARRAY, NUMBER, ENUM, INSTANCE, WEFT_ERROR, ERROR = range(11)
HOSTILE: dict[str, tuple[object, ...]] = {
    "a function": (INSTANCE, "os", "system", "true"),
    "a function as an error": (ERROR, "builtins", "eval", "1"),
    "a class that starts a program": (INSTANCE, "subprocess", "Popen", ["true"]),
    "a class as an error": (ERROR, "subprocess", "Popen", "true"),
    "an error of a library": (ERROR, "subprocess", "CalledProcessError", 1, "true"),
    "an error that is none of ours": (WEFT_ERROR, "builtins", "ValueError", "message", None, None),
    "an exit": (ERROR, "builtins", "SystemExit", 1),
    "a class as a member of an enum": (ENUM, "builtins", "dict", "fromkeys"),
    "a method of an enum": (ENUM, HERE, "Colour", "__class__"),
    "a private name": (ENUM, HERE, "Colour", "_member_map_"),
    "a part of a class": (INSTANCE, HERE, "Slotted.__class__", 1),
    "a module that is not imported": (INSTANCE, "antigravity", "Name", 1),
    "too few fields": (INSTANCE, HERE, "Point", 1),
    "too many fields": (INSTANCE, HERE, "Slotted", 1, 2, 3),
    "a plain tuple": (INSTANCE, "builtins", "tuple", 1),
    "an array of pointers": (ARRAY, "|O", 1),
    "an array of records with pointers": (ARRAY, "O,O", 1),
    "an array of negative length": (ARRAY, "|u1", -1),
    "an array beyond its memory": (ARRAY, "|u1", 65),
    "an array beyond all memory": (ARRAY, "<f8", 2**40, 2**40),
    "an array that did not come": (TUPLE, [ARRAY, "|u1", 1], [ARRAY, "|u1", 1]),
    "a number without bytes": (NUMBER, "<f8", b""),
    "a key without a value": (DICT, 1),
    "a key that can't be one": (DICT, [LIST], 1),
    "a member that can't be one": (SET, [LIST]),
    "an unknown tag": (99, 1),
    "a tag that is no number": ("list", 1),
    "no tag": (),
    "a map": (LIST, {"a": 1}),
    "a class without a name": (INSTANCE, "os"),
    "a name that is no text": (INSTANCE, 1, 2),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_message_is_none(case: str) -> None:
    with pytest.raises(NotAMessage):
        read(*HOSTILE[case], arrays=(bytes(64),))


def test_a_message_imports_nothing() -> None:
    assert "antigravity" not in sys.modules
    with pytest.raises(NotAMessage, match="no class antigravity"):
        read(INSTANCE, "antigravity", "Name")
    assert "antigravity" not in sys.modules


def test_a_module_is_asked_for_no_name_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some modules import others when they are asked for a name."""
    asked: list[str] = []
    monkeypatch.setattr(sys.modules[HERE], "__getattr__", asked.append, raising=False)
    with pytest.raises(NotAMessage):
        read(INSTANCE, HERE, "Lazy")
    assert asked == []


def test_depth_is_an_error_and_not_the_end() -> None:
    with pytest.raises(NotAMessage):
        decode_values(memoryview(b"\x92\x00" * 100_000 + b"\xc0"), [])


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=40) | st.tuples(st.integers(0, 10), scalars, scalars, scalars).map(msgspec.msgpack.encode))
def test_bytes_of_any_kind_raise_only_what_a_receiver_expects(body: bytes) -> None:
    assert len(refusal(body)) < 300


def refusal(body: bytes) -> str:
    """Returns why bytes are no message, or nothing if they are one. Raises whatever else reading them raises."""
    try:
        decode_values(memoryview(body), [memoryview(bytes(8))])
    except NotAMessage as error:
        return str(error)
    return ""


def damaged(value: object) -> st.SearchStrategy[bytes]:
    whole = encode_values(value)[0]
    return st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)).map(
        lambda change: whole[: change[0]] + bytes([change[1]]) + whole[change[0] + 1 :]
    )


@settings(deadline=None, max_examples=300)
@given(damaged([Slotted(Point(1, 2.0), [InvalidMedia("broken"), Colour.RED, np.float32(1)]), {"a": (1, 2)}]))
def test_a_damaged_message_raises_only_what_a_receiver_expects(body: bytes) -> None:
    CALLED.clear()
    assert len(refusal(body)) < 300
    assert CALLED == []
