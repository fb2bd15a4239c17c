"""The media of a request, read as far as their headers: counted, parsed, probed, held against the limits.

Types and counts first, before a byte is decoded. What the first bytes of a file do not say plainly is read in a process
that may be killed, one file of a request at a time: so requests take turns there, and one that has many costly files
holds up no other. Knows no model but by what it takes (modality -> most items), and no tokens.
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
"""The modality of a video's sound track."""
LOW_DETAIL_PIXELS = 512 * 512
"""What the model looks at of a picture with `detail: low`; the size that OpenAI's documentation names."""


class Prober(Protocol):
    """See modalities.probing.ProbePool."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        """`ModalityPlugin.probe`, in a process of its own; files that wait for one are read in the order in which they
        came. Raises InvalidMedia, NoCapacity if there is none, Overloaded if none is free in time, MachineBusy if it is
        not done in time."""
        ...


class ProbedMedium(NamedTuple):
    """One part of the request that is a medium."""

    part: str
    """Its path, `messages.0.content.1`."""
    modality: str
    data: bytes
    """The encoded file."""
    digest: bytes
    """Of `data`: it is hashed once, however often the item is planned."""
    header: MediaHeader
    sound: AudioHeader | None
    """The sound track that the model is to hear, of a video."""
    probe_s: float
    max_pixels: int = 0
    """As `MediaOptions.max_pixels`, of a picture."""


class _File(NamedTuple):
    """One part, decoded from its text."""

    data: bytes
    digest: bytes
    header: MediaHeader | None
    """If its first bytes say it."""


class MediaReader:
    """Stateless but for the prober; one per router. `max_items`: modality -> most items of a request; a modality
    without a row, or with 0, is not served."""

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

    async def read(self, parts: Sequence[MediaPart], hears_videos: bool | None = None) -> list[ProbedMedium]:
        """One per part, in order. `hears_videos`: whether sound tracks count; by default they do if the model takes
        both. Raises UnsupportedModality, InvalidRequest, InvalidMedia, naming the first part that is at fault, behind
        which nothing is probed; and what a prober raises."""
        plugins = self._check_types(parts)
        has_hearing = self._has_hearing(hears_videos)
        if not parts:
            return []
        files = await self._threads.run(Work.MEDIA, self._parse, parts, plugins)
        media: list[ProbedMedium] = []
        for part, plugin, file in zip(parts, plugins, files, strict=True):
            medium = await self._probe(part, plugin, file)
            media.append(medium._replace(sound=self._sound(medium) if has_hearing else None))
        self._check_counts([(medium.part, SOUND) for medium in media if medium.sound], media)
        return media

    def plugin_of(self, part: MediaPart) -> ModalityPlugin:
        """Raises UnsupportedModality, InvalidRequest for a type that nobody knows."""
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
        """`items`: (part, modality), to be counted on top of those that were probed."""
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

    def _has_hearing(self, wanted: bool | None) -> bool:
        can_hear = self.max_items.get(SOUND, 0) > 0
        if wanted and not can_hear:
            path = "mm_processor_kwargs.use_audio_in_video"
            raise UnsupportedModality(f"{self._model_name} takes no {SOUND} input", param=path)
        return can_hear if wanted is None else wanted

    def _sound(self, medium: ProbedMedium) -> AudioHeader | None:
        """The sound track that counts, within the limits of sounds. Raises InvalidMedia."""
        sound = medium.header.sound if isinstance(medium.header, VideoHeader) else None
        if sound is not None and self._registry.has_modality(SOUND):
            self._registry.modality(SOUND).validate(sound, self._limits, medium.part)
        return sound
