"""Keeps the files of models on a node, so that all its processes share one download.

A folder belongs to one version of one model, so nothing in it ever changes. A file appears in it whole: it is written
as a part, compared with its size and its digest, and renamed. One process of the node downloads at a time, under a lock
that ends with its process. What a killed process has left of a file is where the next one goes on.

Small files (config, tokenizer, processors) come first, because a router needs no others. The module knows nothing of
stores.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import filelock

from deploy.models.cache_cleaning import cached_models, make_room
from deploy.models.model_leases import reading
from deploy.models.model_stores import Listing, ModelStore, RemoteFile, digest_of
from deploy.models.model_urls import ModelUrl
from fabric.contracts import ConfigError, Unavailable
from modalities.speech_traits import VOICES_FILE

_LOG = logging.getLogger(__name__)
WEIGHTS = ".safetensors"
"""Ends the names of the files with weights that Weft reads."""
LEFT_OUT = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".tflite", ".npz")
"""End the names of weights in other formats, which Weft does not read."""
SPARE_BYTES = 2**30
"""This much of a disk stays free: a full disk stops more than this download."""
TELL_S = 10.0


def needed(files: tuple[RemoteFile, ...], has_weights: bool) -> list[RemoteFile]:
    """Returns the files that a process reads, the small ones first."""
    small = [file for file in files if file.name == VOICES_FILE or not file.name.endswith((WEIGHTS, *LEFT_OUT))]
    weights = [file for file in files if file.name.endswith(WEIGHTS)]
    return [*small, *weights] if has_weights else small


class ModelCache:
    """Holds the folder of all models on this node."""

    def __init__(
        self, root: Path, free_bytes: Callable[[Path], int] | None = None, max_bytes: int | None = None
    ) -> None:
        """Models may take `max_bytes` together; None means no limit. A download removes others for it."""
        self._root, self._max_bytes = root, max_bytes
        self._free_bytes = free_bytes or (lambda path: shutil.disk_usage(path).free)

    def folder(self, url: ModelUrl) -> Path:
        """Returns the folder of a pinned URL."""
        assert url.version, "only one version has a folder"
        return self._root / url.scheme / url.location.replace("/", "--") / url.version.replace("/", "--")

    def ready_folder(self, url: ModelUrl, has_weights: bool) -> Path | None:
        """Returns the folder if it holds all that is asked for; the store then need not be asked at all."""
        if not url.version:
            return None
        folder = self.folder(url)
        return folder if _mark(folder, has_weights).exists() else None

    def fetch(self, url: ModelUrl, store: ModelStore, listing: Listing, has_weights: bool) -> Path:
        """Returns the folder with the files of `listing`, after it has downloaded what is missing. Blocks while another
        process of the node downloads. Raises ConfigError or Unavailable, and leaves what has arrived for the next
        try."""
        folder = self.folder(url)
        try:
            with reading(self._root, folder):
                folder.mkdir(parents=True, exist_ok=True)
                with filelock.FileLock(folder / ".lock"):
                    if not _mark(folder, has_weights).exists():
                        self._download(url, store, needed(listing.files, has_weights), folder)
                        _mark(folder, has_weights).touch()
        except OSError as error:
            full = "the disk is full" if error.errno == errno.ENOSPC else str(error)
            raise Unavailable(f"{url} can't be kept in {folder} (model.cache_dir): {full}") from error
        return folder

    def _download(self, url: ModelUrl, store: ModelStore, files: list[RemoteFile], folder: Path) -> None:
        missing = [file for file in files if not (folder / file.name).exists()]
        parts = [folder / f"{file.name}.part" for file in missing]
        present = sum(part.stat().st_size for part in parts if part.is_file())
        total = sum(file.num_bytes for file in missing)
        self._make_room(url, folder, total - present)
        self._check_room(url, folder, total - present)
        progress = _Progress(url, total, present)
        for file, part in zip(missing, parts, strict=True):
            if part.is_file() and part.stat().st_size > file.num_bytes:
                part.unlink()
            store.download(file, part, progress.advance)
            _check_file(url, file, part)
            part.replace(folder / file.name)
            shutil.rmtree(folder / f"{part.name}.hub", ignore_errors=True)

    def _make_room(self, url: ModelUrl, folder: Path, num_bytes: int) -> None:
        """Removes models that no process reads, as far as the limit asks for it. The download goes on if that is not
        enough, because what serves now matters more than the limit."""
        if self._max_bytes is None:
            return
        for model in make_room(self._root, folder, num_bytes, self._max_bytes):
            _LOG.info("removed %s (%.1f GB) for %s", model.name, model.num_bytes / 1e9, url)
        left = sum(model.num_bytes for model in cached_models(self._root)) + num_bytes
        if left > self._max_bytes:
            _LOG.warning(
                "with %s, models take %.1f GB of the %.1f GB of model.cache_bytes; all others are read by processes",
                url,
                left / 1e9,
                self._max_bytes / 1e9,
            )

    def _check_room(self, url: ModelUrl, folder: Path, num_bytes: int) -> None:
        free = self._free_bytes(folder)
        if num_bytes > free - SPARE_BYTES:
            raise ConfigError(
                f"{url} needs {num_bytes / 1e9:.1f} GB more in {folder}, where {free / 1e9:.1f} GB are free and "
                f"{SPARE_BYTES / 1e9:.1f} GB stay free; set model.cache_dir to a larger disk, or "
                "remove models with `weft node clean`"
            )


def _mark(folder: Path, has_weights: bool) -> Path:
    return folder / (".has-all" if has_weights else ".has-small")


def _check_file(url: ModelUrl, file: RemoteFile, part: Path) -> None:
    """Raises Unavailable, after it has removed the part, if it is not what the store has listed."""
    found = part.stat().st_size
    if found != file.num_bytes:
        part.unlink()
        raise Unavailable(f"{file.name} of {url} has {found} bytes, but the store listed {file.num_bytes}")
    if file.algorithm and digest_of(part, file.algorithm) != file.digest:
        part.unlink()
        raise Unavailable(f"{file.name} of {url} was damaged on its way: its {file.algorithm} digest is another one")


class _Progress:
    """Logs how much has arrived."""

    def __init__(self, url: ModelUrl, total_bytes: int, present_bytes: int) -> None:
        self._url, self._total, self._arrived = url, total_bytes, present_bytes
        self._told_s = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        self._arrived += num_bytes
        if time.monotonic() - self._told_s > TELL_S:
            self._told_s = time.monotonic()
            _LOG.info("%s: %.1f of %.1f GB have arrived", self._url, self._arrived / 1e9, self._total / 1e9)
