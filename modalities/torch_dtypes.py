"""Maps the names of dtypes (`fabric.contracts.DTYPE_TO_BYTES`) to torch's dtypes and back.

It knows nothing of models.
"""

from __future__ import annotations

import torch

from fabric.contracts import DTYPE_TO_BYTES, ConfigError

_NAME_TO_DTYPE: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_TO_BYTES}


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype with this name. Raises ConfigError for a name that Weft does not know."""
    if name not in _NAME_TO_DTYPE:
        raise ConfigError(f"the dtype {name!r} is not supported; Weft supports {', '.join(_NAME_TO_DTYPE)}")
    return _NAME_TO_DTYPE[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of any dtype, e.g. `float32`, as in `FeatureTicket.dtype`."""
    return str(dtype).removeprefix("torch.")
