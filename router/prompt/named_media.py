"""Keeps the media to which clients gave names (`uuid`), so that a later request may send the name alone.

A name belongs to the salt under which it was given, so no tenant can name the media of another. The module knows
nothing of requests or formats.
"""

from __future__ import annotations

from collections import OrderedDict


class NamedMedia:
    """A `NamedMedia` keeps the encoded files of named media up to `max_bytes`; beyond that, it forgets what was not
    used for longest. It belongs to one router."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._name_to_file: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()

    def keep(self, salt: str, modality: str, uuid: str, data: bytes) -> None:
        """Keeps a file under its name, in place of an earlier one. A file that alone exceeds the limit is not kept."""
        name = (salt, modality, uuid)
        self.num_bytes -= len(self._name_to_file.pop(name, b""))
        if len(data) > self._max_bytes:
            return
        self._name_to_file[name] = data
        self.num_bytes += len(data)
        while self.num_bytes > self._max_bytes:
            _, forgotten = self._name_to_file.popitem(last=False)
            self.num_bytes -= len(forgotten)

    def find(self, salt: str, modality: str, uuid: str) -> bytes | None:
        """Returns the file of this name, or None, and marks it as used."""
        name = (salt, modality, uuid)
        data = self._name_to_file.get(name)
        if data is not None:
            self._name_to_file.move_to_end(name)
        return data
