"""Passes numpy arrays to C code, each by its address, and many of them in one structure.

A C source declares such a structure with `DECLARED` of `structures.h`, and its library says what fields it has. So a
field has its name once in C and once in Python, where an attribute holds the array, and the order of the fields stands
in C alone.
The module knows nothing of what the arrays mean.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_C_TYPES: Mapping[str, type] = {
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
}


class DeclaredStructure(NamedTuple):
    """A `DeclaredStructure` is what a C source says of a structure."""

    kind: type[ctypes.Structure]
    """Has a number for each number in C, and an address for each pointer."""
    array_to_dtype: Mapping[str, np.dtype[Any]]
    """Maps each pointer to the dtype of the values that it points to."""


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Returns the address of an array's first value, for a C function. The array must outlive the call."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # an array is a buffer
    except (TypeError, ValueError):  # The array is empty, read-only or not contiguous.
        address: int = array.__array_interface__["data"][0]
        return address


@functools.cache
def declared_structure(library: ctypes.CDLL, name: str) -> DeclaredStructure:
    """Returns the structure that the library's source declares by this name. Raises ValueError if the source declares
    none, or one with a field of a type other than `double`, `int32_t`, `int64_t` and `uint8_t`."""
    text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, f"{name}_fields"))).decode()
    fields: list[tuple[str, type]] = []
    array_to_dtype: dict[str, np.dtype[Any]] = {}
    for declaration in filter(None, map(str.strip, text.split(";"))):
        of_what, _, names = declaration.removeprefix("const ").partition(" ")
        if of_what not in _C_TYPES:
            raise ValueError(f"{name} has fields of a type that Python doesn't know: {declaration}")
        for each in names.split(","):
            field = each.strip().removeprefix("*")
            if each.strip().startswith("*"):
                array_to_dtype[field] = np.dtype(_C_TYPES[of_what])
            fields.append((field, ctypes.c_void_p if field in array_to_dtype else _C_TYPES[of_what]))
    return DeclaredStructure(type(name, (ctypes.Structure,), {"_fields_": fields}), array_to_dtype)


def structure_of(library: ctypes.CDLL, name: str, arrays: object, **numbers: int) -> Any:
    """Returns a structure that the library's source declares by this name. Its pointers point to the attributes of
    `arrays` with their names, which must outlive it, and its numbers are `numbers`. Raises AttributeError if an array
    is missing, and ValueError as `declared_structure` does, if a number is missing or unknown, or if an array has
    another dtype than in C or isn't C-contiguous."""
    kind, array_to_dtype = declared_structure(library, name)
    if differing := numbers.keys() ^ {field for field, *_ in kind._fields_} - array_to_dtype.keys():
        raise ValueError(f"C and Python name different numbers of {name}: {', '.join(sorted(differing))}")
    addresses = {}
    for field, dtype in array_to_dtype.items():
        array = getattr(arrays, field)
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"{name}.{field} is {array.dtype}{array.strides} in Python, and a row of {dtype} in C")
        addresses[field] = address_of(array)
    return kind(**numbers, **addresses)
