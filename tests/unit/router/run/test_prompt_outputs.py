"""Tests requests that want something of their prompt besides tokens, from the prompt to the stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
from router_chats import chat, image, read, text

from deploy.testing import FakeCluster, fake_cluster, reply_outputs, settled
from fabric.contracts import (
    GenerateRequest,
    GenerateResult,
    PromptOutputs,
    StopConditions,
    WorkerLost,
)
from router.prompt import Draft, Prompt

WORDS = "a long enough text to fill a few blocks behind the picture " * 3


def want(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, outputs: PromptOutputs, max_tokens: int | None = 0
) -> None:
    """Makes every later prompt want these outputs, and at most `max_tokens` tokens; None leaves the limit as it is."""
    builder = cluster.service._prompt_builder
    plan = type(builder).plan

    async def wanting(draft: Draft, *args: object) -> Prompt:
        prompt = await plan(builder, draft, *args)
        stop = prompt.stop if max_tokens is None else StopConditions(max_tokens)
        return replace(prompt, prompt_outputs=outputs, stop=stop)

    monkeypatch.setattr(builder, "plan", wanting)


@pytest.mark.parametrize(
    "outputs", [PromptOutputs("last"), PromptOutputs("mean", is_normalised=False), PromptOutputs(num_top_logprobs=3)]
)
async def test_a_request_that_generates_nothing_ends_with_its_outputs(
    outputs: PromptOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_cluster() as cluster:
        want(cluster, monkeypatch, outputs)
        stream = await cluster.service.open(chat())
        assert (stream.embedding, stream.prompt_logprobs) == (b"", None)
        texts, reasons, usage = await read(stream)
        (sent,) = cluster.workers[0].requests
        assert (texts, reasons, usage.num_completion_tokens) == ([""], ["length"], 0)
        assert sent.prompt_outputs == outputs
        assert (stream.embedding, stream.prompt_logprobs) == reply_outputs(sent)
        assert bool(stream.embedding) == bool(outputs.pooling)
        assert (stream.prompt_logprobs is None) == (outputs.num_top_logprobs is None)
        assert cluster.service.admission.num_in_flight == 0
        trace = cluster.service.traces.get(stream.request_id)
        assert trace is not None
        record = trace.to_json()
        assert (record["outcome"], record["finish_reasons"]) == ("ok", ["length"])
        (answer,) = trace._answers
        assert isinstance(answer.result, GenerateResult)
        assert (answer.result.embedding, answer.result.prompt_logprobs) == (b"", None), "a trace is kept for long"
        assert answer.result.num_prompt_tokens == len(sent.token_ids)


@pytest.mark.parametrize(
    ("outputs", "dispatched"),
    [
        (PromptOutputs("last"), ()),
        (PromptOutputs("mean"), (0,)),
        (PromptOutputs(num_top_logprobs=0), (0,)),
    ],
)
async def test_what_workers_have_cached_covers_nothing_of_a_prompt_that_is_read_whole(
    outputs: PromptOutputs, dispatched: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_cluster() as cluster:
        await read(await cluster.service.open(chat([image(), text(WORDS)])))
        await settled(lambda: cluster.service.cluster.prefix_stats().num_keys > 0)
        want(cluster, monkeypatch, outputs)
        _, _, usage = await read(await cluster.service.open(chat([image(), text(WORDS)])))
        assert cluster.workers[0].requests[1].dispatched_items == dispatched
        assert bool(usage.num_cached_tokens) == (not dispatched)


async def test_a_lost_worker_is_replaced_and_the_prompt_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(num_workers=2) as cluster:
        want(cluster, monkeypatch, PromptOutputs("mean"))
        for worker in cluster.workers[:1]:
            worker.script.die_at, worker.script.error = 0, WorkerLost("gone")
        for _ in range(4):
            stream = await cluster.service.open(chat())
            await read(stream)
            assert stream.embedding == reply_outputs(cluster.workers[1].requests[-1])[0]
            assert cluster.workers[1].requests[-1].emitted == ()
        assert len(cluster.workers[0].requests) >= 1


async def test_scores_that_are_lost_with_their_worker_are_an_error_and_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All tokens have arrived, so no further attempt is made."""
    async with fake_cluster() as cluster:
        want(cluster, monkeypatch, PromptOutputs(num_top_logprobs=1), max_tokens=None)
        generate = cluster.workers[0].generate

        async def lost(request: GenerateRequest) -> GenerateResult:
            await generate(request)
            raise WorkerLost("gone")

        monkeypatch.setattr(cluster.workers[0], "generate", lost)
        with pytest.raises(WorkerLost, match="what the request wants of its prompt"):
            await read(await cluster.service.open(chat()))
        assert len(cluster.workers[0].requests) == 1
