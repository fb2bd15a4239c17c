"""Tests features that fail, that no request claims or that never arrive: what the worker reports, requests and
releases."""

from __future__ import annotations

import asyncio

import pytest
import torch
from worker_rig import ENCODER, ROUTER, WORKER, Prompt, feature, loaded, prompt, reference, rig

from fabric.contracts import GenerateResult, ManualClock, Member, MemberId, StopConditions

IMAGE = ("Some words in front. ", 1, " What is it?")
LONG = StopConditions(max_tokens=4000, ignore_eos=True)


def names(result: GenerateResult) -> list[str]:
    return [event.name for event in result.trace]


async def test_a_feature_of_another_shape_fails_its_request_alone() -> None:
    of, text = prompt(*IMAGE), prompt("Only text.")
    async with rig() as r:
        request, other = r.request(of), r.request(text, stop=StopConditions(30, ignore_eos=True))
        calls = [asyncio.ensure_future(r.service.generate(one)) for one in (request, other)]
        r.publish(request, of, 0, feature(of, 0)[:, :-1])
        results = await asyncio.gather(*calls)
        assert [result.error and result.error.code for result in results] == ["feature_mismatch", None]
        assert len(r.tokens(other)) == 30
        await r.assert_idle()
        assert len(r.releases) == 1


async def test_a_poisoned_feature_fails_its_request_alone() -> None:
    of, text = prompt(*IMAGE), prompt("Only text.")
    async with rig() as r:
        poisoned, other = r.request(of), r.request(text, stop=StopConditions(30, ignore_eos=True))
        calls = [asyncio.ensure_future(r.service.generate(one)) for one in (poisoned, other)]
        r.publish(poisoned, of, 0, torch.full_like(feature(of, 0), float("nan")))
        results = await asyncio.gather(*calls)
        assert [result.error and result.error.code for result in results] == ["engine_failed", None]
        assert r.tokens(other) == reference_of(text, 30)
        await r.assert_idle()
        again = r.request(text, stop=StopConditions(30, ignore_eos=True))
        await r.service.generate(again)
        assert r.tokens(again) == r.tokens(other)
        r.service.check_health()


@pytest.mark.parametrize("keep_features", ["always", "never"])
@pytest.mark.parametrize("step_tokens", [16, 512])
async def test_nothing_that_was_not_finite_is_found_again(keep_features: str, step_tokens: int) -> None:
    """No token shows the failure in steps of 16 tokens, because no token is sampled from the poisoned chunk. Identical
    prompts hit the cached prefix and, where features are kept, the feature. Both must be as they would be without the
    poisoned request."""
    of, text = prompt(*IMAGE), prompt("Only text.")
    bad = feature(of, 0).clone()
    bad[0, 3, 5] = float("nan")
    async with rig(block_size=4, max_step_tokens=step_tokens, max_sequences=8, keep_features=keep_features) as r:
        r.heartbeat()
        poisoned, other = r.request(of), r.request(text, stop=StopConditions(30, ignore_eos=True))
        calls = [asyncio.ensure_future(r.service.generate(one)) for one in (poisoned, other)]
        r.publish(poisoned, of, 0, bad)
        results = await asyncio.gather(*calls)
        assert [result.error and result.error.code for result in results] == ["engine_failed", None]
        assert r.tokens(other) == reference_of(text, 30)
        assert r.tokens(poisoned) == []
        for _ in range(3):
            again = r.request(of)
            result = await r.run(again, of)
            assert result.error is None
            assert r.tokens(again) == reference(of, 8)[0]
        await r.assert_idle()


async def test_a_poisoned_feature_that_others_wait_for_is_fetched_again() -> None:
    """Three requests share the picture. The one that reads it earliest fails, and the others read another copy."""
    of = prompt(*IMAGE)
    bad = torch.full_like(feature(of, 0), float("inf"))
    async with rig(block_size=4, max_step_tokens=16, max_sequences=1) as r:
        first, *others = requests = [r.request(of) for _ in range(3)]
        r.router.on_needed = lambda message: r.publish(
            next(one for one in requests if one.request_id == message.request_id), of, 0
        )
        calls = [asyncio.ensure_future(r.service.generate(one)) for one in requests]
        r.publish(first, of, 0, bad)
        results = await asyncio.gather(*calls)
        assert [result.error and result.error.code for result in results] == ["engine_failed", None, None]
        for one in others:
            assert r.tokens(one) == reference(of, 8)[0]
        await r.assert_idle()


def reference_of(of: Prompt, num_tokens: int) -> list[int]:
    out = loaded().reference.generate(
        input_ids=torch.tensor([of.token_ids]),
        do_sample=False,
        min_new_tokens=1,
        max_new_tokens=num_tokens,
        eos_token_id=-1,
    )
    return out[0, len(of.token_ids) :].tolist()


async def test_what_was_not_dispatched_and_is_not_covered_is_asked_for() -> None:
    of = prompt(*IMAGE)
    async with rig() as r:
        request = r.request(of, dispatched_items=())
        r.router.on_needed = lambda message: r.publish(request, of, 0)
        result = await r.service.generate(request)
        assert result.error is None
        assert [(needed.reason, needed.units) for needed in r.router.needed] == [
            ("not_covered", tuple(of.media[0].unit_keys()))
        ]
        assert names(result).index("feature_needed") < names(result).index("unit_announced")
        assert r.tokens(request) == reference(of, 8)[0]


@pytest.mark.parametrize("fault", ["lease", "dead"])
async def test_a_transfer_that_fails_is_asked_for_again(fault: str) -> None:
    of = prompt(*IMAGE)
    async with rig() as r:
        request = r.request(of)
        r.channel.freeze("encoder")
        call = asyncio.ensure_future(r.service.generate(request))
        r.publish(request, of, 0)
        await r.until(lambda: r.sink.usage().num_slots == 1)
        if fault == "lease":
            (slot,) = r.slots.values()
            r.source.free(slot)
            r.channel.thaw("encoder")
        else:
            r.channel.kill("encoder")
            r.source = type(r.source)(r.channel, "encoder-again", 1 << 22)
        r.router.on_needed = lambda message: r.publish(request, of, 0)
        result = await call
        assert result.error is None
        assert [needed.reason for needed in r.router.needed] == [
            "lease_lost" if fault == "lease" else "transfer_failed"
        ]
        assert r.tokens(request) == reference(of, 8)[0]
        await r.assert_idle()


async def test_members_that_left_are_given_up() -> None:
    of = prompt(*IMAGE)
    members = [
        Member(WORKER, "worker", "local://worker", "h", 7),
        Member(ENCODER, "encoder", "local://encoder", "h", 1, ("image",), "encoder"),
        Member(ROUTER, "router", "local://router", "h", 1),
    ]
    async with rig() as r:
        r.service.update_members(members)
        request, other = r.request(of), r.request(of, router_id=MemberId("router-1"), stop=LONG)
        r.channel.freeze("encoder")
        calls = [asyncio.ensure_future(r.service.generate(one)) for one in (request, other)]
        r.publish(request, of, 0)
        await r.until(lambda: r.sink.usage().num_slots == 1)
        r.channel.kill("encoder")
        r.service.update_members([members[0], members[2]])
        await r.until(lambda: r.router.needed)
        r.service.update_members([members[0]])
        result = await calls[0]
        assert result.choices[0].finish_reason == "abort"
        assert not calls[1].done(), "another router's request goes on"
        calls[1].cancel()
        await r.assert_idle()
        assert r.service.report().epoch == 7


async def test_an_announcement_that_nobody_claims_is_given_back() -> None:
    of = prompt(*IMAGE)
    clock = ManualClock()
    async with rig(clock=clock, report_interval_s=0.01) as r:
        r.publish(r.request(of), of, 0)
        await r.until(lambda: r.service.num_units_held == 1)
        assert not r.releases
        clock.advance(31.0)
        await r.until(lambda: r.releases)
        assert r.service.num_units_held == 0
