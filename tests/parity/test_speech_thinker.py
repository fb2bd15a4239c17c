"""Compares spoken answers of a whole Qwen2.5-Omni with those of transformers: a real worker thinks, and the services
of the stages speak what its outlet sends, however the prompt was cut, found in the prefix cache, or computed again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from family_rig import Text
from family_row import Medium
from single_code_reference import NUM_TEXT_TOKENS, SingleCodeReference, SpokenChat
from stage_line import NAME, StageLine, stage_line
from test_families import Crowd
from worker_rig import Rig, rig

from fabric.contracts import MemberId, RequestId, StageTarget
from llm_workers.worker_config import Speculation
from modalities.speech_traits import read_speech_traits

pytestmark = pytest.mark.torch

PICTURE, SOUND, VIDEO = Medium("image", 1), Medium("audio", 2, (1000, 0)), Medium("video", 3, (84, 56))
SIDE = "talker"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> SingleCodeReference:
    return SingleCodeReference(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def chats(reference: SingleCodeReference) -> list[SpokenChat]:
    return [
        reference.ask(Text(0, 21)),
        reference.ask(Text(1, 6), voice="Ethan"),
        reference.ask(Text(1, 3), PICTURE, Text(2, 2)),
        reference.ask(SOUND, Text(3, 4)),
        reference.ask(Text(1, 3), VIDEO, Text(2, 2)),
        reference.ask(Text(4, 2), PICTURE, Text(1, 1), SOUND, PICTURE, Text(5, 3), voice="Ethan"),
    ]


class SpeakingWorker:
    """A `SpeakingWorker` is a worker with the stages that speak behind it."""

    def __init__(self, reference: SingleCodeReference, worker: Rig, line: StageLine) -> None:
        self.worker, self._line = worker, line
        self._crowd = Crowd(reference.loaded, worker)
        self._target = StageTarget(1, MemberId("stage-1"), line.connectors[1].inbox, NAME)
        self._numbers = itertools.count()
        self._codes: dict[str, list[int]] = {}
        _record_codes(line.models[1], self._codes)

    async def check(self, chat: SpokenChat, delays: Sequence[int] = (0,), num_emitted: int = 0) -> int:
        """Asks for a spoken answer, and compares its text, codes and samples with those of the reference. Returns how
        many tokens of the prompt were found in the prefix cache. With `num_emitted`, so many tokens come from an
        attempt before this one."""
        name = f"spoken-{next(self._numbers)}"
        emitted = tuple(chat.text_ids[:num_emitted])
        attempt = int(num_emitted > 0)
        self.worker.router.tokens[name, attempt, 0] = list(emitted)
        fields: dict[str, Any] = {
            "request_id": RequestId(name),
            "attempt": attempt,
            "age": (0.0, name),
            "emitted": (emitted,) if emitted else (),
            "side_names": (SIDE,),
            "next_stage": self._target,
        }
        thought = self._crowd.run(chat.of, delays, NUM_TEXT_TOKENS, **fields)
        heard = self._line.hear(name, chat, attempt)
        (text_ids, result), samples = await asyncio.gather(thought, heard)
        assert text_ids == chat.text_ids
        assert self._codes[f"{name}.{attempt}"] == chat.codes.tolist()
        assert len(samples) == len(chat.samples)
        assert np.abs(samples / 32767 - chat.samples).max() < 1e-4
        assert chat.samples.std() > 1e-3
        return result.num_cached_tokens


def _record_codes(model: Any, key_to_codes: dict[str, list[int]]) -> None:
    """Notes the codes that reach token2wav."""
    receive = model.receive

    def received(chunk: Any) -> None:
        codes = key_to_codes.setdefault(chunk.key, [])
        codes += [code for frame in chunk.payload.get("codes", ()) for code in frame.tolist()]
        receive(chunk)

    model.receive = received


@asynccontextmanager
async def speaking(
    reference: SingleCodeReference, *, is_async: bool = True, **config: Any
) -> AsyncIterator[SpeakingWorker]:
    torch.set_num_threads(1)
    traits = read_speech_traits(reference.directory)
    config = {
        "block_size": 4,
        "num_blocks": 200,
        "side_layers": ((SIDE, traits.row_layer),),
        "needs_all_rows": traits.needs_all_rows,
    } | config
    async with (
        asyncio.timeout(60),
        stage_line(reference.directory, is_async=is_async, has_worker=True) as line,
        rig(parts=reference.loaded, sender=line.thinker, **config) as worker,
    ):
        yield SpeakingWorker(reference, worker, line)
        await worker.assert_idle()
        assert [model.num_states for model in line.models] == [0, 0]


@pytest.mark.parametrize("is_async", [True, False])
async def test_all_chats_together_are_spoken_like_by_transformers(
    reference: SingleCodeReference, chats: list[SpokenChat], is_async: bool
) -> None:
    async with speaking(reference, is_async=is_async) as speaker:
        await asyncio.gather(*(speaker.check(chat, (index % 3,)) for index, chat in enumerate(chats)))


@pytest.mark.parametrize("max_step_tokens", [3, 16])
async def test_prompts_in_chunks_and_guessed_tokens_change_nothing(
    reference: SingleCodeReference, chats: list[SpokenChat], max_step_tokens: int
) -> None:
    async with speaking(reference, max_step_tokens=max_step_tokens, speculation=Speculation(4, 1, 3)) as speaker:
        await asyncio.gather(*(speaker.check(chat) for chat in chats))


@pytest.mark.parametrize("is_async", [True, False])
async def test_prefix_hits_change_nothing(
    reference: SingleCodeReference, chats: list[SpokenChat], is_async: bool
) -> None:
    """A request for text alone leaves blocks without rows, which are no hit for a spoken answer."""
    async with speaking(reference, is_async=is_async) as speaker:
        for chat in (chats[0], chats[4]):
            plain = speaker.worker.request(chat.of, NUM_TEXT_TOKENS)
            call = asyncio.ensure_future(speaker.worker.service.generate(plain))
            for index, (item, unit) in enumerate(chat.of.units):
                speaker.worker.publish(plain, chat.of, item, reference.loaded.feature(chat.of, index), unit)
            assert (await call).error is None
            assert await speaker.check(chat) == 0
            assert await speaker.check(chat) >= len(chat.of.token_ids) - 4


async def test_preempted_requests_send_no_row_twice(reference: SingleCodeReference, chats: list[SpokenChat]) -> None:
    """The pool has room for the longest chat and little else, so that requests throw each other out."""
    longest = max(len(chat.of.token_ids) for chat in chats) + NUM_TEXT_TOKENS
    async with speaking(
        reference, num_blocks=-(-longest // 4) + 2, max_step_tokens=16, is_prefix_cache_enabled=False
    ) as speaker:
        for _ in range(3):
            await asyncio.gather(*(speaker.check(chat) for chat in (*chats, *chats[:2])))
        assert speaker.worker.service.report().engine.num_preemptions > 0


@pytest.mark.parametrize("num_emitted", [1, 5, NUM_TEXT_TOKENS - 1])
async def test_an_answer_goes_on_at_another_worker(
    reference: SingleCodeReference, chats: list[SpokenChat], num_emitted: int
) -> None:
    """The tokens of the attempt before are computed again as a prompt. The last case is that of an answer whose speech
    alone is missing, and of a given text: one more token is drawn, which is never spoken."""
    async with speaking(reference) as speaker:
        for chat in (chats[0], chats[2]):
            await speaker.check(chat, num_emitted=num_emitted)
