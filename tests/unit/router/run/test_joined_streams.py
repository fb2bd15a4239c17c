"""Tests when the stream of an answer with several prompts begins, and how it fails before that."""

from __future__ import annotations

import asyncio

import pytest

from deploy.testing import tiny_codec
from fabric.contracts import EngineFailed, RequestId
from modalities.text import IncrementalDetokenizer
from router.run import ChoiceOutput, JoinedStreams, RequestStream


def streams(count: int) -> tuple[list[RequestStream], JoinedStreams]:
    news = asyncio.Event()
    each = [
        RequestStream(
            RequestId(f"req-{index}"),
            [ChoiceOutput(IncrementalDetokenizer(tiny_codec()), (), frozenset())],
            lambda: None,
            news=news,
        )
        for index in range(count)
    ]
    return each, JoinedStreams(each, news)


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_the_first_token_of_any_prompt_begins_the_stream(first: int) -> None:
    each, joined = streams(3)
    started = asyncio.create_task(joined.started())
    await asyncio.sleep(0)
    assert not started.done()
    each[first].write(0, "a")
    await started
    assert [delta.choice for delta in await anext(joined)] == [first]
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_a_failure_before_the_first_token_is_raised(first: int) -> None:
    each, joined = streams(3)
    started = asyncio.create_task(joined.started())
    await asyncio.sleep(0)
    each[first].fail(EngineFailed("it broke"))
    with pytest.raises(EngineFailed):
        await started
