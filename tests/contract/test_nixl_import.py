"""Checks what the import of NIXL's wheel does to the process around it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, logging.config, logging.handlers

target = logging.StreamHandler()
handler = logging.handlers.MemoryHandler(100, target=target)
logging.getLogger("ray.serve").addHandler(handler)
before = logging.config.dictConfig
from fabric.transport.nixl_channel import _load_nixl

module = _load_nixl()
assert module.__name__.endswith("._api"), module
assert handler.target is target, "the handlers of the process were closed"
assert logging.config.dictConfig is before
"""


@pytest.mark.nixl
def test_the_import_of_nixl_leaves_the_handlers_of_the_process_open() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
