"""Tests answers that are complete and large: they are written beside the event loop, their size has a limit, and they
count for the budgets until their clients have taken them."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from asgi_exchange import Exchange
from edge_client import served
from starlette.types import Message
from stopped_timers import StoppedTimers, turns

import router.edge.app
from deploy.testing import TINY_MODEL, fake_cluster, settled
from fabric.contracts import ManualClock
from router.edge import create_app
from router.edge.answers import CompletionAnswer
from router.edge.tickets import Tickets
from router.edge.whole_answer import PIECE_BYTES, WholeAnswer
from router.router_config import RouterConfig
from router.run import Admission

COMPLETIONS = "/v1/completions"
NUM_TOKENS = 600


def scored_body(num_prompts: int = 1, **fields: object) -> bytes:
    """Returns a request for an answer of more than a megabyte per prompt."""
    prompts = [[1 + at % 60 for at in range(NUM_TOKENS)]] * num_prompts
    body = {"model": TINY_MODEL, "prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20}
    return json.dumps(body | fields).encode()


class SlowReader(Exchange):
    """Takes the headers and the first piece of an answer, and nothing more until `can_write` is set again."""

    async def _send(self, message: dict[str, Any]) -> None:
        if len(self.sent) == 2:
            self.can_write.clear()
        await super()._send(message)


async def test_a_large_answer_is_in_flight_until_its_client_has_taken_it() -> None:
    async with fake_cluster(max_model_len=2048) as cluster:
        admission = cluster.service.admission
        exchange = SlowReader(create_app(cluster.service), "POST", COMPLETIONS).feed(scored_body())
        await exchange.until(lambda: len(exchange.sent) == 2)
        size = int(exchange.headers["content-length"])
        assert admission.num_in_flight == 1
        assert admission.bodies_bytes == len(scored_body()) + size
        assert len(exchange.body) == PIECE_BYTES
        exchange.sent.append({"type": "a message that lets the others pass"})
        exchange.can_write.set()
        await exchange.ended()
        assert (admission.num_in_flight, admission.bodies_bytes) == (0, 0)
        assert len(exchange.body) == size
        assert len(json.loads(exchange.body)["choices"][0]["prompt_logprobs"]) == NUM_TOKENS


async def test_answers_that_wait_for_their_clients_are_limited_together() -> None:
    async with fake_cluster(max_model_len=2048, max_bodies_bytes=2 * 2**20) as cluster:
        app = create_app(cluster.service)
        first = SlowReader(app, "POST", COMPLETIONS).feed(scored_body())
        await first.until(lambda: len(first.sent) == 2)
        assert int(first.headers["content-length"]) > 2**19
        second = await Exchange(app, "POST", COMPLETIONS).feed(scored_body(3)).ended()
        assert (second.status, json.loads(second.body)["error"]["code"]) == (429, "overloaded")
        small = await Exchange(app, "POST", COMPLETIONS).feed(scored_body(prompt_logprobs=None)).ended()
        assert small.status == 200
        first.task.cancel()
        await asyncio.wait([first.task])
        assert cluster.service.admission.num_in_flight == 0


async def test_a_large_answer_is_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, can_end = threading.Event(), threading.Event()
    others_ran: list[bool] = []

    def whole(_: object) -> bytes:
        is_writing.set()
        others_ran.append(can_end.wait(5))
        return b"{}"

    monkeypatch.setattr(CompletionAnswer, "whole", whole)
    async with served(max_model_len=2048) as (_, client):
        answer = asyncio.create_task(client.post(COMPLETIONS, content=scored_body()))
        await settled(is_writing.is_set)
        assert (await client.get("/health")).status_code == 200
        can_end.set()
        assert (await answer).content == b"{}"
    assert others_ran == [True]


async def test_many_embeddings_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[threading.Thread] = []

    def answer(*_: object) -> bytes:
        writers.append(threading.current_thread())
        return b"{}"

    monkeypatch.setattr(router.edge.app, "embeddings_answer", answer)
    monkeypatch.setattr(router.edge.app, "EMBEDDINGS_IN_LOOP_BYTES", 100)  # A fake one has 32 bytes.
    async with served(embeddings="last") as (_, client):
        for num_inputs in (3, 4):
            await client.post("/v1/embeddings", json={"model": TINY_MODEL, "input": ["a"] * num_inputs})
    assert [writer is threading.main_thread() for writer in writers] == [True, False]


@pytest.mark.parametrize(
    ("num_prompts", "fields", "param"),
    [
        (1, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (1, {"prompt_logprobs": 0, "n": 2}, "prompt_logprobs"),
        (2, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (1, {"prompt_logprobs": None, "echo": True, "logprobs": 1}, "logprobs"),
    ],
)
async def test_the_log_probabilities_of_all_prompts_are_limited_before_they_are_computed(
    num_prompts: int, fields: dict[str, object], param: str
) -> None:
    async with served(max_model_len=2048, max_prompt_logprobs=NUM_TOKENS) as (cluster, client):
        refused = await client.post(COMPLETIONS, content=scored_body(num_prompts, **fields))
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == param
        assert f"would have {2 * NUM_TOKENS} log-probabilities" in error["message"]
        assert "limits.max_prompt_logprobs" in error["message"]
        assert cluster.workers[0].requests == []
        taken = await client.post(COMPLETIONS, content=scored_body(prompt_logprobs=0))
        assert taken.status_code == 200


# ------------------------------------------------------------ slow readers


class Answered:
    """Writes a `WholeAnswer` of 16 pieces to a client that takes a piece every so many seconds."""

    def __init__(self, timers: StoppedTimers) -> None:
        self.admission = Admission(RouterConfig("tiny", 1.0, 16), ManualClock())
        self.num_taken = 0
        self._timers = timers
        self._can_take = asyncio.Event()
        # The whole answer has 30 s + 64 s.
        answer = WholeAnswer(
            b"x" * (16 * PIECE_BYTES),
            "text/plain",
            {},
            Tickets(self.admission.admit()),
            write_timeout_s=30,
            min_bytes_per_s=16 * 1024,
            timers=timers,
        )
        self.task = asyncio.create_task(answer({"type": "http"}, self._receive, self._send))

    async def read(self, each_s: float, num_pieces: int) -> None:
        for _ in range(num_pieces):
            await turns()
            await self._timers.pass_s(each_s)
            self._can_take.set()
            await turns()

    async def _receive(self) -> Message:
        raise AssertionError("an answer reads nothing")

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self._can_take.clear()
            await self._can_take.wait()
            self.num_taken += 1


@pytest.mark.parametrize(("each_s", "is_taken"), [(5, True), (20, False)])
async def test_a_whole_answer_must_be_taken_at_a_least_rate(each_s: float, is_taken: bool) -> None:
    """Every piece is taken within the time that a client may take nothing."""
    answered = Answered(StoppedTimers())
    assert answered.admission.num_in_flight == 1
    await answered.read(each_s, 16)
    assert answered.task.done() == (answered.admission.num_in_flight == 0)
    assert (answered.num_taken == 16) == is_taken
    assert answered.task.done()
    answered.task.result()


async def test_a_client_that_takes_nothing_of_a_whole_answer_has_no_longer_for_its_size() -> None:
    answered = Answered(timers := StoppedTimers())
    await turns()
    await timers.pass_s(29)
    assert answered.admission.num_in_flight == 1
    await timers.pass_s(1.1)
    assert answered.task.done()
    assert answered.admission.num_in_flight == 0
