"""Tests the synthetic videos of benches: every frame of a film is planned, and no two files are the same to a cache."""

from __future__ import annotations

from pathlib import Path

from loadtest.benches.synthetic import NUM_FRAMES, another, film, model_of_long_films
from modalities.family import MediaOptions
from modalities.media import plan_media
from modalities.registry import REGISTRY


def test_all_120_frames_of_a_film_are_planned_and_copies_are_told_apart(tmp_path: Path) -> None:
    family = REGISTRY.load_family(model_of_long_films(tmp_path))
    options, whole = MediaOptions(fps=30.0, max_frames=NUM_FRAMES), film()
    items = []
    for data in (another(whole, 0), another(whole, 1)):
        header = REGISTRY.modality("video").probe(data, "part")
        items.append(plan_media(family, data, header, 0, "part", options=options).item)
    assert [item.grid[0] for item in items] == [NUM_FRAMES // 2] * 2, "two frames to a temporal patch"
    assert len(items[0].unit_tokens) == 6
    assert items[0].mm_hash != items[1].mm_hash
