"""Tests what happens to a request whose medium can't be encoded: it gets an error, a smaller medium or none, and the
answer says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from chat_media import data_url, png
from PIL import Image
from router_chats import chat, chat_body, expected, read, text
from router_media_fakes import SOUND, audio, image, media_cluster, video

from deploy.testing import FakeCluster, settled
from deploy.testing.tiny_family import AUDIO, IMAGE, VIDEO
from fabric.contracts import (
    DeadlineExceeded,
    EncodeFailed,
    EncoderLost,
    ErrorInfo,
    FeatureNeeded,
    InvalidMedia,
    MediaItem,
    WeftError,
)
from modalities.family import MediaOptions
from router.edge import create_app
from router.run import RequestStream
from router.run.encode_dispatcher import SHORTEST_CALL_S

BROKE = ErrorInfo("encode_failed", "out of device memory")


def failing(is_meant: Callable[[MediaItem], bool]) -> Callable[[MediaItem], ErrorInfo | None]:
    return lambda item: BROKE if is_meant(item) else None


def is_whole(item: MediaItem) -> bool:
    return MediaOptions.decode(item.options).reduction == 0


def degraded(stream: RequestStream) -> list[tuple[str, str, str]]:
    return [(step.key.part, step.key.modality, step.action) for step in stream.degraded]


async def answered(cluster: FakeCluster, content: object, **fields: object) -> RequestStream:
    stream = await cluster.service.open(chat(content, **fields))
    assert (await read(stream))[:2] == ([expected(cluster)], ["stop"])
    return stream


def counter(cluster: FakeCluster, name: str, **labels: str) -> float:
    return cluster.service.metrics.registry.get_sample_value(f"weft_router_{name}_total", labels) or 0


# ---------------------------------------------------------------- These tests cover the rungs.


async def test_an_error_is_the_default() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(is_whole)
        with pytest.raises(EncodeFailed, match="device memory") as caught:
            await read(await cluster.service.open(chat([text("?"), image(width=256, height=256)])))
        assert caught.value.param == "messages.0.content.1"
        assert len(cluster.workers[0].requests) == 1


async def test_a_picture_is_shown_at_half_its_sides() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(is_whole)
        stream = await answered(cluster, [image(width=256, height=256)], on_encode_failure="reduce")
        first, second = cluster.workers[0].requests
        assert [request.media[0].num_tokens for request in (first, second)] == [64, 16]
        assert (first.attempt, second.attempt) == (0, 1)
        assert first.media[0].mm_hash != second.media[0].mm_hash
        assert second.token_ids.count(IMAGE) == 16
        assert degraded(stream) == [("messages.0.content.0", "image", "reduced")]
        assert counter(cluster, "degraded", modality="image", action="reduced", reason="encode_failed") == 1
        trace = cluster.service.traces.get(stream.request_id)
        assert trace is not None
        record = trace.to_json()
        assert record["degraded"][0]["action"] == "reduced"
        assert record["media"] == [
            {
                "part": "messages.0.content.0",
                "mm_hash": second.media[0].mm_hash,
                "modality": "image",
                "num_tokens": 16,
                "cost": 64,
                "options": '{"reduction":1}',
            }
        ]
        names = [event["name"] for event in record["events"]]
        assert names.index("degraded") < names.index("first_token")


async def test_a_video_is_shown_with_every_other_frame_and_its_sound_stays() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(lambda item: item.modality == "video" and is_whole(item))
        stream = await answered(cluster, [video(sound=SOUND)], on_encode_failure="reduce")
        first, second = cluster.workers[0].requests
        assert [request.token_ids.count(VIDEO) for request in (first, second)] == [12, 6]
        assert first.media[1] == second.media[1]
        assert degraded(stream) == [("messages.0.content.0", "video", "reduced")]


async def test_reduced_once_and_no_more() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(lambda item: True)
        with pytest.raises(EncodeFailed):
            await read(await cluster.service.open(chat([video()], on_encode_failure="reduce")))
        assert len(cluster.workers[0].requests) == 2


async def test_a_sound_has_no_reduction() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(lambda item: True)
        with pytest.raises(EncodeFailed) as caught:
            await read(await cluster.service.open(chat([text("?"), audio()], on_encode_failure="reduce")))
        assert caught.value.param == "messages.0.content.1"
        assert len(cluster.workers[0].requests) == 1


async def test_a_picture_as_small_as_can_be_is_not_tried_smaller() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(lambda item: True)
        dot = {"type": "image_url", "image_url": data_url(png(Image.new("RGB", (16, 16))))}
        stream = await answered(cluster, [dot], on_encode_failure="text_only")
        assert len(cluster.workers[0].requests) == 2
        assert degraded(stream) == [("messages.0.content.0", "image", "removed")]


async def test_text_only_leaves_out_what_can_not_be_shown_smaller_either() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(lambda item: item.modality == "video")
        content = [text("see "), video(sound=SOUND), text(" and "), image()]
        stream = await answered(cluster, content, on_encode_failure="text_only")
        whole, smaller, without = cluster.workers[0].requests
        assert smaller.token_ids.count(VIDEO) == 6
        assert {VIDEO, AUDIO}.isdisjoint(without.token_ids)
        assert [item.part for item in without.media] == ["messages.0.content.3"]
        assert without.media[0].mm_hash == whole.media[2].mm_hash
        assert b"see  and " in bytes(token for token in without.token_ids if token < 256)
        assert degraded(stream) == [("messages.0.content.1", "video", "removed")]


async def test_a_video_whose_sound_fails_is_shown_without_it() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(lambda item: item.modality == "audio")
        stream = await answered(cluster, [video(sound=SOUND)], on_encode_failure="text_only")
        assert [item.modality for item in cluster.workers[0].requests[-1].media] == ["video"]
        assert degraded(stream) == [("messages.0.content.0", "audio", "removed")]


async def test_everything_that_failed_goes_in_one_step() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(is_whole)
        pictures = [image(seed, width=256, height=256) for seed in (1, 2, 1)]
        stream = await answered(cluster, pictures, on_encode_failure="reduce")
        assert len(cluster.workers[0].requests) == 2
        assert [step[2] for step in degraded(stream)] == ["reduced"] * 3


async def test_the_deployment_says_what_a_request_does_not() -> None:
    async with media_cluster(on_encode_failure="text_only") as cluster:
        cluster.encoders[0].fails = failing(lambda item: True)
        assert degraded(await answered(cluster, [audio()])) == [("messages.0.content.0", "audio", "removed")]
        with pytest.raises(EncodeFailed):
            await read(await cluster.service.open(chat([audio()], on_encode_failure="error")))


async def test_steps_do_not_use_up_attempts_and_draw_the_same() -> None:
    async with media_cluster(max_attempts=1) as cluster:
        cluster.encoders[0].fails = failing(is_whole)
        await answered(cluster, [video()], on_encode_failure="reduce", seed=None)
        first, second = cluster.workers[0].requests
        assert first.sampling == second.sampling


# ---------------------------------------------------------------- These tests cover deadlines.


@pytest.mark.parametrize(
    ("content", "limit_s"),
    [
        ([image(1)], 10.0),
        ([image(1), image(2)], 20.0),
        ([audio()], 20.0),
        ([video()], 60.0),
        ([video(sound=SOUND), image(1)], 60.0 + 20.0 + 10.0),
    ],
    ids=["picture", "pictures", "sound", "video", "film-and-picture"],
)
async def test_a_call_has_the_time_of_its_items_together(content: list[object], limit_s: float) -> None:
    """A call has 10 s for a picture, 20 s for a sound and 60 s for a video by default, as the documentation says. The
    call states to the encoder how much time there is."""
    async with media_cluster() as cluster:
        await answered(cluster, content)
        (request,) = cluster.encoders[0].requests
        assert request.time_left_s == limit_s


async def test_a_call_has_no_more_time_than_its_attempt() -> None:
    """The encoder must answer while the attempt still waits for it."""
    async with media_cluster(dispatch_timeout_s=15.0, encode_grace_s=5.0) as cluster:
        await answered(cluster, [image(1), image(2)])
        (request,) = cluster.encoders[0].requests
        assert 0 < request.time_left_s <= 10.0
    async with media_cluster(dispatch_timeout_s=2.0, encode_grace_s=5.0) as cluster:
        await answered(cluster, [image(1)])
        assert cluster.encoders[0].requests[0].time_left_s == SHORTEST_CALL_S


async def test_an_encoding_past_its_deadline_is_cancelled_there() -> None:
    """A live encoder would have said that it is busy; this one is silent, and that is a failure."""
    async with media_cluster(encode_timeout_ms={"image": 20}, encode_grace_s=0.01) as cluster:
        cluster.encoders[0].gate = asyncio.Event()
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s") as caught:
            await read(await cluster.service.open(chat([text("?"), image(1), image(2)])))
        assert caught.value.param == "messages.0.content.1"
        await settled(lambda: cluster.encoders[0].num_cancelled == 1)


async def test_after_a_deadline_the_request_steps_down() -> None:
    times = {"audio": 20, "video": 60_000}
    async with media_cluster(encode_timeout_ms=times, encode_grace_s=0.0, num_encoders=2) as cluster:
        vision_encoder, audio_encoder = cluster.encoders
        vision_encoder.modalities, audio_encoder.modalities = ("video",), ("audio",)
        cluster.service.update_members([])
        cluster.publish()
        audio_encoder.gate = asyncio.Event()
        stream = await answered(cluster, [video(sound=SOUND)], on_encode_failure="text_only")
        assert degraded(stream) == [("messages.0.content.0", "audio", "removed")]
        assert audio_encoder.num_cancelled == 1
        assert counter(cluster, "degraded", modality="audio", action="removed", reason="deadline_exceeded") == 1


# ---------------------------------------------------------------- These tests cover what never degrades a request.


async def test_a_busy_encoder_is_no_reason_to_step_down() -> None:
    """The item and the encoder are both well, and a smaller picture would give another answer to the same question."""
    async with media_cluster(num_encoders=2) as cluster:
        for encoder in cluster.encoders:
            encoder.fails = lambda item: ErrorInfo("machine_busy", "this encoder is too busy", retry_after_s=7.0)
        response = await post(cluster, chat_body([image(1)], on_encode_failure="text_only"))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (503, "machine_busy", "messages.0.content.0")
        assert response.headers["retry-after"] == "7"
        assert [len(encoder.requests) for encoder in cluster.encoders] == [1, 1]
        assert len(cluster.workers[0].requests) == 1
        assert counter(cluster, "degraded", modality="image", action="removed", reason="machine_busy") == 0


@pytest.mark.parametrize("error", [ErrorInfo("invalid_media", "broken"), ErrorInfo("feature_mismatch", "odd")])
async def test_other_failures_are_errors(error: ErrorInfo) -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = lambda item: error
        with pytest.raises(WeftError) as caught:
            await read(await cluster.service.open(chat([image()], on_encode_failure="text_only")))
        assert caught.value.code == error.code
        assert len(cluster.workers[0].requests) == 1


async def test_a_broken_medium_beside_one_that_failed_is_the_answer() -> None:
    async with media_cluster() as cluster:
        broken = ErrorInfo("invalid_media", "broken")
        cluster.encoders[0].fails = lambda item: broken if item.index else BROKE
        with pytest.raises(InvalidMedia) as caught:
            await read(await cluster.service.open(chat([image(1), image(2)], on_encode_failure="text_only")))
        assert caught.value.param == "messages.0.content.1"


async def test_a_lost_encoder_is_replaced_and_nothing_is_taken_away() -> None:
    async with media_cluster(num_encoders=2) as cluster:
        for encoder in cluster.encoders:
            encoder.failures = [EncoderLost("died")] if encoder is cluster.encoders[0] else []
        stream = await answered(cluster, [image()], on_encode_failure="text_only")
        assert degraded(stream) == []
        cluster.encoders[1].failures = [EncoderLost("died")]
        with pytest.raises(EncoderLost):
            await read(await cluster.service.open(chat([image(7)], on_encode_failure="text_only")))


async def test_after_the_first_token_it_is_an_error() -> None:
    async with media_cluster() as cluster:
        worker, encoder = cluster.workers[0], cluster.encoders[0]
        worker.script.pause_at = 3
        stream = await cluster.service.open(chat([image()], on_encode_failure="text_only"))
        await settled(lambda: stream.choices[0].num_tokens == 3)
        encoder.fails = failing(lambda item: True)
        request = worker.requests[0]
        units = tuple(request.media[0].unit_keys())
        needed = FeatureNeeded(worker.member_id, request.request_id, request.attempt, units, "preempted")
        worker.plane.send(cluster.plane.address, needed)
        with pytest.raises(EncodeFailed):
            await read(stream)
        assert degraded(stream) == []


# ---------------------------------------------------------------- These tests cover what the client receives.


async def post(cluster: FakeCluster, body: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(cluster.service))
    async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
        return await client.post("/v1/chat/completions", content=body)


TOLD = {
    "part": "messages.0.content.0",
    "modality": "video",
    "action": "reduced",
    "reason": "encode_failed",
    "message": "out of device memory",
}


async def test_the_answer_says_so() -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(is_whole)
        response = await post(cluster, chat_body([video()], on_encode_failure="reduce", return_token_ids=True))
        body = response.json()
        assert body["weft"] == {"degraded": [TOLD]}
        assert body["usage"]["prompt_tokens_details"]["video_tokens"] == 6
        assert body["prompt_token_ids"] == list(cluster.workers[0].requests[1].token_ids)
        whole = await post(cluster, chat_body([audio()], on_encode_failure="error"))
        assert whole.status_code == 500
        cluster.encoders[0].fails = lambda item: None
        assert "weft" not in (await post(cluster, chat_body([video()]))).json()


@pytest.mark.parametrize("has_usage", [False, True])
async def test_the_last_chunk_says_so(has_usage: bool) -> None:
    async with media_cluster() as cluster:
        cluster.encoders[0].fails = failing(is_whole)
        body = chat_body(
            [video()], on_encode_failure="reduce", stream=True, stream_options={"include_usage": has_usage}
        )
        lines = (await post(cluster, body)).text.split("\n\n")
        *chunks, done = [line.removeprefix("data: ") for line in lines if line]
        assert done == "[DONE]"
        assert json.loads(chunks[-1])["weft"] == {"degraded": [TOLD]}
        assert "weft" not in json.loads(chunks[1])


async def test_an_unknown_policy_is_refused() -> None:
    async with media_cluster() as cluster:
        response = await post(cluster, chat_body([video()], on_encode_failure="guess"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "on_encode_failure")
