"""Looks at files while they arrive: `FirstLook` refuses a file as soon as its first bytes say that it will be refused,
and `MediaJudge` knows what the files of each modality may be.

The plugins of the modalities judge (`modalities.media.JudgesFirstBytes`), by reading bytes in a bounded number of
steps; no library's parser sees a file here. The header of an ordinary picture is read here too, once it is complete, so
that the router need not. Other headers take a parser, whose crash would end all fetches; they are read by the prober's
processes, as those of files that requests contain. The module knows nothing of URLs.
"""

from __future__ import annotations

import asyncio

from fabric.contracts import InvalidMedia
from modalities.family import ImageHeader
from modalities.media import (
    ENOUGH_BYTES,
    JUDGED_BYTES,
    JudgesFirstBytes,
    MediaLimits,
    ModalityPlugin,
    ReadsFirstBytes,
    max_file_bytes,
)
from modalities.registry import Registry
from router.fetch.stored_file import StoredFile

READ_IN_LOOP_BYTES = 2**20
"""A file of at most this many bytes is read in the event loop, which takes less than half a millisecond."""


class FirstLook:
    """A `FirstLook` sees one file."""

    def __init__(self, judge: JudgesFirstBytes | None, limits: MediaLimits) -> None:
        """Without a judge, nothing is refused."""
        self._judge = judge
        self._limits = limits
        self._head = bytearray()
        self._next_look = JUDGED_BYTES
        """The file is judged when this many of its bytes are there, and again each time that they have doubled."""

    @property
    def num_wanted(self) -> int:
        """Returns how many of the file's first bytes are still worth looking at."""
        return 0 if self._judge is None else ENOUGH_BYTES - len(self._head)

    def see(self, piece: bytes) -> None:
        """Takes the next bytes of the file. Raises InvalidMedia if the file will be refused."""
        if self._judge is None:
            return
        self._head += piece[: ENOUGH_BYTES - len(self._head)]
        if len(self._head) >= self._next_look:
            self._next_look = min(2 * len(self._head), ENOUGH_BYTES)
            self._look(is_last=len(self._head) >= ENOUGH_BYTES)

    def end(self) -> None:
        """Says that there are no more bytes. Raises InvalidMedia if the file will be refused."""
        self._look(is_last=True)

    def _look(self, is_last: bool) -> None:
        if self._judge is None:
            return
        flaw, is_final = self._judge.judge(bytes(self._head), self._limits)
        if flaw:
            raise InvalidMedia(flaw)
        if is_final or is_last:
            self._judge = None
            self._head.clear()


class MediaJudge:
    """A `MediaJudge` knows the modalities of a registry and the limits of a deployment. It has no state."""

    def __init__(self, registry: Registry, limits: MediaLimits) -> None:
        self._registry = registry
        self._limits = limits

    def max_bytes(self, modality: str) -> int:
        """Returns how many bytes a file of this modality may have."""
        plugin = self._plugin(modality)
        return self._limits.max_bytes_per_item if plugin is None else max_file_bytes(plugin, self._limits)

    def first_look(self, modality: str) -> FirstLook:
        plugin = self._plugin(modality)
        return FirstLook(plugin if isinstance(plugin, JudgesFirstBytes) else None, self._limits)

    async def header(self, modality: str, file: StoredFile) -> ImageHeader | None:
        """Returns the header of an ordinary picture, or None for other files, whose headers are read elsewhere."""
        plugin = self._plugin(modality)
        if plugin is None or not isinstance(plugin, ReadsFirstBytes):
            return None
        if modality not in file.modality_to_header:
            is_large = file.num_bytes > READ_IN_LOOP_BYTES
            data = await asyncio.to_thread(file.read) if is_large else file.read()
            found = plugin.first_header(data)
            file.modality_to_header[modality] = found if isinstance(found, ImageHeader) else None
        return file.modality_to_header[modality]

    def _plugin(self, modality: str) -> ModalityPlugin | None:
        return self._registry.modality(modality) if self._registry.has_modality(modality) else None
