"""A C source file as a loaded library: compiled by the machine's C compiler at first use, kept in the user's cache.

The name in the cache changes with source and processor, as the code is made for the processor that it is compiled on.
Knows nothing of what the code does.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_LOG = logging.getLogger(__name__)
COMPILE_TIMEOUT_S = 60.0


def load_c_library(source: Path) -> ctypes.CDLL | None:
    """None, and a line in the log, where there is no compiler, no room in the cache, or a processor that the source
    refuses. OpenMP is found in the process, where torch has brought it: two pools of threads would wait for each
    other."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _LOG.info("no C compiler: %s is not used", source.name)
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, source)))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.warning("%s can't be used: %s", source.name, error)
        return None


def _compiled(compiler: str, source: Path) -> Path:
    """Compiles unless it is there. Raises OSError and SubprocessError."""
    processor = Path("/proc/cpuinfo").read_bytes().partition(b"flags")[2].partition(b"\n")[0]
    name = f"{source.stem}-{hashlib.blake2b(source.read_bytes() + processor, digest_size=8).hexdigest()}.so"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (home / name).is_file():
        with tempfile.TemporaryDirectory(dir=home) as draft:
            unit, library = Path(draft) / "unit.o", Path(draft) / name
            compile_ = [compiler, "-O3", "-march=native", "-fopenmp", "-fPIC", "-c", str(source), "-o", str(unit)]
            for command in (compile_, [compiler, "-shared", str(unit), "-o", str(library)]):
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
            library.replace(home / name)
    return home / name
