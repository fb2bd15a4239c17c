"""Fetches a model in a process of its own, and runs in that process.

The hub's library decides when it is imported whether it may use the network at all, and replicas import it with
`HF_HUB_OFFLINE=1`, so that nothing else is ever fetched. The process also gives all memory back that a download took.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from deploy.models.model_cache import ModelCache
from deploy.models.model_stores import open_store
from deploy.models.model_urls import ModelUrl
from fabric.contracts import ConfigError, Unavailable, WeftError

_PROGRAM = "import sys; from deploy.models.download import main; sys.exit(main(sys.argv[1]))"


class FetchedModel(NamedTuple):
    """Holds the pinned URL of a model, and the folder on this node that has its files."""

    url: ModelUrl
    directory: Path


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "models"


def fetch_model(url: ModelUrl, cache_dir: Path | None, has_weights: bool) -> FetchedModel:
    """Brings the files of a model onto this node: all that Weft reads, or those without weights. A model that is there
    is found without the store. Blocks until the files are there. Raises ConfigError or Unavailable with the reason."""
    root = cache_dir or default_cache_dir()
    ready = ModelCache(root).ready_folder(url, has_weights)
    if ready is not None:
        return FetchedModel(url, ready)
    question = json.dumps([str(url), str(root), has_weights])
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
    return FetchedModel(ModelUrl.parse(answer["url"]), Path(answer["directory"]))


def _fetch(url: ModelUrl, root: Path, has_weights: bool) -> FetchedModel:
    store = open_store(url)
    listing = store.list_files()
    if url.version and url.scheme != "hf" and url.version != listing.version:
        raise ConfigError(
            f"the objects at {url.pinned('')} have changed since {url.version} (now {listing.version}); "
            "start the cluster again to serve the new ones"
        )
    pinned = url.pinned(listing.version)
    return FetchedModel(pinned, ModelCache(root).fetch(pinned, open_store(pinned), listing, has_weights))


def main(question: str) -> int:
    """Answers a question of `fetch_model` on standard output."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for library in ("httpx", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.WARNING)
    text, root, has_weights = json.loads(question)
    try:
        url, directory = _fetch(ModelUrl.parse(text), Path(root), has_weights)
    except WeftError as error:
        print(json.dumps({"error": error.message, "is_config": isinstance(error, ConfigError)}))
        return 1
    print(json.dumps({"url": str(url), "directory": str(directory)}))
    return 0
