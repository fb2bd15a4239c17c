"""Turns the media of a request into items with plans that fit the context. `MediaReader` reads the media as far as
their headers: it counts, parses or fetches (`UrlMedia`) and probes them, and checks them against the limits.
`MediaPlanner` then plans the probed media as items: items of fixed size come first, then the videos share what is left
(`share_tokens`). Reading happens once per request, and planning again each time that the degradation policy has reduced
or removed an item (`Losses`).

Media are read in threads that the caller provides (`InThread`). Work that may take long for one file (such as a
parser's) belongs in a helper process (`Prober`), not in these threads.

The module decodes nothing. Of a request it knows only the media and their options; of the model it knows what it takes
(modality -> most items), and how a family plans an item.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from fabric.contracts import InvalidMedia, InvalidRequest, MediaItem, UnsupportedModality, content_digest
from modalities.family import (
    DEFAULT_OPTIONS,
    AudioHeader,
    Family,
    FeaturesHeader,
    ImageHeader,
    ItemPlan,
    MediaHeader,
    MediaOptions,
    VideoHeader,
    plan_medium,
)
from modalities.media import (
    MediaLimits,
    ModalityPlugin,
    ReadsFirstBytes,
    decoded_bytes,
    max_file_bytes,
    plan_media,
)
from modalities.registry import Registry
from router.api import FILE, IMAGE_EMBEDS, PART_TYPE_TO_MODALITY, MediaPart, Part, shown
from router.fetch import FetchedFile
from router.prompt.given_features import ImageEmbedsReader
from router.prompt.named_media import NamedFile, NamedMedia
from router.prompt.url_media import UNACCOUNTED, FetchAccount, UrlMedia

P = ParamSpec("P")
T = TypeVar("T")


# ------------------------------------------------------------ reading the headers

IMAGE = "image"
SOUND = "audio"
"""This is the modality of a video's sound track."""
LOW_DETAIL_PIXELS = 512 * 512
"""Limits the pixels that the model looks at of a picture with `detail: low`; it is the size that OpenAI's documentation
names."""


class MediaSources(NamedTuple):
    """Holds what reads media that a request does not contain as files."""

    url_media: UrlMedia | None = None
    """Fetches; without it, only `data:` URLs are taken."""
    named_media: NamedMedia | None = None
    """Keeps media to which clients gave names; without it, none are kept."""
    features: ImageEmbedsReader | None = None
    """Reads features that clients send in place of pictures; without it, none are taken."""


class MediaReader:
    """A `MediaReader` reads the media of a request as far as their headers. It has no state but the prober; each router
    has one. `max_items` maps a modality to the most items of a request; a modality without a row, or with 0, is not
    served.

    Types and counts are checked first, before a byte is decoded. What the first bytes of a file do not say plainly is
    read in a separate process that may be killed, one file of a request at a time. So requests take turns there, and a
    request with many costly files does not hold up another."""

    def __init__(
        self,
        model_name: str,
        max_items: Mapping[str, int],
        limits: MediaLimits,
        registry: Registry,
        prober: Prober,
        in_thread: InThread,
        sources: MediaSources | None = None,
    ) -> None:
        """Without `sources`, only media in `data:` URLs and the like are taken."""
        sources = sources or MediaSources()
        self.max_items = max_items
        self._model_name = model_name
        self._limits = limits
        self._registry = registry
        self._prober = prober
        self._in_thread = in_thread
        self._url_media = sources.url_media or UrlMedia()
        self._named_media = sources.named_media or NamedMedia(0)
        self._features = sources.features

    async def read(
        self,
        parts: Sequence[MediaPart],
        with_sound_tracks: bool | None = None,
        salt: str = "",
        account: FetchAccount = UNACCOUNTED,
    ) -> list[ProbedMedium]:
        """Returns one medium per part, in order. `with_sound_tracks` says whether sound tracks count; by default they
        do if the model takes sound. Requests with the same `salt` share what is fetched, and `account` is told of it.
        Raises UnsupportedModality, InvalidRequest, InvalidMedia, UrlRefused or MediaUnreachable, naming the first part
        that is at fault, after which nothing is probed; raises also what a prober and a fetcher raise."""
        plugins = self._check_types(parts)
        has_sound_tracks = self._has_sound_tracks(with_sound_tracks)
        if not parts:
            return []
        files = await self._files(parts, plugins, salt, account)
        media: list[ProbedMedium] = []
        num_bytes = 0
        for part, plugin, file in zip(parts, plugins, files, strict=True):
            medium = await self._probe(part, plugin, file)
            if part.uuid and part.has_content:
                self._named_media.keep(account.tenant, salt, _kind(part, plugin), part.uuid, file)
            num_bytes += decoded_bytes(medium.header)
            self._check_decoded(num_bytes, part.param)
            media.append(medium._replace(sound=self._sound(medium) if has_sound_tracks else None))
        self._check_counts([(medium.part, SOUND) for medium in media if medium.sound], media)
        return media

    def _check_decoded(self, num_bytes: int, param: str) -> None:
        if num_bytes > self._limits.max_decoded_bytes:
            raise InvalidMedia(
                f"{param}: the media up to here would take {num_bytes} bytes once they are decoded, and those of a "
                f"request may take at most {self._limits.max_decoded_bytes}",
                param=param,
            )

    def plugin_of(self, part: MediaPart) -> ModalityPlugin:
        """Returns the plugin for a part. Raises UnsupportedModality if the model does not take the part's modality, and
        InvalidRequest for an unknown part type."""
        plugin = self._registry.modality_of_part(part.part_type)
        if part.part_type == IMAGE_EMBEDS and self._registry.has_modality(IMAGE):
            plugin = self._registry.modality(IMAGE)
        if plugin is None and part.part_type not in PART_TYPE_TO_MODALITY:
            raise InvalidRequest(f"the content part type {shown(part.part_type)} is unknown", param=part.param)
        if plugin is None or self.max_items.get(plugin.modality, 0) < 1:
            modality = PART_TYPE_TO_MODALITY[part.part_type] if plugin is None else plugin.modality
            raise self._unsupported(modality, part.param)
        return plugin

    def _unsupported(self, modality: str, param: str) -> UnsupportedModality:
        taken = ", ".join(["text", *(name for name, most in self.max_items.items() if most > 0)])
        return UnsupportedModality(
            f"the model `{self._model_name}` takes no {modality} input on this server; it takes {taken}", param=param
        )

    def identified(self, content: str | list[Part], salt: str) -> str | list[Part]:
        """Returns a content in which each part of the type `file` that has only a name has the type of the medium with
        this name. Raises InvalidRequest if there is none (any more), or more than one."""
        if isinstance(content, str) or self._registry.modality_of_part(FILE) is not None:
            return content
        return [
            self._typed(part, salt) if isinstance(part, MediaPart) and part.part_type == FILE else part
            for part in content
        ]

    def _typed(self, part: MediaPart, salt: str) -> MediaPart:
        candidates = (*self.max_items, IMAGE_EMBEDS)
        kinds = [kind for kind in candidates if self._named_media.find(salt, kind, part.uuid) is not None]
        if not kinds:
            raise _unknown_name(part)
        part_types = [each if each == IMAGE_EMBEDS else self._registry.modality(each).part_types[0] for each in kinds]
        if len(kinds) > 1:
            choice = " or ".join(f"`{each}`" for each in part_types)
            message = f"the `uuid` {shown(part.uuid)} names several media; send a part of the type {choice} with it"
            raise InvalidRequest(message, param=part.param)
        return part._replace(part_type=part_types[0])

    # ------------------------------------------------------------ types and counts

    def _check_types(self, parts: Sequence[MediaPart]) -> list[ModalityPlugin]:
        plugins = [self.plugin_of(part) for part in parts]
        for part in parts:
            if part.part_type == IMAGE_EMBEDS:
                self._feature_reader(part).check(part)
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
                tracks = ", the sound tracks of videos included" if probed else ""
                message = f"a request may have at most {most} {modality} {'item' if most == 1 else 'items'}{tracks}"
                raise InvalidRequest(message, param=part)

    def _feature_reader(self, part: MediaPart) -> ImageEmbedsReader:
        if self._features is None:
            raise UnsupportedModality("this server takes no features as input", param=part.param)
        return self._features

    # ------------------------------------------------------------ headers

    async def _files(
        self, parts: Sequence[MediaPart], plugins: Sequence[ModalityPlugin], salt: str, account: FetchAccount
    ) -> list[NamedFile]:
        """Returns the files of the parts, in order. What the request contains is read before anything is fetched."""
        urls = self._url_media.find(parts)
        wanted = list(zip(parts, plugins, strict=True))
        kept = {part.param: self._kept(part, plugin, salt) for part, plugin in wanted if not part.has_content}
        inside = [(part, plugin) for part, plugin in wanted if part.param not in urls and part.has_content]
        files = await self._in_thread(self._parse, inside) if inside else {}
        if urls:
            part_to_plugin = {part.param: plugin for part, plugin in wanted}
            modalities = {part: plugin.modality for part, plugin in part_to_plugin.items()}
            fetched = await self._url_media.fetch(urls, modalities, salt, account)
            files |= await self._in_thread(self._take, fetched, part_to_plugin)
        files |= kept
        return [files[part.param] for part in parts]

    def _kept(self, part: MediaPart, plugin: ModalityPlugin, salt: str) -> NamedFile:
        """Returns the file that an earlier request has sent under the part's name. Raises InvalidRequest if it is not
        kept (any more)."""
        file = self._named_media.find(salt, _kind(part, plugin), part.uuid)
        if file is None:
            raise _unknown_name(part)
        return file

    def _parse(self, wanted: Sequence[tuple[MediaPart, ModalityPlugin]]) -> dict[str, NamedFile]:
        """Returns the files, and the features, that parts contain, by part."""
        files: dict[str, NamedFile] = {}
        for part, plugin in wanted:
            if part.part_type == IMAGE_EMBEDS:
                files[part.param] = self._feature_reader(part).read(part, self._limits)
                continue
            data = plugin.parse(part.fields, part.param, self._limits)
            files[part.param] = NamedFile(data, content_digest(data), _first_header(plugin, data))
        return files

    def _take(self, fetched: Mapping[str, FetchedFile], plugins: Mapping[str, ModalityPlugin]) -> dict[str, NamedFile]:
        """Returns the files that were fetched, by part. Raises InvalidMedia for one that is too large for its
        modality, which a fetcher that judges files has already refused."""
        files: dict[str, NamedFile] = {}
        for part, (data, digest, _, header) in fetched.items():
            plugin = plugins[part]
            most = max_file_bytes(plugin, self._limits)
            if len(data) > most:
                message = f"{part}: the file has {len(data)} bytes, which is more than the limit of {most}"
                raise InvalidMedia(message, param=part)
            files[part] = NamedFile(data, digest, header or _first_header(plugin, data))
        return files

    async def _probe(self, part: MediaPart, plugin: ModalityPlugin, file: NamedFile) -> ProbedMedium:
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        header: MediaHeader | FeaturesHeader
        if file.header is not None:
            header = file.header
        elif plugin.needs_process:
            header = await self._prober.probe(plugin.modality, file.data, part.param)
        else:
            header = await self._in_thread(plugin.probe, file.data, part.param)
        if not isinstance(header, FeaturesHeader):  # Features were checked when they were read.
            plugin.validate(header, self._limits, part.param)
        probe_s = clock.time() - started_s
        most = LOW_DETAIL_PIXELS if part.detail == "low" else 0
        return ProbedMedium(
            part.param, plugin.modality, MediumFile(file.data), file.digest, header, None, probe_s, most
        )

    def _has_sound_tracks(self, wanted: bool | None) -> bool:
        takes_sound = self.max_items.get(SOUND, 0) > 0
        if wanted and not takes_sound:
            path = "mm_processor_kwargs.use_audio_in_video"
            raise self._unsupported(SOUND, path)
        return takes_sound if wanted is None else wanted

    def _sound(self, medium: ProbedMedium) -> AudioHeader | None:
        """Returns the sound track of a medium, or None, and checks it against the limits for sounds. Raises
        InvalidMedia."""
        sound = medium.header.sound if isinstance(medium.header, VideoHeader) else None
        if sound is not None and self._registry.has_modality(SOUND):
            self._registry.modality(SOUND).validate(sound, self._limits, medium.part)
        return sound


class MediumFile:
    """A `MediumFile` is the encoded file of one medium, for as long as its request lives. Encodings of it share what
    was made to send it: those of a video and its sound track, and those that are tried again."""

    __slots__ = ("_sent", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._sent: object | None = None

    def sent(self, make: Callable[[bytes], object]) -> object:
        """Returns what `make` makes of the data to send it, such as a reference to a copy in an object store. Calls
        `make` only if nothing is there from an earlier call."""
        if self._sent is None:
            self._sent = make(self.data)
        return self._sent

    def arrived(self) -> None:
        """Drops what was made to send the file, because it is hardly sent again. Calls in progress keep what they
        have."""
        self._sent = None


class ProbedMedium(NamedTuple):
    """A `ProbedMedium` is one part of the request that is a medium."""

    part: str
    """This is the path of the part in the request, such as `messages.0.content.1`."""
    modality: str
    file: MediumFile
    """Holds the encoded file, or the features that were sent in its place."""
    digest: bytes
    """This is the digest of the file, which is hashed once, however often the item is planned."""
    header: MediaHeader | FeaturesHeader
    sound: AudioHeader | None
    """This is the sound track of a video, if the model is to get it."""
    probe_s: float
    max_pixels: int = 0
    """Limits the pixels of a picture, as `MediaOptions.max_pixels` does; 0 leaves the limit to the model."""
    min_pixels: int = 0
    """Asks for pixels of a picture, as `MediaOptions.min_pixels` does; 0 leaves this to the model."""

    def limited_to(self, min_pixels: int | None, max_pixels: int | None) -> ProbedMedium:
        """Returns the medium with a number of pixels between the two, as far as they are given, if it is a picture. A
        lower limit that the medium already has, such as that of a low detail, prevails."""
        if not isinstance(self.header, ImageHeader):
            return self
        most = min((each for each in (self.max_pixels, max_pixels) if each), default=0)
        least = min((each for each in (min_pixels, most) if each), default=0) if min_pixels else 0
        return self._replace(max_pixels=most, min_pixels=least)


def media_seconds(media: Sequence[ProbedMedium]) -> dict[str, float]:
    """Maps each modality that has a length to the seconds of its media. Pictures have none, and a sound track belongs
    to its video."""
    seconds: dict[str, float] = {}
    for medium in media:
        if isinstance(medium.header, AudioHeader | VideoHeader):
            seconds[medium.modality] = seconds.get(medium.modality, 0.0) + medium.header.seconds
    return seconds


def _kind(part: MediaPart, plugin: ModalityPlugin) -> str:
    """Returns the kind of media that share names: the features of a picture are no picture."""
    return IMAGE_EMBEDS if part.part_type == IMAGE_EMBEDS else plugin.modality


def _unknown_name(part: MediaPart) -> InvalidRequest:
    message = f"the `uuid` {shown(part.uuid)} names no medium that this router keeps; send its content with it"
    return InvalidRequest(message, param=part.param)


def _first_header(plugin: ModalityPlugin, data: bytes) -> MediaHeader | None:
    return plugin.first_header(data) if isinstance(plugin, ReadsFirstBytes) else None


class Prober(Protocol):
    """A `Prober` reads the headers of media; modalities.probing.ProbePool implements it."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        """Runs `ModalityPlugin.probe` in a separate process. Files that wait for a process are read in the order in
        which they came. Raises InvalidMedia, NoCapacity if there is no process, Overloaded if none is free in time, and
        MachineBusy if the read is not done in time."""
        ...


class InThread(Protocol):
    """An `InThread` runs a function in a thread that reads media, and returns its result."""

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


# ------------------------------------------------------------ planning the items

VIDEO = "video"
"""This is the modality whose frames are thinned out to fit."""


class ItemKey(NamedTuple):
    """An `ItemKey` names an item of a request, and stays the same however often the item is planned. A part has one
    item per modality."""

    part: str
    modality: str


@dataclasses.dataclass(frozen=True, slots=True)
class Losses:
    """Holds what the degradation policy has reduced or removed so far."""

    item_to_reduction: Mapping[ItemKey, int] = dataclasses.field(default_factory=dict)
    """Maps an item to the number of times it was reduced, as in `MediaOptions.reduction`."""
    removed: frozenset[ItemKey] = frozenset()


NOTHING_LOST = Losses()


class MediaPlanner:
    """A `MediaPlanner` plans the items of a request. A video may become two items, its pictures and its sound. Items
    that the degradation policy removed are left out, and items that it reduced are planned smaller.

    It has no state; each router has one. The `video_options` of a call combine the deployment's defaults with the
    request's wishes."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def plan(
        self, media: Sequence[ProbedMedium], video_options: MediaOptions, room: int, salt: str, losses: Losses
    ) -> list[PlannedItem]:
        """Plans all items of a request. `room` is the number of tokens that all media together may have in the context.
        Videos get what the other items leave of it, at most `video_options.max_tokens` together; a video that wants no
        more than its share keeps its options, and so its identity. Other items are planned as they are, whether they
        fit or not. Raises InvalidMedia naming the part."""
        wanted = self._wanted(media, video_options, losses)
        plans = [self._plan(each) for each in wanted]
        at = [index for index, each in enumerate(wanted) if each.modality == VIDEO]
        others = sum(sum(plan.unit_tokens) for index, plan in enumerate(plans) if index not in set(at))
        tokens = [sum(plans[index].unit_tokens) for index in at]
        shares = share_tokens(tokens, min(room - others, video_options.max_tokens))
        for index, share, natural in zip(at, shares, tokens, strict=True):
            if share < natural:
                options = dataclasses.replace(wanted[index].options, max_tokens=max(1, share))
                wanted[index] = wanted[index]._replace(options=options)
        return [self._item(index, each, salt) for index, each in enumerate(wanted)]

    def is_reducible(self, medium: ProbedMedium, key: ItemKey, video_options: MediaOptions, reduction: int) -> bool:
        """Returns whether the item would cost less if it were reduced once more than `reduction` times. (A sound never
        does; nor does a picture that is already as small as the model takes pictures.)"""
        losses = [Losses({key: times}) for times in (reduction, reduction + 1)]
        now, less = (
            next(each for each in self._wanted([medium], video_options, loss) if each.modality == key.modality)
            for loss in losses
        )
        return self._plan(less).cost < self._plan(now).cost

    # ------------------------------------------------------------ helpers

    def _wanted(self, media: Sequence[ProbedMedium], video_options: MediaOptions, losses: Losses) -> list[_Wanted]:
        wanted: list[_Wanted] = []
        for medium in media:
            key = ItemKey(medium.part, medium.modality)
            if key in losses.removed:
                continue
            options = video_options if medium.modality == VIDEO else DEFAULT_OPTIONS
            reduction = losses.item_to_reduction.get(key, 0)
            options = dataclasses.replace(
                options, reduction=reduction, max_pixels=medium.max_pixels, min_pixels=medium.min_pixels
            )
            anchor = len(wanted)
            wanted.append(_Wanted(medium, medium.modality, medium.header, options, -1))
            if medium.sound is not None and ItemKey(medium.part, SOUND) not in losses.removed:
                wanted.append(_Wanted(medium, SOUND, medium.sound, DEFAULT_OPTIONS, anchor))
        return wanted

    def _plan(self, wanted: _Wanted) -> ItemPlan:
        try:
            return plan_medium(self._family, wanted.header, wanted.options)
        except InvalidMedia as error:
            raise InvalidMedia(f"{wanted.medium.part}: {error.message}", param=wanted.medium.part) from error

    def _item(self, index: int, wanted: _Wanted, salt: str) -> PlannedItem:
        medium = wanted.medium
        planned = plan_media(
            self._family,
            medium.file.data,
            wanted.header,
            index,
            medium.part,
            salt,
            wanted.options,
            wanted.anchor,
            medium.digest,
        )
        return PlannedItem(planned.plan, planned.item, medium.file)


class PlannedItem(NamedTuple):
    plan: ItemPlan
    item: MediaItem
    file: MediumFile


class _Wanted(NamedTuple):
    """Holds an item before it is planned."""

    medium: ProbedMedium
    modality: str
    header: MediaHeader | FeaturesHeader
    options: MediaOptions
    anchor: int


def share_tokens(wanted: Sequence[int], budget: int) -> list[int]:
    """Shares `budget` tokens max-min fairly: a video that wants less than an equal share gets what it wants, and the
    other videos share what it leaves.

    `wanted` holds the tokens that each video wants. Returns the tokens of each video, never more than it wants, and
    together at most `budget`. The remainder of a division is not given out, so that videos with equal wishes get equal
    shares."""
    shares = [0] * len(wanted)
    left, order = max(0, budget), sorted(range(len(wanted)), key=lambda index: wanted[index])
    for at, index in enumerate(order):
        fair = left // (len(order) - at)
        if wanted[index] > fair:
            for other in order[at:]:
                shares[other] = fair
            break
        shares[index] = wanted[index]
        left -= wanted[index]
    return shares
