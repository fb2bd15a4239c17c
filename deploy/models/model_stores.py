"""Lists and downloads the files of a model in an object store or in a hub, with errors that name what to change.

An `ObjectStore` speaks to S3 and to Google Cloud Storage by obstore, which is one wheel without dependencies, in place
of an SDK of each cloud. A `ModelHub` speaks to a hub by huggingface_hub, which comes with transformers. Both read their
endpoints and credentials from the environment and the machine, as their own tools do (`AWS_*`, `GOOGLE_*`, `HF_*`).

The module knows nothing of where files are kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from deploy.models.model_urls import ModelUrl
from fabric.contracts import ConfigError, Unavailable

CHUNK_BYTES = 8 * 2**20
ADAPTER_MARK = "adapter_config.json"
MARKS = frozenset({"config.json", ADAPTER_MARK})
"""Names the files of which a model, or a LoRA adapter, has one."""
_MD5 = re.compile(r"[0-9a-f]{32}")

Advance = Callable[[int], object]
"""Is told the bytes that have arrived since the last call."""


class RemoteFile(NamedTuple):
    """Describes a file in a store. `digest` identifies its content, and `algorithm` says how it is computed; it is
    empty where the store does not say."""

    name: str
    num_bytes: int
    digest: str
    algorithm: str = ""


class Listing(NamedTuple):
    """Holds the files of a model at one version."""

    version: str
    files: tuple[RemoteFile, ...]


class ModelStore(Protocol):
    """Holds the files of models."""

    def list_files(self) -> Listing:
        """Lists the files of the URL. Raises ConfigError if there are none or they may not be read, and Unavailable if
        the store does not answer."""
        ...

    def download(self, file: RemoteFile, part: Path, advance: Advance) -> None:
        """Writes the file to `part`, after what an earlier download has left there. Raises as `list_files` does, and
        OSError if the disk is full."""
        ...


def open_store(url: ModelUrl) -> ModelStore:
    return ModelHub(url) if url.scheme == "hf" else ObjectStore(url)


def is_model_file(name: str) -> bool:
    """Returns whether a file at this place belongs to the model: one beside config.json that is not hidden."""
    return "/" not in name and not name.startswith(".")


def _check_marked(url: ModelUrl, place: str, files: Iterable[RemoteFile]) -> None:
    """Raises ConfigError if no file says that this is a model, or a LoRA adapter of one."""
    if MARKS.isdisjoint(file.name for file in files):
        raise ConfigError(f"there is no model at {url}: the {place} has no config.json (an adapter: {ADAPTER_MARK})")


# ------------------------------------------------------------ object stores


class ObjectStore:
    """Reads a prefix of a bucket."""

    def __init__(self, url: ModelUrl) -> None:
        from obstore.store import from_url

        self._url = url
        with self._errors():
            self._store: Any = from_url(f"{url.scheme}://{url.location}", client_options={"allow_http": True})

    def list_files(self) -> Listing:
        import obstore

        files = []
        with self._errors():
            for found in obstore.list_with_delimiter(self._store)["objects"]:
                name, tag = found["path"].rpartition("/")[2], (found["e_tag"] or "").strip('"')
                if is_model_file(name):
                    algorithm = "md5" if _MD5.fullmatch(tag) else ""  # That of an upload in parts is no digest.
                    files.append(RemoteFile(name, found["size"], tag, algorithm))
        files.sort()
        _check_marked(self._url, "prefix", files)
        told = "\n".join(f"{file.name} {file.num_bytes} {file.digest}" for file in files)
        return Listing(hashlib.sha256(told.encode()).hexdigest()[:16], tuple(files))

    def download(self, file: RemoteFile, part: Path, advance: Advance) -> None:
        import obstore

        start = part.stat().st_size if part.exists() else 0
        with self._errors(), part.open("ab") as target:
            while start < file.num_bytes:
                end = min(start + CHUNK_BYTES, file.num_bytes)
                data = obstore.get_range(self._store, file.name, start=start, end=end)
                target.write(data)
                advance(len(data))
                start = end

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from obstore import exceptions

        url = self._url
        try:
            yield
        except exceptions.NotFoundError as error:
            raise ConfigError(f"there is nothing at {url}: the bucket or the object does not exist") from error
        except exceptions.BaseError as error:
            if "NoSuchBucket" in str(error):
                raise ConfigError(f"there is nothing at {url}: the bucket does not exist") from error
            is_denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
            if is_denied or re.search(
                r"status code: 40[13]|\b40[13] (Forbidden|Unauthorized)|AccessDenied", str(error)
            ):
                raise ConfigError(
                    f"{url} may not be read with the credentials of this node; set those of the store's own tools "
                    f"(AWS_ACCESS_KEY_ID, a role, GOOGLE_APPLICATION_CREDENTIALS): {_first_line(error)}"
                ) from error
            raise Unavailable(f"the store of {url} does not answer: {_first_line(error)}") from error


# ------------------------------------------------------------ hubs


class ModelHub:
    """Reads a repository of a hub (`HF_ENDPOINT`, `HF_TOKEN`)."""

    def __init__(self, url: ModelUrl) -> None:
        self._url = url

    def list_files(self) -> Listing:
        from huggingface_hub import HfApi

        with self._errors():
            info = HfApi().model_info(self._url.location, revision=self._url.version or None, files_metadata=True)
        files = [
            RemoteFile(
                each.rfilename,
                each.size or 0,
                each.lfs.sha256 if each.lfs else each.blob_id or "",
                "sha256" if each.lfs else "git" if each.blob_id else "",
            )
            for each in info.siblings or ()
            if is_model_file(each.rfilename)
        ]
        _check_marked(self._url, "repository", files)
        return Listing(str(info.sha), tuple(sorted(files)))

    def download(self, file: RemoteFile, part: Path, advance: Advance) -> None:
        """Lets the hub's own library write the file. It continues a download that it has left, has several connections,
        and understands stores of deduplicated chunks."""
        from huggingface_hub import hf_hub_download

        folder = part.parent / f"{part.name}.hub"
        with self._errors():
            written = hf_hub_download(
                self._url.location, file.name, revision=self._url.version or None, local_dir=folder
            )
        Path(written).replace(part)
        advance(file.num_bytes)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from huggingface_hub import errors

        url = self._url
        # Every error of the connection is of this class, whichever HTTP library the hub's library uses.
        transport_error: Any = next(base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
        try:
            yield
        except errors.GatedRepoError as error:
            raise ConfigError(
                f"{url} is gated: accept its conditions on the hub, and set HF_TOKEN on every node"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ConfigError(f"{url} has no such revision") from error
        except errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"there is no model at {url}, or it is private and HF_TOKEN of this node may not read it"
            ) from error
        except (transport_error, errors.LocalEntryNotFoundError) as error:
            raise Unavailable(f"the hub of {url} does not answer: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def digest_of(path: Path, algorithm: str) -> str:
    """Returns the digest of a file: `md5`, `sha256`, or `git`, the SHA-1 of a blob in git."""
    state = hashlib.new("sha1" if algorithm == "git" else algorithm, usedforsecurity=False)
    if algorithm == "git":
        state.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            state.update(data)
    return state.hexdigest()
