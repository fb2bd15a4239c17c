"""Names of dtypes stand for torch's dtypes of the same size."""

from __future__ import annotations

import pytest

from fabric.contracts import DTYPE_TO_BYTES, ConfigError
from modalities.torch_dtypes import dtype_name, torch_dtype


@pytest.mark.parametrize("name", DTYPE_TO_BYTES)
def test_a_name_stands_for_a_dtype_of_its_size(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype.itemsize == DTYPE_TO_BYTES[name]
    assert dtype_name(dtype) == name


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        torch_dtype("float64")
