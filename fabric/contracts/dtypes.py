"""Names the dtypes in which models compute and features travel, and gives the bytes of one value.

A dtype is a name here, because messages and configs carry names, and because numpy has no bfloat16.
`modalities.torch_dtypes` maps a name to torch's dtype. This module knows nothing of the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DTYPE_TO_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Maps the name of each known dtype to the bytes of one value. A feature of another dtype is refused."""
