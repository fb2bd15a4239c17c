"""Checks the towers of encoders on a GPU: one call of the flash kernel per layer computes what torch's own attention
computes, and no layer waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audio_tower_rig import BUILDERS
from sound_files import noise
from vision_towers import GRIDS, TOWERS, features_of, tower_of

from deploy.demo.build import demo_checkpoint
from encoder_pool.device_streams import open_streams
from modalities import packed_attention
from modalities.device_copies import join_on_device, to_device, to_host
from modalities.families.audio_towers.sound_encoder import SoundEncoder
from modalities.families.qwen_vl.tower_tables import tower_tables
from modalities.families.qwen_vl.towers import VisionEncoder, fused_tower
from modalities.family import EncoderInput
from modalities.packed_attention import Segments, attend_packed, has_flash_kernel, use_packed_attention
from modalities.registry import REGISTRY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Raises an error if the host waits for the device within the block."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def packed_tower(name: str, dtype: torch.dtype) -> Any:
    tower = tower_of(name, torch.float32).to(CUDA, dtype)
    use_packed_attention(tower)
    return fused_tower(tower)


@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_computes_what_torch_computes(
    head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [64, 64, 32, 16, 1, 64, 1000]
    generator = torch.Generator("cuda").manual_seed(1)
    heads = torch.randn((sum(lengths), 3, 4, head_dim), generator=generator, device=CUDA).to(dtype)
    q, k, v = heads.unbind(1)  # These are views, as a tower gives them.
    segments = Segments(lengths, CUDA)
    assert has_flash_kernel(q)
    with waiting_refused():
        found = attend_packed(q, k, v, segments, None)
    monkeypatch.setattr(packed_attention, "has_flash_kernel", lambda q: False)
    truth = attend_packed(q.float(), k.float(), v.float(), segments, None)
    torch.testing.assert_close(found.float(), truth, atol=2e-2, rtol=2e-2)


def test_a_segment_is_the_same_in_every_batch() -> None:
    q, k, v = torch.randn((3, 500, 4, 80), device=CUDA).bfloat16()
    alone = attend_packed(q[:100], k[:100], v[:100], Segments([100], CUDA), None)
    assert torch.equal(attend_packed(q, k, v, Segments([100, 400], CUDA), None)[:100], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", TOWERS)
def test_a_vision_tower(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The features are as close to those of single precision as those of transformers' own blocks are, and nothing
    waits between the copy of the pixels and the end of the forward pass."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    truth = features_of(tower_of(name, torch.float32), GRIDS, torch.float32)
    theirs = features_of(tower_of(name, torch.float32).to(dtype), GRIDS, dtype)
    tower = packed_tower(name, dtype)
    width = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    num_patches = sum(t * h * w for t, h, w in GRIDS)
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn((num_patches, width), generator=generator).bfloat16().float().numpy()
    parts = np.split(pixels, np.cumsum([t * h * w for t, h, w in GRIDS])[:-1])
    inputs = [EncoderInput("image", part, grid) for part, grid in zip(parts, GRIDS, strict=True)]
    encoder = VisionEncoder(tower, has_deepstack="qwen3" in name)
    with torch.inference_mode():
        encoder.encode(inputs)
        with waiting_refused():
            found = encoder.encode(inputs)
    ours = torch.cat(found, dim=1).cpu()
    error, allowed = ((each.float() - truth).square().mean().sqrt().item() for each in (ours, theirs))
    assert error <= 1.25 * allowed + 1e-3


def test_tables_lie_on_the_device() -> None:
    tower = packed_tower("qwen2.5-vl", torch.bfloat16)
    with waiting_refused():
        tables = tower_tables(tower, GRIDS)
    tensors = [each for each in tables.values() if isinstance(each, torch.Tensor)]
    assert {each.device.type for each in tensors} == {"cuda"}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_tower_for_sounds(name: str, tmp_path: Path) -> None:
    built = BUILDERS[name](tmp_path)
    inputs = [unit for size in (16000, 40000, 9000) for unit in built.sound.inputs(noise(size))]
    expected = built.encoder.encode(inputs)
    encoder = SoundEncoder(built.encoder._tower.to(CUDA, torch.bfloat16), built.encoder._rows_of)
    with torch.inference_mode():
        encoder.encode(inputs)
        with waiting_refused():
            found = encoder.encode(inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float().cpu() - theirs).norm() < 0.05 * theirs.norm()


def test_weights_on_the_device_are_those_of_the_host() -> None:
    family = REGISTRY.load_family(demo_checkpoint())
    towers: list[Any] = [
        family.load_encoder(demo_checkpoint(), device, "bfloat16", ["image"]) for device in ("cpu", "cuda")
    ]
    ours, theirs = (dict(each._tower.named_parameters()) for each in towers)
    assert {each.device.type for each in theirs.values()} == {"cuda"}
    for name in ours.keys() & theirs.keys():
        assert torch.equal(ours[name], theirs[name].cpu()), name


# ------------------------------------------------------------ streams and copies


def test_vision_and_sound_have_streams_of_their_own() -> None:
    streams = open_streams("cuda")
    used = []
    for modality in ("image", "video", "audio", "image"):
        with streams.entered(modality):
            used.append(torch.cuda.current_stream().cuda_stream)
    assert used[0] == used[1] == used[3]
    assert len({*used, torch.cuda.default_stream().cuda_stream}) == 3


def test_copies_keep_their_values() -> None:
    """Copies are queued behind work on the same stream, and a copy to the host is done when it is returned."""
    streams = open_streams("cuda")
    values = np.arange(1 << 22, dtype=np.float32)
    with streams.entered("image"):
        with waiting_refused():
            on_device = to_device(values, CUDA, torch.bfloat16)
            doubled = on_device * 2
        half, whole = to_host([doubled[: 1 << 10], doubled])
    expected = torch.from_numpy(values).bfloat16() * 2
    assert torch.equal(whole, expected)
    assert torch.equal(half, expected[: 1 << 10])
    assert whole.is_pinned()


def test_join_on_device() -> None:
    parts = [np.full((n, 3), n, np.float32) for n in (1, 2, 5)]
    with waiting_refused():
        joined = join_on_device(parts, CUDA, torch.float16)
    assert torch.equal(joined.cpu(), torch.from_numpy(np.concatenate(parts)).half())
