"""Loads a C source file as a library. It compiles the file with the machine's C compiler at first use and keeps the
result in the user's cache.

A source finds the headers in its own folder and those in this one (`vectors.h`, `structures.h`). The name in the cache
changes with the source, these headers, the options, the compiler and the processor, because the code is made for the
processor on which it is compiled. The module never loads a file that others could have written. It knows nothing of
what the code does.
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
SHARED_HEADERS = Path(__file__).parent


def load_c_library(source: Path) -> ctypes.CDLL | None:
    """Returns the library. Returns None, and logs the reason, if there is no compiler, no home directory, no room in
    the cache, a cache that others may write to, or a processor that the source refuses. The library uses the OpenMP
    that torch has loaded into the process, because two pools of threads would wait for each other."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _LOG.info("there is no C compiler (cc, gcc or clang), so Weft computes without %s, more slowly", source.name)
        return None
    try:
        library = _compiled(compiler, source)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # A full disk or a crash can cut the file short; the code compiles it once more.
            library.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled(compiler, source)))
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        _LOG.warning("%s can't be compiled, so Weft computes without it: %s %s", source.name, error, said)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        # A RuntimeError means that no home directory is known.
        _LOG.warning("%s can't be used, so Weft computes without it: %s", source.name, error)
    return None


def _compiled(compiler: str, source: Path) -> Path:
    """Compiles the library unless it is in the cache, and returns its path. Raises OSError, SubprocessError, and
    RuntimeError if no home directory is known."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(home)
    kept = home / f"{source.stem}-{_fingerprint(compiler, source)}.so"
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=home) as draft:
            unit, library = Path(draft) / "unit.o", Path(draft) / kept.name
            for options in (
                (*COMPILE_OPTIONS, "-iquote", str(SHARED_HEADERS), str(source), "-o", str(unit)),
                (*LINK_OPTIONS, str(unit), "-o", str(library)),
            ):
                subprocess.run([compiler, *options], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
            library.chmod(0o700)
            library.replace(kept)
    _check_own(kept)
    return kept


def _fingerprint(compiler: str, source: Path) -> str:
    """Returns a hash of everything from which the library is made. Raises OSError or SubprocessError."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S).stdout
    processor = Path("/proc/cpuinfo").read_bytes().partition(b"flags")[2].partition(b"\n")[0]
    options = "\0".join((compiler, *COMPILE_OPTIONS, *LINK_OPTIONS)).encode()
    folders = (source.parent, SHARED_HEADERS)
    headers = [header.read_bytes() for folder in folders for header in sorted(folder.glob("*.h"))]
    made_from = b"\0".join((options, version, processor, source.read_bytes(), *headers))
    return hashlib.blake2b(made_from, digest_size=8).hexdigest()


def _check_own(path: Path) -> None:
    """Raises PermissionError for a file, directory or link that others own or may write to, because they could put
    their own code there."""
    found = path.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        message = f"{path} belongs to another user, or other users may write to it; remove it or change its permissions"
        raise PermissionError(message)
