"""A C source file as a loaded library: compiled by the machine's C compiler at first use, kept in the user's cache.

The name in the cache changes with the source, the headers beside it, options, compiler and processor, as the code is
made for the processor that it is compiled on. What others could have written is never loaded. Knows nothing of what the
code does.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

_LOG = logging.getLogger(__name__)
COMPILE_TIMEOUT_S = 60.0
COMPILE_OPTIONS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-c")
LINK_OPTIONS = ("-shared",)


def load_c_library(source: Path) -> ctypes.CDLL | None:
    """None, and a line in the log, where there is no compiler, no home, no room in the cache, a cache that others may
    write to, or a processor that the source refuses. OpenMP is found in the process, where torch has brought it: two
    pools of threads would wait for each other."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _LOG.info("no C compiler: %s is not used", source.name)
        return None
    try:
        library = _compiled(compiler, source)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # cut short by a full disk or a crash: once more
            library.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled(compiler, source)))
    except subprocess.CalledProcessError as error:
        _LOG.warning("%s can't be used: %s: %s", source.name, error, error.stderr.decode(errors="replace").strip())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: nobody's home is known
        _LOG.warning("%s can't be used: %s", source.name, error)
    return None


def _compiled(compiler: str, source: Path) -> Path:
    """Compiles unless it is there. Raises OSError, SubprocessError, and RuntimeError where nobody's home is known."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(home)
    kept = home / f"{source.stem}-{_fingerprint(compiler, source)}.so"
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=home) as draft:
            unit, library = Path(draft) / "unit.o", Path(draft) / kept.name
            for options in (
                (*COMPILE_OPTIONS, str(source), "-o", str(unit)),
                (*LINK_OPTIONS, str(unit), "-o", str(library)),
            ):
                subprocess.run([compiler, *options], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
            library.chmod(0o700)
            library.replace(kept)
    _check_own(kept)
    return kept


def _fingerprint(compiler: str, source: Path) -> str:
    """Of everything that the library is made from. Raises OSError, SubprocessError."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S).stdout
    processor = Path("/proc/cpuinfo").read_bytes().partition(b"flags")[2].partition(b"\n")[0]
    options = "\0".join((compiler, *COMPILE_OPTIONS, *LINK_OPTIONS)).encode()
    headers = [header.read_bytes() for header in sorted(source.parent.glob("*.h"))]
    made_from = b"\0".join((options, version, processor, source.read_bytes(), *headers))
    return hashlib.blake2b(made_from, digest_size=8).hexdigest()


def _check_own(path: Path) -> None:
    """Raises PermissionError for what others own or may write to, links among them: code from there would be theirs."""
    found = path.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} belongs to others, or they may write to it")
