"""Keeps the media to which clients gave names (`uuid`), so that a later request may send the name alone.

A name belongs to the salt under which it was given, so no tenant can name the media of another. The module knows
nothing of requests or formats.
"""

from __future__ import annotations

import sys
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


Name = tuple[str, str, str]
"""Consists of a salt, a modality and a `uuid`."""
ENTRY_BYTES = 640
"""Counts what an entry takes besides its file and its name: tuples, places in three dicts, a digest and a header. Small
files would otherwise take many times what they count."""


def kept_bytes(name: Name, file: NamedFile) -> int:
    """Returns what keeping a file under a name takes. The size of a text is that of its object, because one character
    takes up to four bytes."""
    salt, _, uuid = name
    return ENTRY_BYTES + len(file.data) + sys.getsizeof(salt) + sys.getsizeof(uuid)


class NamedMedia:
    """A `NamedMedia` keeps the encoded files of named media up to `max_bytes`, as `kept_bytes` counts them, for several
    owners. Beyond that, it forgets a file of the owner that has most: the one that was not used for longest. So an
    owner with no more than an equal share keeps what it has, whatever others send. It belongs to one router."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._name_to_owner: dict[Name, str] = {}
        self._owner_to_files: dict[str, OrderedDict[Name, NamedFile]] = {}
        self._owner_to_bytes: dict[str, int] = {}

    def keep(self, owner: str, salt: str, modality: str, uuid: str, file: NamedFile) -> None:
        """Keeps a file of `owner` under its name, in place of an earlier one. A file that alone exceeds the limit is
        not kept."""
        name = (salt, modality, uuid)
        self._forget(name)
        num_bytes = kept_bytes(name, file)
        if num_bytes > self._max_bytes:
            return
        self._name_to_owner[name] = owner
        self._owner_to_files.setdefault(owner, OrderedDict())[name] = file
        self._count(owner, num_bytes)
        while self.num_bytes > self._max_bytes:
            largest = max(self._owner_to_bytes, key=self._owner_to_bytes.__getitem__)
            self._forget(next(iter(self._owner_to_files[largest])))

    def find(self, salt: str, modality: str, uuid: str) -> NamedFile | None:
        """Returns the file of this name, or None, and marks it as used."""
        name = (salt, modality, uuid)
        owner = self._name_to_owner.get(name)
        if owner is None:
            return None
        files = self._owner_to_files[owner]
        files.move_to_end(name)
        return files[name]

    def _forget(self, name: Name) -> None:
        owner = self._name_to_owner.pop(name, None)
        if owner is None:
            return
        files = self._owner_to_files[owner]
        self._count(owner, -kept_bytes(name, files.pop(name)))
        if not files:
            del self._owner_to_files[owner], self._owner_to_bytes[owner]

    def _count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._owner_to_bytes[owner] = self._owner_to_bytes.get(owner, 0) + num_bytes
