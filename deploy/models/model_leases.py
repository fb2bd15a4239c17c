"""Keeps models that processes of a node read apart from those that may be removed.

A process that opens a model holds a shared lock of it until the process ends, for whatever reason: the system gives the
lock back. Removing needs the lock alone. The files of the locks lie beside the models and not in them, so that one is
never removed together with what it protects, and their times say when a model was last opened.

Where the file system has no locks, every model counts as being read. The module knows nothing of downloads.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKS = ".locks"
_PATH_TO_FILE: dict[Path, int] = {}
"""Holds the open file of each lock that this process has until it ends."""


def lock_path(root: Path, folder: Path) -> Path:
    """Returns the file of the lock of a model's folder below `root`."""
    return root / LOCKS / f"{'--'.join(folder.relative_to(root).parts)}.lock"


def hold_model(root: Path, folder: Path) -> None:
    """Keeps the model in `folder` from being removed as long as this process lives, and notes the time. Blocks while
    another process removes it, so what the folder has is known only afterwards."""
    path = lock_path(root, folder)
    if path not in _PATH_TO_FILE:
        _PATH_TO_FILE[path] = _open(path)
        _lock(_PATH_TO_FILE[path], fcntl.LOCK_SH)
    os.utime(path)


@contextmanager
def reading(root: Path, folder: Path) -> Iterator[None]:
    """Keeps the model in `folder` from being removed within the `with` block, in which it is downloaded."""
    file = _open(lock_path(root, folder))
    try:
        _lock(file, fcntl.LOCK_SH)
        yield
    finally:
        os.close(file)


@contextmanager
def sole_use(root: Path, folder: Path) -> Iterator[bool]:
    """Yields whether no process reads the model, and keeps others from opening it within the `with` block."""
    file = _open(lock_path(root, folder))
    try:
        yield _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(file)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _lock(file: int, operation: int) -> bool:
    try:
        fcntl.flock(file, operation)
    except OSError:  # Another process has it, or this file system has no locks.
        return False
    return True
