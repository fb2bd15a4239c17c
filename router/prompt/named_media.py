"""Keeps the media to which clients gave names (`uuid`), so that a later request may send the name alone.

A name belongs to the salt under which it was given, so no tenant can name the media of another. The module knows
nothing of requests or formats.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from modalities.family import FeaturesHeader, MediaHeader


class NamedFile(NamedTuple):
    """A `NamedFile` is the encoded file of one medium, or the features that a client has sent in its place, with what
    was found out about it at once."""

    data: bytes
    digest: bytes
    header: MediaHeader | FeaturesHeader | None
    """This is the header if the first bytes of the file say it, otherwise None."""


class NamedMedia:
    """A `NamedMedia` keeps the encoded files of named media up to `max_bytes`; beyond that, it forgets what was not
    used for longest. It belongs to one router."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._name_to_file: OrderedDict[tuple[str, str, str], NamedFile] = OrderedDict()

    def keep(self, salt: str, modality: str, uuid: str, file: NamedFile) -> None:
        """Keeps a file under its name, in place of an earlier one. A file that alone exceeds the limit is not kept."""
        name = (salt, modality, uuid)
        earlier = self._name_to_file.pop(name, None)
        self.num_bytes -= 0 if earlier is None else len(earlier.data)
        if len(file.data) > self._max_bytes:
            return
        self._name_to_file[name] = file
        self.num_bytes += len(file.data)
        while self.num_bytes > self._max_bytes:
            _, forgotten = self._name_to_file.popitem(last=False)
            self.num_bytes -= len(forgotten.data)

    def find(self, salt: str, modality: str, uuid: str) -> NamedFile | None:
        """Returns the file of this name, or None, and marks it as used."""
        name = (salt, modality, uuid)
        file = self._name_to_file.get(name)
        if file is not None:
            self._name_to_file.move_to_end(name)
        return file
