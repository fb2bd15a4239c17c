"""Tests that C and Python agree on a structure that only the C source declares."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from fabric.c_library import load_c_library
from fabric.c_structures import address_of, declared_structure, structure_of

SOURCE = """
#include <stdint.h>
#include "structures.h"

DECLARED(Sample,
  int64_t num; /* has a comment, with commas; and semicolons */
  const double *seconds,
      *weights; /* [num] each */
  double *sums;
  const int32_t *depths;
  const uint8_t *flags;
  const int64_t *slots;
  double scale;
);
DECLARED(Odd, int64_t num; float *values;);

int64_t size_of_sample(void) { return sizeof(Sample); }
void add_up(const Sample *s) {
  for (int64_t k = 0; k < s->num; k++)
    s->sums[k] = s->scale * s->seconds[k] + s->weights[k] + s->depths[k] + s->flags[k] + s->slots[k];
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = tmp_path_factory.mktemp("structures") / "sample.c"
    source.write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(source.parent / "cache"))
        library = load_c_library(source)
    if library is None:
        pytest.skip("there is no C compiler")
    return library


@pytest.fixture
def arrays() -> SimpleNamespace:
    return SimpleNamespace(
        seconds=np.array([1.0, 2.0]),
        weights=np.array([0.25, 0.5]),
        sums=np.zeros(2),
        depths=np.array([10, 20], np.int32),
        flags=np.array([100, 200], np.uint8),
        slots=np.array([1000, 2000], np.int64),
        other=np.zeros(2),
    )


def test_c_reads_and_writes_each_array_by_the_name_that_it_has_in_python(
    library: ctypes.CDLL, arrays: SimpleNamespace
) -> None:
    sample = structure_of(library, "Sample", arrays, num=2, scale=2)
    assert ctypes.sizeof(sample) == library.size_of_sample()
    library.add_up(ctypes.byref(sample))
    assert arrays.sums.tolist() == [1112.25, 2224.5]


def test_the_source_says_the_types(library: ctypes.CDLL) -> None:
    kind, array_to_dtype = declared_structure(library, "Sample")
    assert [name for name, *_ in kind._fields_] == [
        "num", "seconds", "weights", "sums", "depths", "flags", "slots", "scale",
    ]  # fmt: skip
    assert {name: str(dtype) for name, dtype in array_to_dtype.items()} == {
        "seconds": "float64",
        "weights": "float64",
        "sums": "float64",
        "depths": "int32",
        "flags": "uint8",
        "slots": "int64",
    }


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("depths", np.zeros(2, np.int64)),
        ("flags", np.zeros(2, np.bool_)),
        ("seconds", np.zeros(4)[::2]),
        ("weights", np.zeros((2, 2)).T),
    ],
)
def test_an_array_of_another_dtype_or_order_is_refused(
    library: ctypes.CDLL, arrays: SimpleNamespace, name: str, array: np.ndarray
) -> None:
    setattr(arrays, name, array)
    with pytest.raises(ValueError, match=f"Sample.{name} is {array.dtype}"):
        structure_of(library, "Sample", arrays, num=2, scale=2)


def test_an_array_that_only_c_names_is_refused(library: ctypes.CDLL, arrays: SimpleNamespace) -> None:
    del arrays.flags
    with pytest.raises(AttributeError, match="flags"):
        structure_of(library, "Sample", arrays, num=2, scale=2)


@pytest.mark.parametrize("numbers", [{"num": 2}, {"num": 2, "scale": 2, "extra": 1}])
def test_a_number_that_only_one_side_names_is_refused(
    library: ctypes.CDLL, arrays: SimpleNamespace, numbers: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match=r"different numbers of Sample: (scale|extra)"):
        structure_of(library, "Sample", arrays, **numbers)


def test_what_python_cannot_read_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match=r"float \*values"):
        declared_structure(library, "Odd")
    with pytest.raises(ValueError, match="Missing_fields"):
        declared_structure(library, "Missing")


def test_an_array_without_values_and_one_that_is_read_only_have_an_address() -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    assert address_of(array) == array.ctypes.data
    assert address_of(array[:0]) == array.ctypes.data
