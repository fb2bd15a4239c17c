"""Tests how media become items: the two items of a video with sound, counts, budgets, wishes, and which encoder encodes
each."""

from __future__ import annotations

import pytest
from router_chats import chat, expected, read, text
from router_media_fakes import SOUND, MediaFamily, PlainPlugin, audio, image, media_cluster, media_registry, video

from deploy.testing import settled
from deploy.testing.tiny_family import AUDIO, VIDEO
from fabric.contracts import (
    ContextLengthExceeded,
    GenerateRequest,
    InvalidMedia,
    InvalidRequest,
    UnsupportedModality,
    WeftError,
)
from modalities.family import AudioHeader, ImageHeader, MediaHeader, MediaOptions, VideoHeader
from modalities.media import MediaLimits, decoded_bytes
from modalities.registry import Registry
from router.api import MediaPart, TextPart
from router.prompt.request_media import LOW_DETAIL_PIXELS


async def asked(content: object, family: MediaFamily | None = None, **fields: object) -> GenerateRequest:
    """Sends a request and returns what the worker receives."""
    settings = {name: fields.pop(name) for name in ("video_options", "media_limits") if name in fields}
    async with media_cluster(family, **settings) as cluster:
        texts, _, _ = await read(await cluster.service.open(chat(content, **fields)))
        assert expected(cluster).startswith(texts[0].rstrip("�"))
        return cluster.workers[0].requests[0]


# ---------------------------------------------------------------- These tests cover videos and their sounds.


async def test_a_video_with_sound_is_two_items_of_one_part() -> None:
    async with media_cluster() as cluster:
        content = [image(), text("and"), video(sound=SOUND), audio()]
        _, _, usage = await read(await cluster.service.open(chat(content)))
        request = cluster.workers[0].requests[0]
        (encode,) = cluster.encoders[0].requests
        shown = [(item.index, item.modality, item.part, item.anchor) for item in request.media]
        assert shown == [
            (0, "image", "messages.0.content.0", -1),
            (1, "video", "messages.0.content.2", -1),
            (2, "audio", "messages.0.content.2", 1),
            (3, "audio", "messages.0.content.3", -1),
        ]
        assert encode.items == request.media
        assert cluster.encoders[0].media[1] is cluster.encoders[0].media[2]
        assert usage.modality_to_tokens == {"image": 9, "video": 12, "audio": 25}
        assert request.token_ids.count(VIDEO) == 12
        assert request.token_ids.count(AUDIO) == 25
        assert len({item.mm_hash for item in request.media}) == 4


# ---------------------------------------------------------------- These tests cover what media take once decoded.


def test_the_size_of_a_decoded_medium_follows_from_its_header() -> None:
    sound = AudioHeader("WAV", 48_000, 2, 480_000)
    film = VideoHeader("MP4", 1920, 1080, 5000, 200.0)
    assert decoded_bytes(ImageHeader("PNG", 100, 50, "L")) == 4 * 100 * 50
    assert decoded_bytes(sound) == 4 * 2 * 480_000
    assert decoded_bytes(film) == 16 * 3 * 1920 * 1080
    assert decoded_bytes(VideoHeader("MP4", 64, 32, 4, 1.0, sound)) == 4 * 3 * 64 * 32 + decoded_bytes(sound)
    assert decoded_bytes(ImageHeader("PNG", *LARGEST, "RGB")) <= MediaLimits().max_decoded_bytes


LARGEST = (178_956_970, 1)
"""This is the size of a picture with as many pixels as one may have."""


async def test_media_that_are_small_each_may_be_too_large_together() -> None:
    """Each sound decodes to 4 * 16,000 bytes. The third is refused after its header was read, and the fourth is not
    even read."""
    limits = MediaLimits(max_decoded_bytes=2 * 64_000)
    sounds = [audio(1) for _ in range(4)]
    assert (await asked(sounds[:2], media_limits=limits)).media[1].part == "messages.0.content.1"
    probed: list[str] = []

    class Counting(PlainPlugin):
        def probe(self, data: bytes, param: str) -> MediaHeader:
            probed.append(param)
            return super().probe(data, param)

    registry = Registry()
    registry.register_modality(Counting("audio"))
    family = MediaFamily(audio=4)
    async with media_cluster(family, registry, media_limits=limits) as cluster:
        with pytest.raises(InvalidMedia, match=r"content\.2: the media up to here would take 192000 bytes") as caught:
            await cluster.service.open(chat(sounds))
        assert caught.value.param == "messages.0.content.2"
        assert probed == ["messages.0.content.0", "messages.0.content.1", "messages.0.content.2"]
        assert not cluster.workers[0].requests
        assert not cluster.encoders[0].requests


async def test_a_video_is_silent_if_the_request_says_so() -> None:
    request = await asked([video(sound=SOUND)], mm_processor_kwargs={"use_audio_in_video": False})
    assert [item.modality for item in request.media] == ["video"]


async def test_a_model_that_hears_nothing_is_shown_the_pictures() -> None:
    family = MediaFamily(image=1, video=1)
    request = await asked([video(sound=SOUND)], family)
    assert [item.modality for item in request.media] == ["video"]
    with pytest.raises(UnsupportedModality) as caught:
        await asked([video(sound=SOUND)], family, mm_processor_kwargs={"use_audio_in_video": True})
    assert caught.value.param == "mm_processor_kwargs.use_audio_in_video"


async def test_the_sound_of_a_video_is_held_against_the_limits_of_sounds() -> None:
    limits = MediaLimits(max_audio_seconds=2.0)
    with pytest.raises(InvalidMedia, match="longer than 2 s") as caught:
        await asked([text("?"), video(sound=SOUND)], media_limits=limits)
    assert caught.value.param == "messages.0.content.1"
    request = await asked([video(sound=SOUND)], media_limits=limits, mm_processor_kwargs={"use_audio_in_video": False})
    assert len(request.media) == 1


# ---------------------------------------------------------------- These tests cover what is refused, and when.


@pytest.mark.parametrize(
    ("limits", "content", "kind", "param"),
    [
        ({"video": 1}, [video(), text("?"), video()], InvalidRequest, "messages.0.content.2"),
        ({"video": 0}, [text("?"), video()], UnsupportedModality, "messages.0.content.1"),
        ({"image": 2}, [image(1), image(2), image(3)], InvalidRequest, "messages.0.content.2"),
        ({"video": 9}, [video()] * 4, InvalidRequest, "messages.0.content.3"),
    ],
)
async def test_too_many_items_are_refused_before_one_is_parsed(
    limits: dict[str, int], content: object, kind: type[WeftError], param: str
) -> None:
    registry = media_registry()
    async with media_cluster(registry=registry, max_items_per_prompt=limits) as cluster:
        with pytest.raises(kind) as caught:
            await cluster.service.open(chat(content))
        assert caught.value.param == param
        plugin = registry.modality("video")
        assert isinstance(plugin, PlainPlugin)
        assert plugin.parsed == []
        assert cluster.workers[0].requests == []


async def test_sound_tracks_count_as_sounds() -> None:
    async with media_cluster(max_items_per_prompt={"audio": 1}) as cluster:
        content = [audio(), video(sound=SOUND)]
        with pytest.raises(InvalidRequest, match=r"at most 1 audio .*sound tracks") as caught:
            await cluster.service.open(chat(content))
        assert caught.value.param == "messages.0.content.1"
        silent = chat(content, mm_processor_kwargs={"use_audio_in_video": False})
        assert (await read(await cluster.service.open(silent)))[1] == ["stop"]


async def test_a_modality_that_no_encoder_serves_does_not_keep_the_cluster_from_being_ready() -> None:
    async with media_cluster(max_items_per_prompt={"video": 0}) as cluster:
        cluster.encoders[0].modalities = ("image", "audio")
        cluster.service.update_members([])
        cluster.publish()
        assert cluster.service.readiness()[0] is True


@pytest.mark.parametrize("broken", [video(frames=0), video(size="x"), video(seconds=4000.0)])
async def test_a_broken_video_is_named_beside_good_ones(broken: dict[str, object]) -> None:
    with pytest.raises(InvalidMedia) as caught:
        await asked([video(), image(), broken])
    assert caught.value.param == "messages.0.content.2"


async def test_what_is_kept_for_planning_again_holds_no_text_of_media() -> None:
    asked_for = chat([text("see"), video(sound=SOUND)])
    async with media_cluster() as cluster:
        draft = await cluster.service._prompt_builder.read(asked_for)
        (medium,) = draft.media
        assert medium.file.data.startswith(b"video 64x32")
        assert draft.contents == ([TextPart("see"), MediaPart("video_url", {}, "messages.0.content.1")],)
        assert [message.content for message in draft.request.messages] == [None]
        assert asked_for.messages[0].content is not None


# ---------------------------------------------------------------- These tests cover budgets and wishes.


async def test_videos_share_the_budget_and_a_short_one_leaves_the_rest_to_others() -> None:
    options = MediaOptions(fps=30.0, max_frames=90, max_tokens=100)
    request = await asked([video(frames=5), video(), video(frames=90, size="32x64")], video_options=options)
    assert [item.num_tokens for item in request.media] == [10, 44, 44]
    assert MediaOptions.decode(request.media[0].options) == options
    assert MediaOptions.decode(request.media[1].options).max_tokens == 45


async def test_the_same_video_twice_is_one_content() -> None:
    request = await asked([video(), video()], video_options=MediaOptions(fps=30.0, max_frames=90, max_tokens=101))
    first, second = request.media
    assert first.mm_hash == second.mm_hash
    assert first.num_tokens == 50


async def test_a_video_that_fits_is_the_same_in_every_prompt() -> None:
    alone = await asked([video()], MediaFamily(400))
    beside = await asked([text("x" * 200), image(), video()], MediaFamily(400))
    assert alone.media[0].mm_hash == beside.media[1].mm_hash


async def test_videos_take_what_text_answer_and_other_media_leave_of_the_context() -> None:
    options = MediaOptions(fps=30.0, max_frames=90)
    family = MediaFamily(300)
    request = await asked([text("y" * 100), image(), audio(), video()], family, max_tokens=50, video_options=options)
    (shown,) = [item for item in request.media if item.modality == "video"]
    assert len(request.token_ids) + 50 <= 300 < len(request.token_ids) + 50 + 2
    assert MediaOptions.decode(shown.options).max_tokens < 180


async def test_text_that_the_family_writes_between_frames_is_made_room_for() -> None:
    options = MediaOptions(fps=30.0, max_frames=90)
    request = await asked([video()], MediaFamily(300, frame_text="<1.5 s>"), max_tokens=50, video_options=options)
    assert 250 - 2 * (2 + 7) < len(request.token_ids) <= 250


async def test_no_stated_length_leaves_room_for_an_answer() -> None:
    options = MediaOptions(fps=30.0, max_frames=90)
    request = await asked([video()], MediaFamily(160), video_options=options)
    assert request.stop.max_tokens in (20, 21)


async def test_what_never_fits_is_a_400() -> None:
    with pytest.raises(ContextLengthExceeded):
        await asked([text("z" * 300), video()], MediaFamily(300))


@pytest.mark.parametrize(
    ("kwargs", "num_frames"),
    [
        ({}, 6),
        ({"fps": 4}, 12),
        ({"fps": 10, "max_frames": 20}, 20),
        ({"num_frames": 40}, 40),
        ({"max_frames": 4}, 4),
        ({"sampling": "uniform"}, 32),
        ({"sampling": "keyframe", "max_frames": 8}, 8),
    ],
)
async def test_wishes_reach_the_encoder(kwargs: dict[str, object], num_frames: int) -> None:
    request = await asked([video(), image()], mm_processor_kwargs=kwargs)
    shown, picture = request.media
    assert shown.num_tokens == 2 * num_frames
    assert MediaOptions.decode(shown.options).sampling == kwargs.get(
        "sampling", "uniform" if "num_frames" in kwargs else "fps"
    )
    assert picture.options == ""


async def test_pictures_alone_are_limited_in_pixels() -> None:
    low = image(2)
    low["image_url"] = {**low["image_url"], "detail": "low"}
    request = await asked([video(), image(1), low], mm_processor_kwargs={"max_pixels": 300_000})
    shown, picture, low_picture = request.media
    assert MediaOptions.decode(shown.options).max_pixels == 0
    assert MediaOptions.decode(picture.options) == MediaOptions(max_pixels=300_000)
    assert MediaOptions.decode(low_picture.options) == MediaOptions(max_pixels=LOW_DETAIL_PIXELS)


class EnlargingFamily(MediaFamily):
    """Has a least number of pixels of a picture."""

    pixel_range = (100, 10_000_000)


async def test_pictures_alone_are_given_a_least_number_of_pixels() -> None:
    low = image(2)
    low["image_url"] = {**low["image_url"], "detail": "low"}
    kwargs = {"min_pixels": 300_000, "max_pixels": 400_000}
    request = await asked([video(), image(1), low], EnlargingFamily(), mm_processor_kwargs=kwargs)
    shown, picture, low_picture = (MediaOptions.decode(item.options) for item in request.media)
    assert (shown.min_pixels, shown.max_pixels) == (0, 0)
    assert picture == MediaOptions(min_pixels=300_000, max_pixels=400_000)
    assert low_picture == MediaOptions(min_pixels=LOW_DETAIL_PIXELS, max_pixels=LOW_DETAIL_PIXELS)
    (alone,) = (await asked([image(1)], EnlargingFamily(), mm_processor_kwargs={"min_pixels": 7})).media
    assert MediaOptions.decode(alone.options) == MediaOptions(min_pixels=7)


async def test_a_model_without_a_least_number_of_pixels_refuses_the_wish() -> None:
    with pytest.raises(InvalidRequest, match="no least number of pixels") as caught:
        await asked([image()], mm_processor_kwargs={"min_pixels": 100})
    assert caught.value.param == "mm_processor_kwargs.min_pixels"


# ---------------------------------------------------------------- These tests cover which encoder encodes what.


async def test_pictures_and_sound_of_a_video_go_to_two_encoders() -> None:
    async with media_cluster(num_encoders=2) as cluster:
        vision_encoder, audio_encoder = cluster.encoders
        vision_encoder.modalities, audio_encoder.modalities = ("image", "video"), ("audio",)
        cluster.service.update_members([])
        cluster.publish()
        stream = await cluster.service.open(chat([video(sound=SOUND), audio()]))
        assert (await read(stream))[0] == [expected(cluster)]
        assert [[item.modality for item in request.items] for request in vision_encoder.requests] == [["video"]]
        assert [[item.modality for item in request.items] for request in audio_encoder.requests] == [["audio", "audio"]]
        assert vision_encoder.media[0] is audio_encoder.media[0]


async def test_two_videos_go_to_two_idle_encoders() -> None:
    async with media_cluster(num_encoders=2) as cluster:
        stream = await cluster.service.open(chat([video(frames=60), video(frames=61)]))
        assert (await read(stream))[0] == [expected(cluster)]
        assert [len(encoder.requests) for encoder in cluster.encoders] == [1, 1]


async def test_media_are_counted_by_modality() -> None:
    async with media_cluster() as cluster:
        await read(await cluster.service.open(chat([video(sound=SOUND), audio()])))
        await settled(lambda: cluster.service.admission.num_in_flight == 0)
        value = cluster.service.metrics.registry.get_sample_value
        assert value("weft_router_requests_with_media_total", {"modality": "audio"}) == 1
        assert value("weft_router_media_items_total", {"modality": "audio"}) == 2
        assert value("weft_router_planned_media_tokens_total", {"modality": "audio"}) == 25
        assert value("weft_router_planned_media_tokens_total", {"modality": "video"}) == 12
        assert value("weft_router_probe_seconds_count", {"modality": "video"}) == 1


# ---------------------------------------------------------------- These tests cover what a part says of its picture.


async def test_low_detail_is_another_plan_of_the_same_picture() -> None:
    seen = {}
    for detail in (None, "auto", "high", "low"):
        part = image(1)
        part["image_url"] = {**part["image_url"], **({"detail": detail} if detail else {})}
        (seen[detail],) = (await asked([part, text("?")])).media
    assert seen[None] == seen["auto"] == seen["high"]
    assert seen["high"].options == ""
    assert MediaOptions.decode(seen["low"].options) == MediaOptions(max_pixels=LOW_DETAIL_PIXELS)
    assert seen["low"].mm_hash != seen["high"].mm_hash


async def test_a_uuid_names_nothing() -> None:
    """Two pictures with one name count as two, and one picture with two names counts as one."""
    parts = [{**image(seed), "uuid": name} for seed, name in ((1, "cat"), (2, "cat"), (1, "dog"))]
    one, other, again = (item.mm_hash for item in (await asked([*parts, text("?")])).media)
    (plain_one,) = (await asked([image(1), text("?")])).media
    assert one == again == plain_one.mm_hash
    assert one != other
