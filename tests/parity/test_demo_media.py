"""Tests that the demo model was trained on what the cluster computes from the same conversation's files: prompt,
positions, patches and spectrograms. Clips with sound are included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lossless_files import mkv, quantised, wav

from deploy.demo.ask import png
from deploy.demo.build import build_demo_checkpoint
from deploy.demo.drawing.facts import Clip, Part, Picture, Sample, Sound
from deploy.demo.drawing.speech import has_speech
from deploy.demo.tasks.catalogue import TASKS
from deploy.demo.training.encoding import Encoded, SampleEncoder
from fabric.contracts import MediaItem
from modalities.family import Family, ItemPlan, VideoHeader
from modalities.media import plan_media
from modalities.registry import REGISTRY
from modalities.text import TextCodec

pytestmark = pytest.mark.torch

NAME_TO_TASK = {task.name: task for task in TASKS if has_speech() or not task.needs_speech}
KIND_TO_TYPE = {Picture: "image", Sound: "audio", Clip: "video"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_checkpoint(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def family(model_dir: Path) -> Family:
    return REGISTRY.load_family(model_dir)


def on_file(part: Part) -> Part:
    """Returns the part as a file holds it."""
    if isinstance(part, Sound):
        return replace(part, samples=quantised(part.samples))
    if isinstance(part, Clip) and part.sound is not None:
        return replace(part, sound=replace(part.sound, samples=quantised(part.sound.samples)))
    return part


def file_of(part: Part) -> bytes:
    if isinstance(part, Picture):
        return png(part)
    if isinstance(part, Sound):
        return wav(part.samples)
    assert isinstance(part, Clip)
    return mkv(part.frames, part.fps, None if part.sound is None else part.sound.samples)


def planned(family: Family, sample: Sample) -> tuple[list[ItemPlan], list[MediaItem], list[bytes]]:
    """Plans the media of a sample. A clip with sound becomes two items."""
    plans: list[ItemPlan] = []
    items: list[MediaItem] = []
    files: list[bytes] = []

    def add(data: bytes, header: object, anchor: int = -1) -> None:
        found = plan_media(family, data, header, len(items), "p", anchor=anchor)
        plans.append(found.plan)
        items.append(found.item)
        files.append(data)

    for part in sample.media():
        data = file_of(part)
        header = REGISTRY.modality(KIND_TO_TYPE[type(part)]).probe(data, "p")
        add(data, header)
        if isinstance(header, VideoHeader) and header.sound is not None:
            add(data, header.sound, anchor=len(items) - 1)
    return plans, items, files


def check_inputs(family: Family, encoded: Encoded, items: list[MediaItem], files: list[bytes]) -> None:
    expected: dict[str, Iterator[Any]]
    expected = {"image": iter(encoded.images), "video": iter(encoded.videos), "audio": iter(encoded.sounds)}
    for item, data in zip(items, files, strict=True):
        units = family.preprocess(data, item)
        pixels = np.concatenate([unit.pixels for unit in units])
        if item.modality == "audio":
            np.testing.assert_allclose(pixels.T, next(expected["audio"]), atol=2e-4)
            continue
        patches, grid = next(expected[item.modality])
        assert grid == item.grid
        np.testing.assert_allclose(pixels, patches, atol=1e-6)


@pytest.mark.parametrize("name", NAME_TO_TASK)
def test_the_clusters_prompt_is_the_trained_one(name: str, model_dir: Path, family: Family) -> None:
    rng = np.random.default_rng(list(NAME_TO_TASK).index(name))
    codec = TextCodec.load(model_dir)
    for scale in (0, 1):
        drawn = NAME_TO_TASK[name].draw(rng, scale)
        turns = tuple(replace(turn, parts=tuple(on_file(part) for part in turn.parts)) for turn in drawn.turns)
        sample = replace(drawn, turns=turns)
        encoded = SampleEncoder(model_dir).encode(sample)
        messages = [
            {
                "role": turn.role,
                "content": [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": KIND_TO_TYPE[type(part)]}
                    for part in turn.parts
                ],
            }
            for turn in sample.turns
        ]
        plans, items, files = planned(family, sample)
        expanded = family.expand(codec.render(messages), plans, codec.encode_inside)
        assert expanded.token_ids == encoded.ids[: encoded.last_turn]
        positions = family.positions(expanded.token_ids, expanded.placeholders, items)
        trained = np.concatenate(encoded.positions, axis=1)
        np.testing.assert_array_equal(positions.ids, trained[:, : encoded.last_turn])
        assert positions.delta == trained[0, encoded.last_turn] - encoded.last_turn
        check_inputs(family, encoded, items, files)
