"""Tests spoken answers at the router: text and sound in order, no sample twice or missing when a member is lost, and
nothing left open when a client leaves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from router_chats import chat, expected, image

from deploy.testing import FakeCluster, FakeStage, fake_cluster, settled, spoken_samples
from fabric.contracts import EngineFailed, InvalidRequest, NoCapacity, StageFrame, WeftError, WorkerLost
from router.prompt import PromptRequest
from router.router_config import SpeechSettings
from router.run import RequestStream

SPEECH = SpeechSettings(("anna", "ben"), 24_000, num_stages=2, talker_rows="talker")
ALL_ROWS = dataclasses.replace(SPEECH, needs_all_rows=True)
SPOKEN = {"modalities": ["text", "audio"]}


@asynccontextmanager
async def speaking(
    num_talkers: int = 1, num_code2wavs: int = 1, speech: SpeechSettings = SPEECH, **settings: object
) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(speech=speech, **settings) as cluster:
        for _ in range(num_talkers):
            cluster.add_stage(1, "talker", is_last=False)
        for _ in range(num_code2wavs):
            cluster.add_stage(2, "code2wav", is_last=True)
        cluster.publish()
        yield cluster
        assert cluster.service._context.stages.num_open == 0
        await settled(lambda: not any(each.num_open for each in cluster.pools.stages.values()))


def stages(cluster: FakeCluster, model_stage: str) -> list[FakeStage]:
    return [each for each in cluster.pools.stages.values() if each.stage.model_stage == model_stage]


async def hear(stream: RequestStream) -> tuple[str, bytes, list[str]]:
    """Returns the text, the samples, and what came in which order."""
    text, samples, order = "", b"", []
    async for deltas in stream:
        for delta in deltas:
            text, samples = text + delta.text, samples + delta.samples
            order += ["text"] if delta.text else []
            order += ["sound"] if delta.samples else []
            order += ["finish"] if delta.finish_reason else []
    return text, samples, order


async def test_text_and_sound_come_and_the_finish_comes_last() -> None:
    async with speaking() as cluster:
        stream = await cluster.service.open(chat(**SPOKEN))
        text, samples, order = await hear(stream)
        assert text == expected(cluster)
        assert samples == spoken_samples()
        assert order.count("finish") == 1
        assert order[-1] == "finish"


async def test_each_stage_is_told_where_its_output_goes() -> None:
    async with speaking() as cluster:
        request = chat(audio={"voice": "Ben"}, initial_codec_chunk_frames=7, **SPOKEN)
        await hear(await cluster.service.open(request))
        (worker,) = cluster.workers
        (talker,), (code2wav,) = stages(cluster, "talker"), stages(cluster, "code2wav")
        (asked,), (spoken,), (made,) = worker.requests, talker.requests, code2wav.requests
        assert asked.next_stage is not None
        assert (asked.next_stage.member_id, asked.next_stage.inbox) == (talker.member_id, "inbox-talker-0")
        assert asked.side_names == ()
        assert spoken.next_stage is not None
        assert spoken.next_stage.member_id == code2wav.member_id
        assert spoken.prompt is not None
        assert spoken.prompt.token_ids == asked.token_ids
        assert spoken.options == {"voice": "ben", "seed": asked.sampling.seed, "initial_codec_chunk_frames": 7}
        assert made.next_stage is None
        assert made.prompt is None
        assert {asked.request_id, spoken.request_id} == {made.request_id}


async def test_media_rows_are_asked_for_where_there_are_media() -> None:
    async with speaking() as cluster:
        await hear(await cluster.service.open(chat([image()], **SPOKEN)))
        assert cluster.workers[0].requests[0].side_names == ("talker",)


async def test_all_rows_are_asked_for_where_the_talker_needs_them() -> None:
    async with speaking(speech=ALL_ROWS) as cluster:
        await hear(await cluster.service.open(chat(**SPOKEN)))
        await hear(await cluster.service.open(chat()))
        assert [asked.side_names for asked in cluster.workers[0].requests] == [("talker",), ()]


@pytest.mark.parametrize("is_pictured", [False, True])
@pytest.mark.parametrize("settings", [SPEECH, ALL_ROWS], ids=["media", "all"])
async def test_the_last_token_is_drawn_again_where_rows_are_needed(is_pictured: bool, settings: SpeechSettings) -> None:
    """All text is there when the talker is lost. The next attempt draws one token at most, so it ends as the first one
    did."""
    content = [[image()]] if is_pictured else []
    async with speaking(num_talkers=2, speech=settings) as cluster:
        for each in stages(cluster, "talker"):
            each.script.pause_at = 1
        stream = await cluster.service.open(chat(*content, **SPOKEN))
        heard = asyncio.create_task(hear(stream))
        await settled(lambda: stream.are_choices_finished and any(each.num_open for each in stages(cluster, "talker")))
        lost = next(each for each in stages(cluster, "talker") if each.requests)
        lost.script.error, lost.script.die_at = WorkerLost("died"), 1
        for each in stages(cluster, "talker"):
            each.script.pause_at = None
            each.script.resume.set()
        text, samples, _ = await heard
        assert (text, samples) == (expected(cluster), spoken_samples())
        first, second = cluster.workers[0].requests
        drawn = stream.choices[0].emitted
        if is_pictured or settings.needs_all_rows:
            assert (second.emitted, second.stop.max_tokens) == ((drawn[:-1],), len(drawn))
        else:
            assert (second.emitted, second.stop) == ((drawn,), first.stop)


async def test_text_alone_asks_no_stage_for_anything() -> None:
    async with speaking() as cluster:
        await hear(await cluster.service.open(chat()))
        assert cluster.workers[0].requests[0].next_stage is None
        assert [each.requests for each in cluster.pools.stages.values()] == [[], []]


@pytest.mark.parametrize("model_stage", ["talker", "code2wav"])
async def test_a_lost_stage_is_replaced_without_a_gap_or_a_repetition(model_stage: str) -> None:
    async with speaking(num_talkers=2, num_code2wavs=2) as cluster:
        for each in cluster.pools.stages.values():
            each.script.pause_at = 3
        stream = await cluster.service.open(chat(**SPOKEN))
        heard = asyncio.create_task(hear(stream))
        track = stream.audio
        assert track is not None
        await settled(lambda: track.num_samples == 300 and stream.are_choices_finished)
        lost = next(each for each in stages(cluster, model_stage) if each.requests)
        lost.script.error, lost.script.die_at = WorkerLost("died"), 3
        for each in cluster.pools.stages.values():
            each.script.pause_at = None
            each.script.resume.set()
        text, samples, order = await heard
        assert text == expected(cluster)
        assert samples == spoken_samples()
        assert order.count("finish") == 1
        other = next(each for each in stages(cluster, model_stage) if each is not lost)
        assert [each.attempt for each in other.requests] == [1]


async def test_an_error_that_no_other_replica_survives_ends_the_request_once() -> None:
    async with speaking() as cluster:
        (talker,) = stages(cluster, "talker")
        talker.script.error, talker.script.die_at = EngineFailed("the step failed"), 2
        with pytest.raises(EngineFailed):
            await hear(await cluster.service.open(chat(**SPOKEN)))


async def test_frames_may_come_in_any_order_and_twice() -> None:
    async with speaking() as cluster:
        (code2wav,) = stages(cluster, "code2wav")
        kept: list[StageFrame] = []

        def late(frames: list[StageFrame]) -> list[StageFrame]:
            kept.extend(frames)
            return [*reversed(kept)] if kept[-1].is_last else []

        code2wav.script.frames = late
        _, samples, _ = await hear(await cluster.service.open(chat(**SPOKEN)))
        assert samples == spoken_samples()


async def test_missing_samples_make_another_attempt() -> None:
    async with speaking() as cluster:
        (code2wav,) = stages(cluster, "code2wav")
        code2wav.script.frames = lambda frames: frames if frames[0].attempt else frames[:0]
        _, samples, _ = await hear(await cluster.service.open(chat(**SPOKEN)))
        assert samples == spoken_samples()
        assert [each.attempt for each in code2wav.requests] == [0, 1]


async def test_a_client_that_leaves_ends_all_stages_at_once() -> None:
    async with speaking() as cluster:
        for each in cluster.pools.stages.values():
            each.script.pause_at = 2
        stream = await cluster.service.open(chat(**SPOKEN))
        await settled(lambda: all(each.num_open for each in cluster.pools.stages.values()))
        stream.close()
        await settled(lambda: not any(each.num_open for each in cluster.pools.stages.values()))
        for each in cluster.pools.stages.values():
            assert [(abort.request_id, abort.attempt) for abort in each.aborted] == [(stream.request_id, 0)]


async def test_a_missing_stage_is_awaited() -> None:
    async with fake_cluster(speech=SPEECH, capacity_wait_s=30.0) as cluster:
        is_ready, state = cluster.service.readiness()
        assert (is_ready, state["stages_without_replica"]) == (False, [1, 2])
        heard = asyncio.create_task(hear(await cluster.service.open(chat(**SPOKEN))))
        await asyncio.sleep(0)
        cluster.add_stage(1, "talker", is_last=False)
        cluster.add_stage(2, "code2wav", is_last=True)
        cluster.publish()
        _, samples, _ = await heard
        assert samples == spoken_samples()


async def test_a_stage_that_stays_missing_ends_the_request() -> None:
    async with fake_cluster(speech=SPEECH, capacity_wait_s=0.05) as cluster:
        with pytest.raises(NoCapacity, match="no replica of stage 1"):
            await hear(await cluster.service.open(chat(**SPOKEN)))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": 2}, "n", "one choice"),
        ({"stop": ["."]}, "stop", "spoken already"),
        ({"audio": {"voice": "carla"}}, "audio.voice", "has anna, ben"),
        ({"audio": {"format": "mp3"}, "stream": True}, "audio.format", "`pcm16` only"),
    ],
)
async def test_what_can_not_be_spoken_is_refused(fields: dict[str, object], param: str, message: str) -> None:
    async with speaking() as cluster:
        assert await refused(cluster, chat(**SPOKEN, **fields), message) == param


async def test_a_cluster_without_speech_says_so() -> None:
    async with fake_cluster() as cluster:
        assert await refused(cluster, chat(**SPOKEN), "gives no speech") == "modalities"


def test_a_voice_without_sound_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="`audio` needs `modalities`"):
        chat(audio={"voice": "anna"})


async def refused(cluster: FakeCluster, request: PromptRequest, message: str) -> str | None:
    with pytest.raises(WeftError, match=message) as caught:
        await cluster.service.open(request)
    return caught.value.param
