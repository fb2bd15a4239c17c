"""Tests audio towers: the header determines the counts, and the features equal transformers', as a whole, in units and
in any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from audio_tower_rig import BUILDERS, HIDDEN, PLACE, Tower, build_qwen3_omni
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sound_files import Samples, encoded, noise

from fabric.contracts import ConfigError, InvalidMedia, MediaItem, MmHash
from modalities.families.audio_towers import qwen3_omni_tower as qwen3_omni
from modalities.family import AudioHeader, ItemPlan
from modalities.media import probe_sound

pytestmark = pytest.mark.torch

RATE = 16000
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module", params=BUILDERS)
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    return BUILDERS[request.param](tmp_path_factory.mktemp("tower") / request.param)


def planned(tower: Tower, num_samples: int, rate: int = RATE) -> ItemPlan:
    return tower.sound.plan(AudioHeader("WAV", rate, 1, num_samples))


def windows_of(tower: Tower, samples: Samples) -> list[Samples]:
    """Splits the samples as the reference reads them: as a whole, or in windows."""
    size = tower.sound.segment_samples or len(samples)
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def expected(tower: Tower, samples: Samples) -> torch.Tensor:
    return torch.cat(tower.expected(windows_of(tower, samples)))


def item_of(plan: ItemPlan) -> MediaItem:
    return MediaItem(0, plan.modality, MmHash("0" * 32), plan.grid, plan.unit_tokens, plan.cost, "part")


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_samples=st.integers(1, 6 * RATE))
def test_the_plan_is_what_comes(tower: Tower, num_samples: int) -> None:
    """The plan has the frames that the reference's extractor makes, and the rows that its processor counts."""
    samples = np.zeros(num_samples, dtype=np.float32)
    windows = windows_of(tower, samples)
    shortest = 0 if tower.sound.padded_to else tower.sound.mel.window // 2
    frames = [made.shape[1] for made in tower.spectrograms([window for window in windows if len(window) > shortest])]
    counts = [max(0, tower.num_tokens(num)) for num in frames]
    if not sum(counts):
        with pytest.raises(InvalidMedia, match="too short"):
            planned(tower, num_samples)
        return
    plan = planned(tower, num_samples)
    assert sum(plan.unit_tokens) == sum(counts)
    assert plan.grid == (sum(num for num, count in zip(frames, counts, strict=True) if count), 1, 1)
    assert plan.geometry == (RATE, num_samples)
    units = tower.sound.inputs(samples)
    assert len(units) == len(plan.unit_tokens)
    assert sum(unit.num_patches for unit in units) == plan.cost
    assert sum(unit.grid[0] for unit in units) == plan.grid[0]
    assert all(unit.pixels.shape[1] == tower.sound.mel.num_bins for unit in units)
    assert all(unit.pixels.flags.c_contiguous and unit.pixels.dtype == np.float32 for unit in units)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(700, 4 * RATE), min_size=1, max_size=4), seed=st.integers(0, 99), data=st.data())
def test_features_in_any_batch(tower: Tower, sizes: list[int], seed: int, data: st.DataObject) -> None:
    """Units of several sounds, in any order and in any batches, equal the rows of each sound alone."""
    sounds = [noise(size, seed + index) for index, size in enumerate(sizes)]
    units = [(index, unit) for index, samples in enumerate(sounds) for unit in tower.sound.inputs(samples)]
    order = data.draw(st.permutations(range(len(units))))
    cut = data.draw(st.integers(0, len(units)))
    made = [*tower.encoder.encode([units[at][1] for at in order[:cut]])]
    made += tower.encoder.encode([units[at][1] for at in order[cut:]])
    place_to_rows = dict(zip(order, made, strict=True))
    for index, samples in enumerate(sounds):
        found = [place_to_rows[at] for at in range(len(units)) if units[at][0] == index]
        assert [rows.shape for rows in found] == [(1, num, HIDDEN) for num in planned(tower, len(samples)).unit_tokens]
        assert all(rows.is_contiguous() for rows in found)
        torch.testing.assert_close(torch.cat(found, dim=1)[0], expected(tower, samples), **CLOSE)


@pytest.mark.parametrize("num_samples", [2 * RATE, 2 * RATE + 320, 2 * RATE + 321, 4 * RATE, 4 * RATE + 1, 6 * RATE])
def test_features_at_the_seams(tower: Tower, num_samples: int) -> None:
    samples = noise(num_samples, 5)
    rows = torch.cat(tower.encoder.encode(tower.sound.inputs(samples)), dim=1)[0]
    window = tower.sound.segment_samples
    if window and 0 < num_samples % window <= 2 * tower.sound.mel.hop:
        samples = samples[: num_samples // window * window]  # The remainder is too short for a row.
    torch.testing.assert_close(rows, expected(tower, samples), **CLOSE)


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "ogg-opus", "m4a"])
def test_files_become_units(tower: Tower, name: str) -> None:
    data = encoded(noise(44100 * 3, 3)[None], 48000, name)
    item = item_of(tower.sound.plan(probe_sound(data, "part")))
    units = tower.sound.preprocess(data, item)
    assert len(units) == len(item.unit_tokens)
    assert [rows.shape[1] for rows in tower.encoder.encode(units)] == list(item.unit_tokens)
    other = item_of(tower.sound.plan(AudioHeader("WAV", RATE, 1, RATE)))
    with pytest.raises(InvalidMedia, match=r"part: .*were planned from its header"):
        tower.sound.preprocess(data, other)


@pytest.mark.parametrize("name", BUILDERS)
def test_half_precision(name: str, tmp_path: Path) -> None:
    """The features are as close to float32 as rounding allows, and have the model's dtype."""
    tower = BUILDERS[name](tmp_path, dtype="bfloat16")
    samples = noise(RATE, 4)
    (rows,) = tower.encoder.encode(tower.sound.inputs(samples))
    (whole,) = tower.expected([samples])
    assert rows.dtype == torch.bfloat16
    assert (rows[0] - whole).norm() < 0.05 * whole.norm()


def test_nothing_to_encode(tower: Tower) -> None:
    assert tower.encoder.encode([]) == []


def test_sounds_have_no_deepstack_levels(tmp_path: Path) -> None:
    """The encoder sends no zeros in place of the missing levels."""
    tower = build_qwen3_omni(tmp_path)
    units = tower.encoder.encode(tower.sound.inputs(noise(3 * RATE)))
    assert {unit.shape[0] for unit in units} == {1}
    assert tower.sound.plan(AudioHeader("WAV", RATE, 1, 3 * RATE)).num_levels == 1


def test_a_missing_weight_is_refused(tmp_path: Path) -> None:
    """The loader does not take the weight from the text model, whose layers have the same names."""
    tower = build_qwen3_omni(tmp_path, width=HIDDEN)
    del tower.model.model.audio_tower.layers[0].self_attn
    tower.model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="lacks 8 weights of Qwen3OmniMoeAudioEncoder"):
        qwen3_omni.load_encoder(tmp_path, tower.model.config.audio_config, tower.sound, PLACE)
