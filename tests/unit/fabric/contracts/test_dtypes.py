"""The table of dtypes agrees with the dtypes that a cluster's config may name, and features are counted by it."""

from __future__ import annotations

from typing import get_args

import pytest

from deploy.compute_dtype import DTYPE_TO_FLAGS
from deploy.config import ModelSection
from fabric.contracts import DTYPE_TO_BYTES, feature_nbytes


def test_the_config_names_the_known_dtypes() -> None:
    assert set(get_args(ModelSection.model_fields["dtype"].annotation)) == {"auto", *DTYPE_TO_BYTES}


def test_only_half_precision_needs_instructions_of_its_own() -> None:
    assert set(DTYPE_TO_FLAGS) == {name for name, num_bytes in DTYPE_TO_BYTES.items() if num_bytes < 4}


def test_feature_sizes() -> None:
    assert feature_nbytes((4, 10, 8), "float32") == 1280
    assert feature_nbytes((4, 10, 8), "float16") == feature_nbytes((4, 10, 8), "bfloat16") == 640


@pytest.mark.parametrize(("shape", "dtype"), [((4, 0, 8), "float32"), ((4, 10, 8), "int8")])
def test_what_is_no_feature_has_no_size(shape: tuple[int, int, int], dtype: str) -> None:
    with pytest.raises(ValueError, match="a feature can't have shape"):
        feature_nbytes(shape, dtype)
