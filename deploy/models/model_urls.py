"""Reads the URL of a model, with the version that pins its files.

The module knows nothing of how a store is asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fabric.contracts import ConfigError

SCHEMES = ("s3", "gs", "hf")
_FORMS = {
    "s3": "s3://BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "hf": "hf://OWNER/NAME, or hf://OWNER/NAME@REVISION",
}
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def is_model_url(text: str) -> bool:
    """Returns whether a text is a URL, of any scheme, and no path."""
    return "://" in text


@dataclass(frozen=True, slots=True)
class ModelUrl:
    """A `ModelUrl` names the files of a model in a store."""

    scheme: str
    location: str
    """Is bucket and prefix (`models/qwen`), or owner and name of a repository."""
    version: str = ""
    """Pins the files: a revision of a repository, or the digest of a listing. Without it, the present files are
    meant."""

    @staticmethod
    def parse(text: str) -> ModelUrl:
        """Returns the URL in a text. Raises ConfigError for a text that names no model."""
        scheme, _, rest = text.partition("://")
        if scheme not in SCHEMES:
            known = ", ".join(f"{each}://" for each in SCHEMES)
            raise ConfigError(f"{text!r} names no model: a URL begins with {known}, and a folder is written as a path")
        location, _, version = rest.rpartition("@") if "@" in rest else (rest, "", "")
        parts = location.strip("/").split("/")
        is_whole = len(parts) == 2 if scheme == "hf" else len(parts) >= 2
        if not is_whole or not all(re.fullmatch(_PART, part) for part in parts) or ("@" in rest and not version):
            raise ConfigError(f"{text!r} names no model; write it as {_FORMS[scheme]}")
        if version and not re.fullmatch(r"[A-Za-z0-9._/-]+", version):
            raise ConfigError(f"{text!r} has the version {version!r}, which contains characters that no version has")
        return ModelUrl(scheme, "/".join(parts), version)

    def pinned(self, version: str) -> ModelUrl:
        return replace(self, version=version)

    @property
    def name(self) -> str:
        """Returns the last part of the location, by which the model is known."""
        return self.location.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.scheme}://{self.location}" + (f"@{self.version}" if self.version else "")
