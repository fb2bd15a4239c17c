"""Prepares the tests of vLLM, which `make vllm` runs in the environment that `make install-vllm` makes. Elsewhere they
are not collected."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from llm_workers.vllm_engine.engine_args import ENVIRONMENT

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # vLLM reads these when it is imported. The cores are shared, so no process is bound to one.
    os.environ.update(ENVIRONMENT)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path("build/torchinductor").absolute())
    os.environ.update({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"})


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Removes the folder that torch makes beside its cache of compiled code; each process of a run has its own."""
    shutil.rmtree(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}", ignore_errors=True)
