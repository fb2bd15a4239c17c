"""Removes models that a node has downloaded and no longer needs: those that no process reads, the one first that was
opened longest ago.

Nothing is removed unless somebody says how much may stay: `weft node clean` once, or `model.cache_bytes` before each
download. The module knows nothing of stores, or of what the files contain.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from deploy.models.model_leases import lock_path, sole_use


class CachedModel(NamedTuple):
    """A `CachedModel` is one version of one model on this node, or what a download has left of it."""

    folder: Path
    name: str
    """Names the model and its version as `SCHEME://LOCATION@VERSION`."""
    num_bytes: int
    opened_at_s: float
    """Is the wall time at which a process last opened it."""
    is_read: bool
    """Says that a process of this node reads it now."""


class CleaningRule(NamedTuple):
    """A `CleaningRule` says what may stay. A model that is read always stays."""

    max_bytes: int | None = None
    """Models may take this much together; None means no limit."""
    unused_s: float | None = None
    """A model may stay unopened for this long; None means for ever."""


def cached_models(root: Path) -> list[CachedModel]:
    """Returns the models below a folder of models, the one first that was opened longest ago."""
    folders = [each for each in root.glob("[!.]*/*/*") if each.is_dir()]
    return sorted((_described(root, folder) for folder in folders), key=lambda model: model.opened_at_s)


def _described(root: Path, folder: Path) -> CachedModel:
    scheme, location, version = folder.relative_to(root).parts
    lock = lock_path(root, folder)
    opened_at_s = lock.stat().st_mtime if lock.exists() else folder.stat().st_mtime
    with sole_use(root, folder) as is_alone:
        os.utime(lock, (opened_at_s, opened_at_s))  # It may have been made now.
        num_bytes = sum(_size(file) for file in folder.rglob("*"))
    name = f"{scheme}://{location.replace('--', '/')}@{version}"
    return CachedModel(folder, name, num_bytes, opened_at_s, not is_alone)


def superfluous(models: Iterable[CachedModel], rule: CleaningRule, now_s: float) -> list[CachedModel]:
    """Returns the models that the rule removes, in this order. `models` begin with the one that was opened longest
    ago. If those that are read take more than the limit by themselves, all others go."""
    models = list(models)
    num_bytes = sum(model.num_bytes for model in models)
    removed = []
    for model in models:
        is_old = rule.unused_s is not None and now_s - model.opened_at_s > rule.unused_s
        is_over = rule.max_bytes is not None and num_bytes > rule.max_bytes
        if (is_old or is_over) and not model.is_read:
            removed.append(model)
            num_bytes -= model.num_bytes
    return removed


def remove(root: Path, model: CachedModel) -> bool:
    """Removes a model, unless a process has begun to read it. Returns whether it is gone. What a process that is killed
    meanwhile leaves counts as an unfinished download, because the marks of a whole model go first."""
    with sole_use(root, model.folder) as is_alone:
        if not is_alone:
            return False
        for mark in model.folder.glob(".has-*"):
            mark.unlink()
        shutil.rmtree(model.folder)
    return True


def make_room(root: Path, kept: Path, num_bytes: int, max_bytes: int) -> list[CachedModel]:
    """Removes models until those that stay take at most `max_bytes` together with `num_bytes` more, which `kept` is
    about to get. Returns those that were removed; if they are not enough, the others are read."""
    models = [model for model in cached_models(root) if model.folder != kept]
    present = sum(_size(file) for file in kept.rglob("*"))
    rule = CleaningRule(max(max_bytes - num_bytes - present, 0))
    return [model for model in superfluous(models, rule, 0.0) if remove(root, model)]


def _size(path: Path) -> int:
    """Returns the bytes of a file, or 0 if it is none or was renamed meanwhile."""
    try:
        return path.lstat().st_size if path.is_file() else 0
    except OSError:
        return 0
