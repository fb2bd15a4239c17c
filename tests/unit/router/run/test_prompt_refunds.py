"""Tests what of a prompt counts for the quotas of its tenant when the request ends: nothing if the cluster has computed
nothing of it, or has failed before the first token."""

from __future__ import annotations

import asyncio

import pytest
from router_chats import chat, image, read

from deploy.testing import FakeCluster, fake_cluster, settled
from fabric.contracts import Aborted, EngineFailed, InvalidMedia, NoCapacity, WeftError
from router.router_config import RateQuota, Tenant
from router.run import Caller

BURST = 6000
SHOP = Tenant("shop", rates=RateQuota(tokens_per_minute=BURST, media_seconds_per_minute=60))
WEB = Caller(SHOP)


def used(cluster: FakeCluster) -> int:
    """Returns how many tokens count. The burst is full again only after a minute, so a tolerance covers the time that
    the test takes."""
    (tokens,) = [each for each in cluster.service.admission.rates.states(WEB) if each.quota == "tokens"]
    return round((BURST - tokens.left) / 10)


async def prompt_that_counts(cluster: FakeCluster, error: type[WeftError] | None) -> int:
    """Sends a prompt of 1,000 characters, whose answer ends with `error`. Returns the tokens that count, in tens."""
    ticket = cluster.service.admission.admit(WEB)
    stream = await cluster.service.open(chat("a" * 1000), ticket)
    assert used(cluster) > 90
    if error is None:
        await read(stream)
    else:
        with pytest.raises(error):
            await read(stream)
    ticket.release()
    return used(cluster)


async def test_an_answered_prompt_counts() -> None:
    async with fake_cluster(tenants=(SHOP,)) as cluster:
        assert await prompt_that_counts(cluster, None) > 90


async def test_a_prompt_that_reached_no_worker_does_not_count() -> None:
    async with fake_cluster(tenants=(SHOP,), num_workers=0) as cluster:
        assert await prompt_that_counts(cluster, NoCapacity) == 0


async def test_a_prompt_on_which_the_cluster_failed_does_not_count() -> None:
    async with fake_cluster(tenants=(SHOP,)) as cluster:
        cluster.workers[0].script.error, cluster.workers[0].script.die_at = EngineFailed("broke"), 0
        assert await prompt_that_counts(cluster, EngineFailed) == 0


async def test_a_prompt_with_an_answer_that_was_begun_counts() -> None:
    async with fake_cluster(tenants=(SHOP,)) as cluster:
        cluster.workers[0].script.error, cluster.workers[0].script.die_at = EngineFailed("broke"), 2
        assert await prompt_that_counts(cluster, EngineFailed) > 90


async def test_a_prompt_whose_client_left_counts_once_a_worker_had_it() -> None:
    async with fake_cluster(tenants=(SHOP,)) as cluster:
        cluster.encoders[0].gate = asyncio.Event()
        for waits, counts in ((False, False), (True, True)):
            ticket = cluster.service.admission.admit(WEB)
            stream = await cluster.service.open(chat([{"type": "text", "text": "a" * 1000}, image()]), ticket)
            if waits:
                await settled(lambda: bool(cluster.workers[0].requests))
            stream.close()
            with pytest.raises(Aborted):
                await read(stream)
            ticket.release()
            await settled(lambda: not cluster.service._runs)
            assert (used(cluster) > 90) is counts


async def test_a_prompt_with_a_broken_picture_counts_because_members_had_it() -> None:
    async with fake_cluster(tenants=(SHOP,)) as cluster:
        cluster.encoders[0].failures = [InvalidMedia("the picture is broken")]
        ticket = cluster.service.admission.admit(WEB)
        with pytest.raises(InvalidMedia):
            await read(await cluster.service.open(chat([{"type": "text", "text": "a" * 1000}, image()]), ticket))
        ticket.release()
        assert used(cluster) > 90
