"""The table of dtypes agrees with the dtypes that a cluster's config may name."""

from __future__ import annotations

from typing import get_args

from deploy.compute_dtype import DTYPE_TO_FLAGS
from deploy.config import ModelSection
from fabric.contracts import DTYPE_TO_BYTES


def test_the_config_names_the_known_dtypes() -> None:
    assert set(get_args(ModelSection.model_fields["dtype"].annotation)) == {"auto", *DTYPE_TO_BYTES}


def test_only_half_precision_needs_instructions_of_its_own() -> None:
    assert set(DTYPE_TO_FLAGS) == {name for name, num_bytes in DTYPE_TO_BYTES.items() if num_bytes < 4}
