"""Reads the media of a request as far as their headers: it counts, parses and probes them, and checks them against the
limits.

Types and counts are checked first, before a byte is decoded. What the first bytes of a file do not say plainly is read
in a separate process that may be killed, one file of a request at a time. So requests take turns there, and a request
with many costly files does not hold up another. Of the model the module knows only what it takes (modality -> most
items); it knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from fabric.digest import content_digest
from fabric.errors import InvalidRequest, UnsupportedModality
from modalities.family import AudioHeader, MediaHeader, VideoHeader
from modalities.plugin import MediaLimits, ModalityPlugin, ReadsFirstBytes
from modalities.registry import Registry
from router.api.content import PART_TYPE_TO_MODALITY, MediaPart
from router.threads import RequestThreads, Work

SOUND = "audio"
"""This is the modality of a video's sound track."""
LOW_DETAIL_PIXELS = 512 * 512
"""Limits the pixels that the model looks at of a picture with `detail: low`; it is the size that OpenAI's documentation
names."""


class Prober(Protocol):
    """A `Prober` reads the headers of media; modalities.probing.ProbePool implements it."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        """Runs `ModalityPlugin.probe` in a separate process. Files that wait for a process are read in the order in
        which they came. Raises InvalidMedia, NoCapacity if there is no process, Overloaded if none is free in time, and
        MachineBusy if the read is not done in time."""
        ...


class ProbedMedium(NamedTuple):
    """A `ProbedMedium` is one part of the request that is a medium."""

    part: str
    """This is the path of the part in the request, such as `messages.0.content.1`."""
    modality: str
    data: bytes
    """Holds the encoded file."""
    digest: bytes
    """This is the digest of `data`, which is hashed once, however often the item is planned."""
    header: MediaHeader
    sound: AudioHeader | None
    """This is the sound track of a video, if the model is to get it."""
    probe_s: float
    max_pixels: int = 0
    """Limits the pixels of a picture, as `MediaOptions.max_pixels` does; 0 leaves the limit to the model."""


class _File(NamedTuple):
    """A `_File` is one part, decoded from its text."""

    data: bytes
    digest: bytes
    header: MediaHeader | None
    """This is the header if the first bytes of the file say it, otherwise None."""


class MediaReader:
    """A `MediaReader` has no state but the prober; each router has one. `max_items` maps a modality to the most items
    of a request; a modality without a row, or with 0, is not served."""

    def __init__(
        self,
        model_name: str,
        max_items: Mapping[str, int],
        limits: MediaLimits,
        registry: Registry,
        prober: Prober,
        threads: RequestThreads,
    ) -> None:
        self.max_items = max_items
        self._model_name = model_name
        self._limits = limits
        self._registry = registry
        self._prober = prober
        self._threads = threads

    async def read(self, parts: Sequence[MediaPart], with_sound_tracks: bool | None = None) -> list[ProbedMedium]:
        """Returns one medium per part, in order. `with_sound_tracks` says whether sound tracks count; by default they
        do if the model takes sound. Raises UnsupportedModality, InvalidRequest or InvalidMedia, naming the first part
        that is at fault, after which nothing is probed; raises also what a prober raises."""
        plugins = self._check_types(parts)
        has_sound_tracks = self._has_sound_tracks(with_sound_tracks)
        if not parts:
            return []
        files = await self._threads.run(Work.MEDIA, self._parse, parts, plugins)
        media: list[ProbedMedium] = []
        for part, plugin, file in zip(parts, plugins, files, strict=True):
            medium = await self._probe(part, plugin, file)
            media.append(medium._replace(sound=self._sound(medium) if has_sound_tracks else None))
        self._check_counts([(medium.part, SOUND) for medium in media if medium.sound], media)
        return media

    def plugin_of(self, part: MediaPart) -> ModalityPlugin:
        """Returns the plugin for a part. Raises UnsupportedModality if the model does not take the part's modality, and
        InvalidRequest for an unknown part type."""
        plugin = self._registry.modality_of_part(part.part_type)
        if plugin is None and part.part_type not in PART_TYPE_TO_MODALITY:
            raise InvalidRequest(f"unknown content part type `{part.part_type[:64]}`", param=part.param)
        if plugin is None or self.max_items.get(plugin.modality, 0) < 1:
            modality = PART_TYPE_TO_MODALITY[part.part_type] if plugin is None else plugin.modality
            raise UnsupportedModality(f"{self._model_name} takes no {modality} input", param=part.param)
        return plugin

    # ------------------------------------------------------------ types and counts

    def _check_types(self, parts: Sequence[MediaPart]) -> list[ModalityPlugin]:
        plugins = [self.plugin_of(part) for part in parts]
        self._check_counts([(part.param, plugin.modality) for part, plugin in zip(parts, plugins, strict=True)])
        return plugins

    def _check_counts(self, items: Sequence[tuple[str, str]], probed: Sequence[ProbedMedium] = ()) -> None:
        """Counts `items`, which are (part, modality) pairs, in addition to the media in `probed`. Raises InvalidRequest
        if a modality has too many items."""
        counts = Counter(medium.modality for medium in probed)
        for part, modality in items:
            counts[modality] += 1
            most = self.max_items[modality]
            if counts[modality] > most:
                tracks = ", the sound tracks of videos among them" if probed else ""
                raise InvalidRequest(f"at most {most} {modality} items in one request{tracks}", param=part)

    # ------------------------------------------------------------ headers

    def _parse(self, parts: Sequence[MediaPart], plugins: Sequence[ModalityPlugin]) -> list[_File]:
        files: list[_File] = []
        for part, plugin in zip(parts, plugins, strict=True):
            data = plugin.parse(part.fields, part.param, self._limits)
            header = plugin.first_header(data) if isinstance(plugin, ReadsFirstBytes) else None
            files.append(_File(data, content_digest(data), header))
        return files

    async def _probe(self, part: MediaPart, plugin: ModalityPlugin, file: _File) -> ProbedMedium:
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        if file.header is not None:
            header = file.header
        elif plugin.needs_process:
            header = await self._prober.probe(plugin.modality, file.data, part.param)
        else:
            header = await self._threads.run(Work.MEDIA, plugin.probe, file.data, part.param)
        plugin.validate(header, self._limits, part.param)
        probe_s = clock.time() - started_s
        most = LOW_DETAIL_PIXELS if part.detail == "low" else 0
        return ProbedMedium(part.param, plugin.modality, file.data, file.digest, header, None, probe_s, most)

    def _has_sound_tracks(self, wanted: bool | None) -> bool:
        takes_sound = self.max_items.get(SOUND, 0) > 0
        if wanted and not takes_sound:
            path = "mm_processor_kwargs.use_audio_in_video"
            raise UnsupportedModality(f"{self._model_name} takes no {SOUND} input", param=path)
        return takes_sound if wanted is None else wanted

    def _sound(self, medium: ProbedMedium) -> AudioHeader | None:
        """Returns the sound track of a medium, or None, and checks it against the limits for sounds. Raises
        InvalidMedia."""
        sound = medium.header.sound if isinstance(medium.header, VideoHeader) else None
        if sound is not None and self._registry.has_modality(SOUND):
            self._registry.modality(SOUND).validate(sound, self._limits, medium.part)
        return sound
