"""Provides pictures, videos and sounds of a few readable bytes, plugins that probe them, and a family that takes them.

The text of a file is `video 64x32 90 3.0 16000x48000` (size, frames, seconds, sound track) or `audio 16000x48000`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from router_chats import image

from deploy.testing import FakeCluster, TinyFamily, fake_cluster, tiny_codec
from deploy.testing.tiny_family import AUDIO, IMAGE, VIDEO
from fabric.contracts import InvalidMedia, PlaceholderRange
from modalities.family import (
    DEFAULT_OPTIONS,
    AudioHeader,
    ExpandedPrompt,
    ImageHeader,
    ItemPlan,
    MediaHeader,
    MediaOptions,
    VideoHeader,
)
from modalities.media import ImagePlugin, MediaLimits
from modalities.media.plugin import decode_data_url, part_url
from modalities.registry import Registry

PIXELS_PER_ROW = 32 * 32
TOKENS_PER_SECOND = 5
MODALITY_TO_TOKEN = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


def _sound(words: str) -> AudioHeader:
    rate, samples = (int(number) for number in words.split("x"))
    return AudioHeader("PLAIN", rate, 1, samples)


class PlainPlugin:
    """Parses and probes the files of one modality. `parsed` lists the parts that it has parsed."""

    needs_process = False

    def __init__(self, modality: str) -> None:
        self.modality = modality
        self.part_types = (f"{modality}_url",)
        self.parsed: list[str] = []

    def parse(self, part: Mapping[str, object], param: str, limits: MediaLimits) -> bytes:
        self.parsed.append(param)
        return decode_data_url(part_url(part, f"{self.modality}_url", param), param, limits.max_bytes_per_item)

    def probe(self, data: bytes, param: str) -> MediaHeader:
        try:
            kind, first, *rest = data.decode().split()
            if kind != self.modality:
                raise ValueError(kind)
            if kind == "audio":
                return _sound(first)
            width, height = (int(number) for number in first.split("x"))
            sound = _sound(rest[2]) if len(rest) > 2 else None
            return VideoHeader("PLAIN", width, height, int(rest[0]), float(rest[1]), sound)
        except (ValueError, IndexError) as error:
            raise InvalidMedia(f"{param}: not a {self.modality}", param=param) from error

    def validate(self, header: MediaHeader, limits: MediaLimits, param: str) -> None:
        seconds = limits.max_video_seconds if self.modality == "video" else limits.max_audio_seconds
        assert isinstance(header, AudioHeader | VideoHeader)
        if header.seconds > seconds:
            raise InvalidMedia(f"{param}: longer than {seconds:g} s", param=param)


class MediaFamily(TinyFamily):
    """Takes images, videos and sounds. An image has rows as in TinyFamily, and a frame has as many rows as such an
    image; the options determine the number of frames. Sound has 5 tokens per second. The prompt has `frame_text`
    before every frame."""

    def __init__(self, max_model_len: int = 2048, frame_text: str = "", **max_items: int) -> None:
        super().__init__(max_model_len)
        self.max_items = max_items or {"image": 4, "video": 3, "audio": 3}
        self.frame_text = frame_text

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        if isinstance(header, AudioHeader):
            num_tokens = max(1, round(header.seconds * TOKENS_PER_SECOND))
            return ItemPlan("audio", (num_tokens, 1, 1), (num_tokens,), num_tokens, (header.sample_rate,))
        if isinstance(header, ImageHeader):
            shrunk = 2**options.reduction
            width, height = max(1, header.width // shrunk), max(1, header.height // shrunk)
            return super().plan(ImageHeader(header.format, width, height, header.mode))
        if header.num_frames < 1:
            raise InvalidMedia("a video without frames")
        rows = max(1, header.width * header.height // PIXELS_PER_ROW)
        wanted = options.max_frames
        if options.sampling == "fps":
            wanted = min(options.max_frames, max(1, round(header.seconds * options.fps)))
        num_frames = min(wanted, header.num_frames, max(1, options.max_tokens // rows))
        num_frames = max(1, num_frames // 2**options.reduction)
        geometry = (header.width, header.height, header.num_frames)
        return ItemPlan("video", (num_frames, 1, rows), (rows,) * num_frames, rows * num_frames * 4, geometry)

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> ExpandedPrompt:
        """Expands the placeholders; a video's sound follows its frames."""
        ids: list[int] = []
        runs: list[PlaceholderRange] = []

        def put(item: int) -> None:
            for unit, length in enumerate(plans[item].unit_tokens):
                if plans[item].modality == "video" and self.frame_text:
                    assert tokenize is not None
                    ids.extend(tokenize(self.frame_text))
                runs.append(PlaceholderRange(len(ids), length, item, unit, 0))
                ids.extend([MODALITY_TO_TOKEN[plans[item].modality]] * length)

        own = iter([index for index, plan in enumerate(plans) if plan.anchor < 0])
        for token_id in token_ids:
            if token_id not in MODALITY_TO_TOKEN.values():
                ids.append(token_id)
                continue
            item = next(own)
            assert MODALITY_TO_TOKEN[plans[item].modality] == token_id
            put(item)
            for index, plan in enumerate(plans):
                if plan.anchor == item:
                    put(index)
        assert next(own, None) is None
        return ExpandedPrompt(ids, tuple(runs))


def media_registry() -> Registry:
    registry = Registry()
    for plugin in (ImagePlugin(), PlainPlugin("video"), PlainPlugin("audio")):
        registry.register_modality(plugin)
    return registry


def media_cluster(
    family: MediaFamily | None = None, registry: Registry | None = None, **settings: object
) -> AbstractAsyncContextManager[FakeCluster]:
    """Returns a fake cluster (see `fake_cluster`) whose encoders take all modalities."""
    model = family or MediaFamily(), tiny_codec()
    return fake_cluster(
        model=model,
        registry=registry or media_registry(),
        encoder_modalities=("image", "video", "audio"),
        **settings,
    )


def plain(modality: str, words: str) -> dict[str, object]:
    data = base64.b64encode(f"{modality} {words}".encode()).decode()
    return {"type": f"{modality}_url", f"{modality}_url": {"url": f"data:text/plain;base64,{data}"}}


def video(frames: int = 90, seconds: float = 3.0, sound: str = "", size: str = "64x32") -> dict[str, object]:
    """Returns the part of a video. By default it has 30 frames per second and 2 rows of features per frame."""
    return plain("video", f"{size} {frames} {seconds} {sound}")


def audio(seconds: int = 2) -> dict[str, object]:
    return plain("audio", f"16000x{16000 * seconds}")


SOUND = "16000x48000"
"""Describes three seconds of sound, which become 15 tokens."""

__all__ = ["SOUND", "FakeCluster", "MediaFamily", "audio", "image", "media_cluster", "media_registry", "video"]
