"""Shared by all tests: what must hold for every one of them."""

from __future__ import annotations

import os

# Read by libraries at import; set before any test module imports them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("UCX_LOG_LEVEL", "error")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
