"""Runs every family of the table through the same suite: its greedy tokens through the real worker equal transformers'.

A difference passes only where the reference's two best logits lie within 1e-4, on at most 0.1 % of sequences. The suite
counts and prints such cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from chat_media import png
from family_rig import FamilyPrompt, LoadedFamily, Text
from family_row import FILM, FamilyRow, Medium
from family_table import ROWS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from reference_model import Answer, Comparison
from worker_rig import Rig, rig

from fabric.contracts import FeatureNeeded, GenerateRequest, GenerateResult
from modalities.media import frame_sampling as video_rows
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

NUM_TOKENS = 10
QUESTION, SYSTEM, BETWEEN = Text(1, 23), Text(2, 17), Text(3, 5)

Parts = tuple[Text | Medium, ...]


@pytest.fixture(scope="module", autouse=True)
def small_units() -> Iterator[None]:
    """Makes videos consist of several units although they are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_rows, "UNIT_PATCHES", 48)
        yield


@pytest.fixture(scope="module")
def comparison() -> Iterator[Comparison]:
    counted = Comparison()
    yield counted
    counted.finish()


@pytest.fixture(scope="module", params=ROWS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedFamily:
    row: FamilyRow = request.param
    return LoadedFamily(row, tmp_path_factory.mktemp(row.name))


def prompts_of(row: FamilyRow) -> list[Parts]:
    """Returns prompts: text alone; for each modality prompts with one medium and with several, one of them twice, which
    share a beginning; and prompts with all modalities."""
    found: list[Parts] = [(SYSTEM, QUESTION), (Text(4, 1),), (Text(5, 41),)]
    for kind in row.kinds:
        media = [Medium(kind, seed, size) for seed, size in enumerate(row.sizes_of(kind), start=1)]
        alone = media if kind == row.kinds[0] else media[:1]
        found += [(SYSTEM, medium, QUESTION) for medium in alone]
        found.append((SYSTEM, media[0], BETWEEN, media[1], BETWEEN, media[0], QUESTION))
        found.append((media[2], media[1]))
    if len(row.modalities) > 1:
        # The reference cannot process silent videos and videos with sound in one prompt.
        for left_out in (FILM, "video") if FILM in row.kinds else (FILM,):
            mixed = [Medium(kind, 7, row.sizes_of(kind)[0]) for kind in row.kinds if kind != left_out]
            found.append((SYSTEM, *mixed, QUESTION))
    return found


def check(comparison: Comparison, loaded: LoadedFamily, of: FamilyPrompt, tokens: list[int]) -> None:
    expected = loaded.expected(of, NUM_TOKENS)
    answer = Answer(list(of.token_ids), expected.token_ids, expected.margins)
    comparison.check(answer, list(of.token_ids), tokens, loaded.row.name)


class Crowd:
    """Sends prompts through one worker of `loaded`, and publishes features again when the worker requests them
    again."""

    def __init__(self, loaded: LoadedFamily, worker: Rig) -> None:
        self._loaded, self._worker = loaded, worker
        self._id_to_open: dict[str, tuple[GenerateRequest, FamilyPrompt]] = {}
        worker.router.on_needed = self._again

    def _publish(self, request: GenerateRequest, of: FamilyPrompt, index: int) -> None:
        item, unit = of.units[index]
        self._worker.publish(request, of, item, self._loaded.feature(of, index), unit)

    def _again(self, message: FeatureNeeded) -> None:
        if message.request_id not in self._id_to_open:
            return  # The request was cancelled.
        request, of = self._id_to_open[message.request_id]
        for index, (item, unit) in enumerate(of.units):
            if of.media[item].unit_keys()[unit] in message.units:
                self._publish(request, of, index)

    async def run(
        self, of: FamilyPrompt, delays: Sequence[int], num_tokens: int = NUM_TOKENS, **changes: Any
    ) -> tuple[list[int], GenerateResult]:
        """Runs one prompt. `delays` holds, in turn, by how many turns of the event loop the units are late. `changes`
        are fields of the request."""
        request = self._worker.request(of, num_tokens, **changes)
        self._id_to_open[request.request_id] = (request, of)
        call = asyncio.ensure_future(self._worker.service.generate(request))
        try:
            at = 0
            for turns, index in sorted((delays[index % len(delays)], index) for index in range(len(of.units))):
                await sleep_turns(turns - at)
                at = turns
                self._publish(request, of, index)
            result = await asyncio.wait_for(call, 60)
        finally:
            del self._id_to_open[request.request_id]
            call.cancel()
        assert result.error is None
        return self._worker.tokens(request), result


async def sleep_turns(num_turns: int) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0.001)


async def one_by_one(
    loaded: LoadedFamily, prompts: Sequence[FamilyPrompt], **config: Any
) -> list[tuple[list[int], GenerateResult]]:
    async with rig(parts=loaded, **config) as worker:
        crowd = Crowd(loaded, worker)
        found = [await crowd.run(of, [0]) for of in prompts]
        await worker.assert_idle()
        return found


async def at_once(
    loaded: LoadedFamily,
    prompts: Sequence[FamilyPrompt],
    arrivals: Sequence[Sequence[int]],
    cancelled_after: Sequence[int | None],
    **config: Any,
) -> list[list[int] | None]:
    """Returns the tokens per prompt, or None for a prompt that was cancelled after the given number of turns, before
    its end."""
    async with rig(parts=loaded, **config) as worker:
        crowd = Crowd(loaded, worker)
        runs = [asyncio.ensure_future(crowd.run(of, delays)) for of, delays in zip(prompts, arrivals, strict=True)]

        async def cancel(run: asyncio.Future[Any], turns: int) -> None:
            await sleep_turns(turns)
            run.cancel()

        await asyncio.gather(*(cancel(run, n) for run, n in zip(runs, cancelled_after, strict=True) if n is not None))
        await asyncio.wait(runs)
        await worker.assert_idle()
        return [None if run.cancelled() else run.result()[0] for run in runs]


@pytest.mark.parametrize("max_step_tokens", [5, 4096])
def test_every_kind_of_prompt_twice(loaded: LoadedFamily, comparison: Comparison, max_step_tokens: int) -> None:
    """Runs the prompts one after the other. The second time, each prompt finds the blocks of the first run."""
    prompts = [loaded.prompt(*parts) for parts in prompts_of(loaded.row)] * 2
    found = asyncio.run(one_by_one(loaded, prompts, max_step_tokens=max_step_tokens, block_size=4))
    for of, (tokens, _) in zip(prompts, found, strict=True):
        check(comparison, loaded, of, tokens)
    for of, (_, result) in list(zip(prompts, found, strict=True))[len(prompts) // 2 :]:
        assert result.num_cached_tokens >= (len(of.token_ids) - 1) // 4 * 4


@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_schedule(loaded: LoadedFamily, comparison: Comparison, data: st.DataObject) -> None:
    """Runs several prompts at once, with any chunk size and with or without the prefix cache. Features arrive late and
    in any order, the blocks do not suffice for all prompts, and one prompt may be cancelled."""
    kinds = prompts_of(loaded.row)
    prompts = [loaded.prompt(*parts) for parts in data.draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=4))]
    arrivals = [data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4)) for _ in prompts]
    cancelled = data.draw(st.none() | st.integers(0, len(prompts) - 1))
    turns = data.draw(st.integers(0, 20))
    block_size = data.draw(st.sampled_from([4, 8, 16]))
    needed = max(-(-(len(of.token_ids) + NUM_TOKENS) // block_size) for of in prompts)
    tokens = asyncio.run(
        at_once(
            loaded,
            prompts,
            arrivals,
            [turns if index == cancelled else None for index in range(len(prompts))],
            block_size=block_size,
            num_blocks=needed + data.draw(st.integers(0, needed // 2)),
            max_step_tokens=data.draw(st.sampled_from([3, 16, 64, 4096])),
            is_prefix_cache_enabled=data.draw(st.booleans()),
        )
    )
    for index, (of, found) in enumerate(zip(prompts, tokens, strict=True)):
        assert found is not None or index == cancelled
        if found is not None:
            check(comparison, loaded, of, found)


def test_other_media_give_other_tokens(loaded: LoadedFamily) -> None:
    """The parity tests above would prove nothing if the media had no influence."""
    for kind in loaded.row.kinds:
        size = loaded.row.sizes_of(kind)[0]
        prompts = [loaded.prompt(SYSTEM, Medium(kind, seed, size), QUESTION) for seed in (1, 2, 3)]
        answers = {tuple(loaded.expected(of, NUM_TOKENS).token_ids) for of in prompts}
        assert len(answers) == len(prompts)


def test_counts_and_values_equal_the_references_processor(loaded: LoadedFamily) -> None:
    for parts in prompts_of(loaded.row):
        of = loaded.prompt(*parts)
        processed = loaded.processed(of)
        assert [item.num_tokens for item in of.media] == processed.num_tokens
        for item in of.media:
            mine = [unit.pixels for unit, (index, _) in zip(of.inputs, of.units, strict=True) if index == item.index]
            values = np.concatenate([pixels.reshape(-1) for pixels in mine])
            expected = processed.pixels[item.index].reshape(-1)
            np.testing.assert_allclose(values, expected, rtol=0, atol=processed.atol)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(1, 400), height=st.integers(1, 400))
def test_counts_of_any_size(loaded: LoadedFamily, width: int, height: int) -> None:
    """Counts from the header alone equal what the reference's processor computes from the whole picture."""
    if "image" not in loaded.row.modalities or max(width, height) > 60 * min(width, height):
        return
    data = png(Image.new("RGB", (width, height)))
    plan = loaded.family.plan(REGISTRY.modality("image").probe(data, "part"))
    assert loaded.row.process is not None
    processed = loaded.row.process(loaded.directory, [("image", data)])
    assert [sum(plan.unit_tokens)] == processed.num_tokens


def batched(loaded: LoadedFamily, of: FamilyPrompt) -> list[torch.Tensor]:
    """Returns the features of all inputs, encoded in one batch per modality."""
    assert loaded.encoder is not None
    found: dict[int, torch.Tensor] = {}
    for modality in loaded.row.modalities:
        at = [index for index, unit in enumerate(of.inputs) if unit.modality == modality]
        found |= dict(zip(at, loaded.encoder.encode([of.inputs[index] for index in at]), strict=True))
    return [found[index] for index in range(len(of.inputs))]


def test_features_equal_the_references(loaded: LoadedFamily) -> None:
    """Encodes the units alone and as one batch."""
    shape = loaded.family.shape
    for parts in prompts_of(loaded.row):
        of = loaded.prompt(*parts)
        if not of.media:
            continue
        assert loaded.row.features is not None
        assert loaded.encoder is not None
        with torch.inference_mode():
            expected = loaded.row.features(loaded.reference, loaded.processed(of))
            batch = batched(loaded, of)
        alone = [loaded.feature(of, index) for index in range(len(of.inputs))]
        for found in (alone, batch):
            for item, whole in zip(of.media, expected, strict=True):
                units = [unit for unit, (index, _) in zip(found, of.units, strict=True) if index == item.index]
                num_levels = 1 if item.modality == "audio" else shape.num_levels
                assert item.num_levels == num_levels
                sizes = [(num_levels, num_tokens, shape.hidden_size) for num_tokens in item.unit_tokens]
                assert [tuple(unit.shape) for unit in units] == sizes
                assert all(unit.is_contiguous() for unit in units)
                torch.testing.assert_close(torch.cat(units, dim=1), whole, atol=1e-4, rtol=1e-4)
