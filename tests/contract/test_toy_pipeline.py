"""Runs a text-to-speech that is no part of Weft through two real stages: exact samples over every connector, in one
process and in two, in chunks and at once; then failures, aborts at random moments, and killed processes."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toy_pipeline import StageProcess, ToyPipeline, ToyStage, as_int16, toy_config, toy_requests
from toy_speech import POISON, spoken

from fabric.contracts import AbortAttempt, MemberId, RequestId, RouterHeartbeat, StageResult
from fabric.transport import LocalHub
from llm_workers.stages import ChunkName, StageChunk, encode_chunk

KINDS = ["in_process", "shared_memory", pytest.param("nixl", marks=pytest.mark.nixl)]
PROCESS_KINDS = KINDS[1:]
PROMPT = (5, 3, 8, 2, 9, 4, 1)


@pytest.fixture
def root() -> Iterator[Path]:
    """Yields a directory in shared memory, which must be gone at the end."""
    root = Path(f"/dev/shm/weft-toy-{os.getpid()}")
    yield root
    assert not root.exists()


def files_below(root: Path) -> list[str]:
    """Returns the names of what lies in shared memory, apart from the sockets on which the owners wait."""
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def codes_of(results: list[StageResult]) -> list[str | None]:
    return [None if result.error is None else result.error.code for result in results]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_samples_are_those_of_one_whole_decode(kind: str, is_async: bool, root: Path) -> None:
    """Twelve requests share 24 blocks, so that some are preempted and computed again."""

    async def speak() -> None:
        async with ToyPipeline(kind, root, is_async) as toy:
            sizes = {f"r{number}": (number + 1, 3 + 10 * (number % 4)) for number in range(12)}
            prompts = {name: tuple(range(40, 40 + length)) for name, (length, _) in sizes.items()}
            calls = [toy.speak(name, prompts[name], num_frames) for name, (_, num_frames) in sizes.items()]
            found = await asyncio.gather(*calls)
            for (name, (_, num_frames)), results in zip(sizes.items(), found, strict=True):
                assert codes_of(results) == [None, None]
                assert np.array_equal(toy.heard(name), as_int16(spoken(prompts[name], num_frames)))
                talker, vocoder = results
                num_chunks = -(-num_frames // 5) if is_async else 1
                assert talker.num_outputs == num_frames
                assert vocoder.num_outputs == 4 * num_frames
                assert talker.num_chunks_out == vocoder.num_chunks_in == num_chunks
                assert [event.name for event in talker.trace].count("chunk_sent") == num_chunks
                assert [event.name for event in vocoder.trace].count("chunk_received") == num_chunks
                assert 0 < vocoder.first_chunk_s <= vocoder.first_output_s
            assert "preempted" in [event.name for results in found for event in results[0].trace]
            report = toy.stages[1].service.report()
            assert report.num_outputs == sum(4 * num_frames for _, num_frames in sizes.values())
            assert report.num_chunks_in == sum(results[1].num_chunks_in for results in found)
            for stage in toy.stages:
                await stage.at_rest()

    asyncio.run(speak())


def test_a_stage_that_is_just_in_time_computes_the_rest_at_once(root: Path) -> None:
    """Each frame plays for ten seconds, so only the first chunk is needed before the last one is here."""

    async def speak() -> None:
        async with ToyPipeline("shared_memory", root, frame_s=10.0) as toy:
            names = [f"r{number}" for number in range(5)]
            found = await asyncio.gather(*(toy.speak(name, (*PROMPT, 9), 33) for name in names))
            for name, results in zip(names, found, strict=True):
                assert codes_of(results) == [None, None]
                assert results[1].num_chunks_in == 7
                assert np.array_equal(toy.heard(name), as_int16(spoken((*PROMPT, 9), 33)))
                assert len([frame for frame in toy.frames[RequestId(name)] if frame.samples]) <= 2
            for stage in toy.stages:
                await stage.at_rest()

    asyncio.run(speak())


def test_a_listener_who_runs_out_of_sound_wakes_a_stage_that_is_just_in_time(root: Path) -> None:
    """The last chunk never comes, and nothing but the listener's need makes the stage compute the second one."""

    async def speak() -> None:
        async with ToyPipeline("in_process", root, frame_s=0.21) as toy:
            request = toy.requests("r", PROMPT, 12)[1]
            call = asyncio.create_task(toy.stages[1].service.run(request))
            sender, inbox = toy.stages[0].connector, toy.stages[1].connector.inbox
            for number in range(2):
                chunk = StageChunk(request.key, number, False, {"codes": np.arange(5), "first_frame": 5 * number})
                sender.put(0, inbox, str(ChunkName(request.key, 0, number)), encode_chunk(chunk, request.age))
                give_up_s = time.monotonic() + 20.0
                while len(toy.frames[RequestId("r")]) <= number:
                    assert time.monotonic() < give_up_s, "the stage does not compute what is due"
                    await asyncio.sleep(0.01)
            toy.router.send(toy.stages[1].plane.address, AbortAttempt(RequestId("r"), 0))
            assert codes_of([await call]) == ["aborted"]

    asyncio.run(speak())


@pytest.mark.parametrize("is_first_late", [False, True])
def test_calls_and_chunks_may_come_in_any_order(is_first_late: bool, root: Path) -> None:
    async def speak() -> None:
        async with ToyPipeline("shared_memory", root) as toy:
            requests = toy.requests("r", PROMPT, 12)
            order = [1, 0] if is_first_late else [0, 1]
            begun = asyncio.create_task(toy.stages[order[0]].service.run(requests[order[0]]))
            if is_first_late:
                await asyncio.sleep(0.1)
            else:
                await begun  # All chunks lie in the inbox before the vocoder knows the request.
            results = [await toy.stages[order[1]].service.run(requests[order[1]]), await begun]
            assert codes_of(results) == [None, None]
            assert np.array_equal(toy.heard("r"), as_int16(spoken(PROMPT, 12)))
            for stage in toy.stages:
                await stage.at_rest()

    asyncio.run(speak())


def test_the_request_that_breaks_a_step_ends_alone_at_both_stages(root: Path) -> None:
    async def speak() -> None:
        async with ToyPipeline("shared_memory", root) as toy:
            calls = [toy.speak(name, (*PROMPT, last), 12) for name, last in (("a", 6), ("b", POISON), ("c", 7))]
            good, bad, other = await asyncio.gather(*calls)
            assert codes_of(good) == codes_of(other) == [None, None]
            assert codes_of(bad) == ["engine_failed", "engine_failed"]
            assert bad[0].error == bad[1].error
            assert np.array_equal(toy.heard("c"), as_int16(spoken((*PROMPT, 7), 12)))
            for stage in toy.stages:
                await stage.at_rest()
                stage.service.check_health()

    asyncio.run(speak())


def test_a_request_that_the_model_refuses_ends_at_once(root: Path) -> None:
    async def speak() -> None:
        async with ToyPipeline("in_process", root, stall_s=0.2, first_stall_s=0.2) as toy:
            assert codes_of(await toy.speak("empty", (), 3)) == ["invalid_request"] * 2
            assert codes_of(await toy.speak("long", tuple(range(200, 300)), 3)) == ["context_length_exceeded"] * 2
            alone = await toy.stages[1].service.run(toy.requests("alone", PROMPT, 3)[1])
            assert codes_of([alone]) == ["stage_stalled"]
            assert toy.stages[1].service.report().num_stalls == 1
            wrong = await toy.stages[0].service.run(toy.requests("wrong", PROMPT, 3)[1])
            assert codes_of([wrong]) == ["protocol_error"]
            for stage in toy.stages:
                await stage.at_rest()

    asyncio.run(speak())


@pytest.mark.parametrize("kind", KINDS)
def test_aborts_at_random_moments_leave_nothing(kind: str, root: Path) -> None:
    """Most of 300 requests are cancelled, or aborted by a message, at one stage or both. The rest must be right."""
    draws = random.Random(7)

    async def one(toy: ToyPipeline, number: int) -> bool:
        prompt = tuple(draws.randrange(20, 90) for _ in range(draws.randrange(1, 9)))
        num_frames = draws.randrange(1, 25)
        requests = toy.requests(f"r{number}", prompt, num_frames, step_ms=1)
        calls = [
            asyncio.create_task(stage.service.run(request)) for stage, request in zip(toy.stages, requests, strict=True)
        ]
        how, pause_s = draws.choice(["cancel", "cancel", "message", "message", "none"]), draws.random() * 0.1
        if how == "none":
            results = await asyncio.gather(*calls)
            assert codes_of(results) == [None, None]
            assert np.array_equal(toy.heard(f"r{number}"), as_int16(spoken(prompt, num_frames)))
            return False
        await asyncio.sleep(pause_s)
        for place in draws.sample([0, 1], 2):
            if how == "cancel":
                calls[place].cancel()
            else:
                toy.router.send(toy.stages[place].plane.address, AbortAttempt(RequestId(f"r{number}"), 0))
            await asyncio.sleep(draws.random() * 0.01)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, StageResult):
                assert result.error is None or result.error.code == "aborted"
            else:
                assert isinstance(result, asyncio.CancelledError)
        return True

    async def storm() -> None:
        async with ToyPipeline(kind, root) as toy:
            num_aborted = 0
            for start in range(0, 300, 20):
                batch = [one(toy, number) for number in range(start, start + 20)]
                num_aborted += sum(await asyncio.gather(*batch))
            assert num_aborted > 200
            cut = [frames for frames in toy.frames.values() if not frames[-1].is_last]
            assert len(cut) > 10, "too few aborts came in the middle of a stream"
            for stage in toy.stages:
                await stage.at_rest()
                stage.service.check_health()
            assert [stage.connector.discard("") for stage in toy.stages] == [0, 0]
            if kind == "shared_memory":
                assert files_below(root) == []

    asyncio.run(storm())


def test_a_router_whose_lease_ends_has_its_requests_aborted(root: Path) -> None:
    async def speak() -> None:
        async with ToyPipeline("in_process", root) as toy:
            vocoder = toy.stages[1]
            heartbeat = RouterHeartbeat(MemberId("router-1"), "local://router", lease_s=0.3)
            toy.router.send(vocoder.plane.address, heartbeat)
            await asyncio.sleep(0)
            result = await vocoder.service.run(toy.requests("r", PROMPT, 3)[1])
            assert codes_of([result]) == ["aborted"]
            await vocoder.at_rest()

    asyncio.run(speak())


def test_a_stage_that_stops_ends_its_calls(root: Path) -> None:
    async def speak() -> None:
        async with ToyPipeline("in_process", root) as toy:
            vocoder = toy.stages[1]
            call = asyncio.create_task(vocoder.service.run(toy.requests("r", PROMPT, 3)[1]))
            await asyncio.sleep(0.05)
            await vocoder.service.stop()
            assert codes_of([await call]) == ["worker_lost"]
            assert codes_of([await vocoder.service.run(toy.requests("late", PROMPT, 3)[1])]) == ["worker_lost"]
            assert len(vocoder.model) == 0

    asyncio.run(speak())


# ------------------------------------------------------------ two processes


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_stages_in_two_processes_make_the_same_samples(kind: str, root: Path) -> None:
    talker = StageProcess(0, kind, root)

    async def speak() -> None:
        async with ToyPipeline(kind, root) as toy:
            for number in range(3):
                name, num_frames = f"r{number}", 7 + 6 * number
                requests = toy.requests(name, PROMPT, num_frames)
                talker.begin(requests[0])
                result = await toy.stages[1].service.run(requests[1])
                assert codes_of([result, talker.result()]) == [None, None]
                assert np.array_equal(toy.heard(name), as_int16(spoken(PROMPT, num_frames)))
            await toy.stages[1].at_rest()

    try:
        asyncio.run(speak())
    finally:
        talker.close()


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_killed_producer_ends_the_request_with_one_clear_error(kind: str, root: Path) -> None:
    talker = StageProcess(0, kind, root)

    async def speak() -> None:
        async with ToyPipeline(kind, root, stall_s=0.5) as toy:
            requests = toy.requests("r", PROMPT, 80, step_ms=10)
            call = asyncio.create_task(toy.stages[1].service.run(requests[1]))
            talker.begin(requests[0])
            give_up_s = time.monotonic() + 20.0
            while not toy.frames[RequestId("r")] and not call.done():
                assert time.monotonic() < give_up_s
                await asyncio.sleep(0.001)
            talker.kill()
            result = await call
            assert result.error is not None
            assert result.error.code == "stage_stalled" or (kind, result.error.code) == ("nixl", "transfer_failed")
            assert 0 < result.num_outputs < 4 * 80
            again = toy.requests("again", PROMPT, 6)
            assert codes_of(
                await asyncio.gather(
                    *(stage.service.run(request) for stage, request in zip(toy.stages, again, strict=True))
                )
            ) == [None, None]
            assert np.array_equal(toy.heard("again"), as_int16(spoken(PROMPT, 6)))
            await toy.stages[1].at_rest()

    try:
        asyncio.run(speak())
    finally:
        talker.close()


def test_a_killed_consumer_ends_the_request_with_one_clear_error(root: Path) -> None:
    async def speak() -> None:
        vocoder = StageProcess(1, "shared_memory", root)
        async with ToyPipeline("shared_memory", root) as toy:
            requests = toy_requests("r", PROMPT, 40, "shared_memory", vocoder.inbox)
            vocoder.kill()
            result = await toy.stages[0].service.run(requests[0])
            assert codes_of([result]) == ["transfer_failed"]
            assert "no replica of this host owns the inbox" in result.error.message
            await toy.stages[0].at_rest()
        vocoder.close()

    asyncio.run(speak())


def test_a_stage_without_samples_that_are_finite_fails_the_request(root: Path) -> None:
    async def speak() -> None:
        async with ToyPipeline("in_process", root) as toy:
            model = toy.stages[1].model
            execute = model.execute

            def broken(spans: object) -> object:
                outputs = execute(spans)
                for output in outputs.values():
                    output.values["samples"][0] = np.nan
                return outputs

            model.execute = broken
            requests = toy.requests("r", PROMPT, 8)
            results = await asyncio.gather(
                *(stage.service.run(request) for stage, request in zip(toy.stages, requests, strict=True))
            )
            assert codes_of(results) == [None, "engine_failed"]
            assert "not finite" in results[1].error.message
            for stage in toy.stages:
                await stage.at_rest()

    asyncio.run(speak())


def test_a_stage_of_the_config_needs_no_more_than_its_import_path() -> None:
    stage = ToyStage(toy_config(), 1, "in_process", None, LocalHub())
    assert type(stage.model).__name__ == "ToyVocoder"
    stage.plane.close()
