"""Tests spoiled files, decompression bombs and files of another type than declared: each is decoded, or refused with an
error that names it.

Helper processes probe and decode the files as in production; a file may end a helper process, and nothing else. The
whole run has 5,000 files (`WEFT_FUZZ_FILES=5000`); without the variable, it has a part of them.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
from decoding_modality import DEFECT, decoding_registry
from media_corpus import motion_jpeg, silent_opus, video_file
from media_mutations import spoiled_file, whole_files
from modalities_files import encode, picture
from PIL import Image

from fabric.contracts import InvalidMedia
from modalities.family import MediaHeader
from modalities.probing import ProbeLimits, ProbePool

NUM_FILES = int(os.environ.get("WEFT_FUZZ_FILES", "400"))
NUM_AT_ONCE = 50
LIMITS = ProbeLimits(timeout_s=60.0, memory_bytes=2**31, wait_s=60.0)


@pytest.fixture
async def pool() -> AsyncIterator[ProbePool]:
    made = ProbePool(2, LIMITS, decoding_registry)
    await made.start()
    yield made
    await made.close()


async def outcomes_of(pool: ProbePool, files: Sequence[tuple[str, bytes]]) -> list[MediaHeader | InvalidMedia]:
    """Returns the outcome of each (modality, file). Fails on any outcome other than a decoded file or a refusal that
    names the file."""
    found: list[MediaHeader | InvalidMedia] = []
    for begin in range(0, len(files), NUM_AT_ONCE):
        probes = (
            pool.probe(f"decoded-{modality}", data, f"messages.0.content.{at}")
            for at, (modality, data) in enumerate(files[begin : begin + NUM_AT_ONCE], begin)
        )
        for at, outcome in enumerate(await asyncio.gather(*probes, return_exceptions=True), begin):
            if isinstance(outcome, InvalidMedia):
                assert outcome.param == f"messages.0.content.{at}"
                found.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                assert not outcome.format.startswith(DEFECT), f"file {at}: {outcome.format}"
                found.append(outcome)
    return found


async def test_every_whole_file_is_decoded(pool: ProbePool) -> None:
    files = [(modality, data) for modality, named in whole_files().items() for _, data in named]
    for outcome in await outcomes_of(pool, files):
        assert not isinstance(outcome, InvalidMedia), outcome
    assert pool.num_replaced == 0


async def test_spoiled_files_are_decoded_or_refused(pool: ProbePool) -> None:
    files = [spoiled_file(seed) for seed in range(NUM_FILES)]
    outcomes = await outcomes_of(pool, [(file.modality, file.data) for file in files])
    counts = Counter(
        (file.modality, isinstance(outcome, InvalidMedia)) for file, outcome in zip(files, outcomes, strict=True)
    )
    print(f"{NUM_FILES} files: {dict(counts)}; {pool.num_replaced} helpers replaced")
    assert all(counts[modality, is_refused] for modality in whole_files() for is_refused in (True, False))
    (after,) = await outcomes_of(pool, [("video", video_file("mp4-h264-aac"))])
    assert not isinstance(after, InvalidMedia)


async def test_files_that_are_not_what_they_are_sent_as(pool: ProbePool) -> None:
    strangers = [
        (other, data)
        for modality, named in whole_files().items()
        for name, data in named
        for other in whole_files()
        if other != modality and not (other == "audio" and modality == "video")
    ]
    for outcome in await outcomes_of(pool, strangers):
        assert isinstance(outcome, InvalidMedia)


async def test_truncated_files_of_every_format(pool: ProbePool) -> None:
    cut = [
        (modality, data[: int(len(data) * share)])
        for modality, named in whole_files().items()
        for name, data in named
        for share in (0.02, 0.6)
        if not name.startswith(("mpeg", "adts", "mp3-variable-no"))  # These formats declare no length.
    ]
    for (modality, data), outcome in zip(cut, await outcomes_of(pool, cut), strict=True):
        assert isinstance(outcome, InvalidMedia), (modality, data[:16], outcome)


def black(width: int, height: int) -> bytes:
    """Returns a picture that takes one bit per pixel until it is decoded, and almost nothing in its file."""
    return encode(Image.new("1", (width, height)), "PNG")


async def test_bombs(pool: ProbePool) -> None:
    jpeg = encode(picture(64, 48), "JPEG", quality=30)
    size_at = jpeg.index(b"\xff\xc0") + 5
    bomb = jpeg[:size_at] + b"\xff\xdc\xff\xdc" + jpeg[size_at + 4 :]
    files = [
        ("image", black(20_000, 10_000), "200000000|20000x10000"),
        ("audio", silent_opus(6000), "lasts 720.0 s"),
        ("video", motion_jpeg([jpeg, encode(Image.new("RGB", (1280, 960)), "JPEG"), jpeg]), "broken|1280x960"),
        ("video", motion_jpeg([jpeg, bomb, jpeg]), "broken"),
        ("video", motion_jpeg([bomb]), "broken|no frames"),
        ("image", b"", "not a readable image"),
        ("video", b"", "not a video or a sound"),
        ("audio", b"", "not a video or a sound"),
    ]
    outcomes = await outcomes_of(pool, [(modality, data) for modality, data, _ in files])
    for (modality, data, message), outcome in zip(files, outcomes, strict=True):
        assert isinstance(outcome, InvalidMedia), (modality, len(data), outcome)
        assert any(part in outcome.message for part in message.split("|")), outcome.message
    assert all(len(data) < 64 * 1024 for _, data, _ in files)
    assert pool.num_replaced == 0
