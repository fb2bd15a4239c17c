"""Checks that the text of an answer stays the same when the whole service runs against fake members that lose, repeat
and reorder frames and die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from router_chats import chat, expected, image, read, text

from deploy.testing import FakeCluster, FakeWorker, fake_cluster
from fabric.contracts import TokenFrame, WorkerLost


def unreliable(
    rng: random.Random, loss: float, is_reliable_from: int
) -> Callable[[list[TokenFrame]], list[TokenFrame]]:
    """Returns a function that delays frames, repeats old ones, shuffles them, and loses some before attempt
    `is_reliable_from`."""
    kept: list[TokenFrame] = []
    sent: list[TokenFrame] = []

    def frames(new: list[TokenFrame]) -> list[TokenFrame]:
        for frame in new:
            is_lost = frame.attempt < is_reliable_from and rng.random() < loss
            if not is_lost:
                kept.append(frame)
        is_end = any(frame.finish_reason for frame in new) or not new
        out = list(kept) if is_end or rng.random() < 0.5 else []
        if out:
            kept.clear()
        sent.extend(out)
        out += rng.sample(sent, min(len(sent), rng.randrange(3)))
        rng.shuffle(out)
        return out

    return frames


def upset(worker: FakeWorker, rng: random.Random, loss: float, deaths: int) -> None:
    worker.script.frames = unreliable(rng, loss, is_reliable_from=2)
    if deaths:
        worker.script.error, worker.script.die_at = WorkerLost("died"), rng.randrange(30)


async def serve(
    seed: int, loss: float, num_deaths: int, num_choices: int, stops: list[str], has_image: bool
) -> tuple[list[str], list[str]]:
    """Returns the texts of the answer, and the texts that it must have."""
    rng = random.Random(seed)
    async with fake_cluster(num_workers=4, num_encoders=2, max_attempts=5, gap_timeout_s=0.02) as cluster:
        for index, worker in enumerate(cluster.workers):
            upset(worker, rng, loss, deaths=index < num_deaths)
        content: object = [text("look "), image(1), text(" well")] if has_image else "look well"
        stream = await cluster.service.open(chat(content, n=num_choices, stop=stops))
        async with asyncio.timeout(20):
            texts, reasons, usage = await read(stream)
        cluster.service.cluster.check_invariants()
        assert reasons == ["stop"] * num_choices
        wanted, num_tokens = wanted_texts(cluster, num_choices, stops)
        assert usage.num_completion_tokens == num_tokens
        return texts, wanted


def wanted_texts(cluster: FakeCluster, num_choices: int, stops: list[str]) -> tuple[list[str], int]:
    """Returns the text that each choice must have, and the number of tokens of all."""
    texts, counted = [], 0
    for choice in range(num_choices):
        whole = expected(cluster, choice)
        cut = min((whole.index(stop) + len(stop) for stop in stops if stop in whole), default=None)
        texts.append(whole if cut is None else next(whole[: cut - len(s)] for s in stops if whole[:cut].endswith(s)))
        counted += len(whole.encode()) + 1 if cut is None else len(whole[:cut].encode())
    return texts, counted


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.0, 0.2]),
    num_deaths=st.integers(0, 2),
    num_choices=st.integers(1, 3),
    stops=st.sampled_from([[], ["grüß"], ["choice 1", "tokens"]]),
    has_image=st.booleans(),
)
def test_no_token_twice_and_none_missing(
    seed: int, loss: float, num_deaths: int, num_choices: int, stops: list[str], has_image: bool
) -> None:
    texts, wanted = asyncio.run(serve(seed, loss, num_deaths, num_choices, stops, has_image))
    assert texts == wanted
