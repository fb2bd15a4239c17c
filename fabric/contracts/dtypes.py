"""Names the dtypes in which models compute and features travel, and gives the bytes of one value and of one feature.

A dtype is a name here, because messages and configs carry names, and because numpy has no bfloat16.
`modalities.torch_dtypes` maps a name to torch's dtype. This module knows nothing of the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

DTYPE_TO_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Maps the name of each known dtype to the bytes of one value. A feature of another dtype is refused."""


def feature_nbytes(shape: tuple[int, int, int], dtype: str) -> int:
    """Returns the bytes of a C-contiguous feature of shape `(num_levels, num_tokens, hidden_size)`. Raises ValueError
    for an unknown dtype or a dimension below one."""
    if dtype not in DTYPE_TO_BYTES or min(shape) < 1:
        known = ", ".join(DTYPE_TO_BYTES)
        raise ValueError(
            f"a feature can't have shape {shape} and dtype {dtype!r}; sizes start at 1, dtypes are {known}"
        )
    return math.prod(shape) * DTYPE_TO_BYTES[dtype]
