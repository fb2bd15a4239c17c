"""Compares speech with transformers when real stage services make it, asynchronous and sequential, with few KV blocks.

The thinker is a transfer adapter that sends what the reference's thinker made; two services run the talker and
code2wav, with their engines, schedulers and connectors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from family_rig import Text
from family_row import Medium
from speech_reference import SpeechReference, Spoken
from stage_line import stage_line

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> SpeechReference:
    return SpeechReference(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def spoken(reference: SpeechReference) -> list[Spoken]:
    picture, sound = Medium("image", 1, (96, 96)), Medium("audio", 2, (1000, 0))
    return [
        reference.ask(Text(1, 5), voice="Chelsie"),
        reference.ask(Text(1, 3), picture, Text(2, 2), sound),
        reference.ask(Text(13, 7)),
        reference.ask(Text(6, 4)),
    ]


@pytest.mark.parametrize("is_async", [True, False])
async def test_services_speak_like_transformers(
    reference: SpeechReference, spoken: Sequence[Spoken], is_async: bool
) -> None:
    torch.set_num_threads(1)
    async with asyncio.timeout(60), stage_line(reference.directory, is_async=is_async) as line:
        found = await asyncio.gather(
            *(line.speak(f"r{index}", each, slowly=index % 2 == 0) for index, each in enumerate(spoken))
        )
    for samples, each in zip(found, spoken, strict=True):
        assert len(samples) == len(each.samples)
        assert np.abs(samples / 32767 - each.samples).max() < 1e-4
    assert [model.num_states for model in line.models] == [0, 0]
