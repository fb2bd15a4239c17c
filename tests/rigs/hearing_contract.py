"""Says what every engine of a worker must do with sounds, in the form of `engine_contract`: alone, beside pictures and
videos, and as the track of a video, whose rows stand among those of its pictures. The model is `qwen3_omni`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from contract_model import ContractPrompt, Film, Recording
from engine_contract import LATE_S, ContractRig


async def check_sounds_in_any_order(r: ContractRig) -> None:
    for number, order in enumerate(((0,), (1, 0), (2, 0, 1))):
        sounds = [part for index in range(len(order)) for part in (r.text(7), Recording(10 * number + index, 1.7))]
        of = r.model.prompt(*sounds, r.text(5))
        request = r.request(of)
        call = r.call(request)
        for sound in order:
            await r.at_doorstep()
            for index, unit in enumerate(of.units):
                if unit.mm_hash == of.media[sound].mm_hash:
                    r.publish(request, of, index)
        assert (await asyncio.wait_for(call, LATE_S)).error is None
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_sounds_are_told_apart(r: ContractRig) -> None:
    text = r.text(11)
    prompts = [r.model.prompt(text, Recording(seed), text) for seed in (40, 41)]
    assert r.model.answer(prompts[0], 6) != r.model.answer(prompts[1], 6)
    for of in prompts * 2:
        request = r.request(of)
        await r.run(request, of)
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_a_prefix_that_ends_inside_a_sound(r: ContractRig) -> None:
    block = r.service.kv_scheme.block_size
    of = r.model.prompt(r.text(block - 8), Recording(42), r.text(6))
    assert of.placeholders[0].offset < block < of.placeholders[0].end
    for round_ in range(2):
        request = r.request(of)
        result = await r.run(request, of)
        assert r.tokens(request) == r.model.answer(of, 6)
        assert result.num_cached_tokens == (block if round_ else 0)
    await r.assert_idle()


async def check_a_sound_beside_a_picture_and_a_video(r: ContractRig) -> None:
    for parts in ((Recording(43), 44), (45, r.text(3), Recording(46)), (Film(47), Recording(48), r.text(4), 49)):
        of = r.model.prompt(r.text(9), *parts, r.text(5))
        request = r.request(of)
        await r.run(request, of)
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_a_video_with_its_sound(r: ContractRig) -> None:
    """The rows of the video and of its sound stand in turn."""
    for parts in ((Film(50, has_sound=True),), (51, Film(52, has_sound=True), r.text(4), Recording(53))):
        of = r.model.prompt(r.text(12), *parts, r.text(6))
        assert _num_turns(of) > 4
        request = r.request(of)
        await r.run(request, of)
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_a_video_with_its_sound_that_lands_unit_by_unit(r: ContractRig) -> None:
    """Steps end between rows of the video and rows of its sound, in both orders of landing."""
    for seed, is_sound_first in ((54, True), (55, False)):
        of = r.model.prompt(r.text(8), Film(seed, has_sound=True), r.text(5))
        sounds = [unit.mm_hash == of.media[1].mm_hash for unit in of.units]
        order = sorted(range(len(of.units)), key=lambda index: (sounds[index] != is_sound_first, index))
        request = r.request(of)
        call = r.call(request)
        for index in order:
            await r.at_doorstep()
            r.publish(request, of, index)
        assert (await asyncio.wait_for(call, LATE_S)).error is None
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_a_prefix_that_ends_inside_a_video_with_its_sound(r: ContractRig) -> None:
    """What is not covered begins at other rows of the video and of its sound with each length of the text."""
    block = r.service.kv_scheme.block_size
    for num_text in range(3, block, 9):
        text, film = r.text(num_text), Film(56, has_sound=True)
        first = r.model.prompt(text, film)
        await r.run(r.request(first, 1), first)
        of = r.model.prompt(text, film, r.text(4))
        request = r.request(of)
        result = await r.run(request, of)
        assert first.placeholders[0].offset < result.num_cached_tokens < first.placeholders[-1].end
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


async def check_videos_with_sounds_in_one_step(r: ContractRig) -> None:
    prompts = [
        r.model.prompt(r.text(6), Film(60 + index, has_sound=index % 2 == 0), r.text(3), 70 + index)
        for index in range(4)
    ]
    requests = [r.request(of) for of in prompts]
    calls = [r.call(request) for request in requests]
    await r.at_doorstep(4)
    for request, of in zip(requests, prompts, strict=True):
        for index in range(len(of.units)):
            r.publish(request, of, index)
    await asyncio.wait_for(asyncio.gather(*calls), LATE_S)
    for request, of in zip(requests, prompts, strict=True):
        assert r.tokens(request) == r.model.answer(of, 6)
    await r.assert_idle()


def _num_turns(of: ContractPrompt) -> int:
    """Counts how often a run of rows follows one of another medium without a text between them."""
    runs = of.placeholders
    return sum(one.end == two.offset and one.item != two.item for one, two in itertools.pairwise(runs))


HEARING_CHECKS: list[Callable[[ContractRig], Awaitable[None]]] = [
    value for name, value in list(globals().items()) if name.startswith("check_")
]
