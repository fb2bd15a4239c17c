"""Fetches a model in a process of its own, and runs in that process.

The hub's library decides when it is imported whether it may use the network at all, and replicas import it with
`HF_HUB_OFFLINE=1`, so that nothing else is ever fetched. The process also gives all memory back that a download took.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from deploy.models.model_cache import ModelCache
from deploy.models.model_leases import hold_model
from deploy.models.model_stores import open_store
from deploy.models.model_urls import ModelUrl
from fabric.contracts import ConfigError, Unavailable, WeftError

MAX_FETCHES = 3
_PROGRAM = "import sys; from deploy.models.download import main; sys.exit(main(sys.argv[1]))"


class FetchedModel(NamedTuple):
    """Holds the pinned URL of a model, and the folder on this node that has its files."""

    url: ModelUrl
    directory: Path


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "models"


def fetch_model(url: ModelUrl, cache_dir: Path | None, has_weights: bool, max_bytes: int | None = None) -> FetchedModel:
    """Brings the files of a model onto this node: all that Weft reads, or those without weights. A model that is there
    is found without the store. Blocks until the files are there, and keeps them from being removed until this process
    ends. For a download, others are removed if models take more than `max_bytes`. Raises ConfigError or Unavailable
    with the reason."""
    root = cache_dir or default_cache_dir()
    cache = ModelCache(root)
    for _ in range(MAX_FETCHES):
        if url.version:
            _hold(root, cache.folder(url))
            ready = cache.ready_folder(url, has_weights)
            if ready is not None:
                return FetchedModel(url, ready)
        # The model may be removed between the end of this process and the lock that this one takes then.
        url = _fetch_in_process(url, root, has_weights, max_bytes)
    raise Unavailable(f"{url} is removed from {root} each time that it was downloaded")


def _hold(root: Path, folder: Path) -> None:
    """Keeps the model in a folder. On a disk that may only be read nothing can be removed, and no lock be made."""
    with contextlib.suppress(OSError):
        hold_model(root, folder)


def _fetch_in_process(url: ModelUrl, root: Path, has_weights: bool, max_bytes: int | None) -> ModelUrl:
    """Downloads a model in a process of its own. Returns its pinned URL."""
    question = json.dumps([str(url), str(root), has_weights, max_bytes])
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, question],
        env=os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise Unavailable(f"the download of {url} ended with status {done.returncode}") from None
    if "error" in answer:
        raise (ConfigError if answer["is_config"] else Unavailable)(answer["error"])
    return ModelUrl.parse(answer["url"])


def _fetch(url: ModelUrl, root: Path, has_weights: bool, max_bytes: int | None) -> ModelUrl:
    store = open_store(url)
    listing = store.list_files()
    if url.version and url.scheme != "hf" and url.version != listing.version:
        raise ConfigError(
            f"the objects at {url.pinned('')} have changed since {url.version} (now {listing.version}); "
            "start the cluster again to serve the new ones"
        )
    pinned = url.pinned(listing.version)
    ModelCache(root, max_bytes=max_bytes).fetch(pinned, open_store(pinned), listing, has_weights)
    return pinned


def main(question: str) -> int:
    """Answers a question of `fetch_model` on standard output."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for library in ("httpx", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.WARNING)
    text, root, has_weights, max_bytes = json.loads(question)
    try:
        url = _fetch(ModelUrl.parse(text), Path(root), has_weights, max_bytes)
    except WeftError as error:
        print(json.dumps({"error": error.message, "is_config": isinstance(error, ConfigError)}))
        return 1
    print(json.dumps({"url": str(url)}))
    return 0
