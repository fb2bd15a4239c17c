"""Decides which dtype `model.dtype: auto` stands for: the dtype of the stored weights, or float32 where computing in
that dtype would be slow. A CPU without instructions for a half-precision dtype emulates its products: those of bfloat16
took five times as long as those of float32 on a processor that has AVX-512 but no bfloat16 instructions.

The module reads config.json and this machine's /proc/cpuinfo. It imports no torch, because the process that starts a
cluster needs none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.config import ClusterConfig
from fabric.contracts import DTYPE_TO_BYTES
from modalities.checkpoint_files import read_json

logger = logging.getLogger(__name__)

CPUINFO = Path("/proc/cpuinfo")
DTYPE_TO_FLAGS = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
"""Maps a half-precision dtype to the flags of processors that have instructions for its products. The names are those
of Linux; the last flag of each set is that of Arm processors."""
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
"""A multimodal checkpoint's config has the config of its language model under one of these keys."""


def with_dtype(config: ClusterConfig, model_dir: Path) -> ClusterConfig:
    """Returns the config with a dtype in place of `auto`. It assumes that all machines have the same processor as this
    one."""
    if config.model.dtype != "auto":
        return config
    stored = stored_dtype(read_json(model_dir / "config.json")[1])
    devices = {each.device for each in config.all_workers}
    if config.encoders.replicas:
        devices.add(config.encoders.device)
    flags = processor_flags(CPUINFO)
    is_emulated = devices <= {"cpu"} and stored in DTYPE_TO_FLAGS and not DTYPE_TO_FLAGS[stored] & flags
    dtype = "float32" if is_emulated else stored
    if is_emulated:
        logger.info("Weft computes in float32, because this processor has no instructions for products of %s", stored)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def stored_dtype(checkpoint: Mapping[str, Any]) -> str:
    """Returns the dtype that a checkpoint's config.json names for its weights. Returns float32 if the file names none,
    or one that Weft does not compute in."""
    for key in ("dtype", "torch_dtype"):
        if (named := checkpoint.get(key)) in tuple(DTYPE_TO_BYTES):
            return str(named)
    nested = next((checkpoint[key] for key in _NESTED if isinstance(checkpoint.get(key), dict)), None)
    return stored_dtype(nested) if nested is not None else "float32"


def processor_flags(cpuinfo: Path) -> frozenset[str]:
    """Returns the flags of the first processor, or no flags if the file does not exist (macOS)."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()
