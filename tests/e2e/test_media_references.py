"""Sends files through the pool of encoders on Ray: a large file is put into the object store once, however many calls
carry it, and is let go when it has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from deploy.ray import ray_pools
from deploy.ray.ray_pools import INLINE_BYTES, RayEncoderPool
from fabric.contracts import EncodeResult, EncoderLost, ErrorInfo, ItemResult, MemberId, Overloaded, StageTimes
from router.prompt import MediumFile

LARGE, SMALL = bytes(INLINE_BYTES + 1), bytes(INLINE_BYTES)
FULL = ErrorInfo.of(Overloaded("the queue is full"))


class CallsOfPool:
    """A `CallsOfPool` stands for Ray: it counts what is put into the store, and answers calls as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Sequence[EncodeResult | Exception]) -> None:
        self.num_put = 0
        self.carried: list[tuple[object, ...]] = []
        self._answers = iter(answers)
        monkeypatch.setattr(ray_pools.ray, "put", self.put)
        monkeypatch.setattr(ray_pools, "call_pinned", self.call)
        self.pool = RayEncoderPool(SimpleNamespace(encode=None))

    def put(self, data: bytes) -> str:
        self.num_put += 1
        return f"reference {self.num_put} to {len(data)} bytes"

    async def call(self, handle: object, member_id: MemberId, lost: type[Exception], *arguments: object) -> object:
        self.carried.append(arguments[1:])
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def encode(self, *media: MediumFile) -> EncodeResult:
        return await self.pool.encode(MemberId("encoder"), None, media)


def result(*errors: ErrorInfo | None) -> EncodeResult:
    return EncodeResult(
        MemberId("encoder"), tuple(ItemResult(at, StageTimes(), error) for at, error in enumerate(errors))
    )


async def test_a_file_that_is_sent_again_is_put_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallsOfPool(monkeypatch, [EncoderLost("died"), result(FULL), result(None), result(None)])
    file = MediumFile(LARGE)
    with pytest.raises(EncoderLost):
        await calls.encode(file)
    for _ in range(3):
        await calls.encode(file)
    first, second = f"reference 1 to {len(LARGE)} bytes", f"reference 2 to {len(LARGE)} bytes"
    assert calls.carried == [(first,), (first,), (first,), (second,)]


async def test_a_video_and_its_sound_track_are_put_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallsOfPool(monkeypatch, [result(None, None)])
    file = MediumFile(LARGE)
    await calls.encode(file, file)
    assert calls.num_put == 1
    assert calls.carried[0][0] is calls.carried[0][1]


async def test_a_small_file_travels_in_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallsOfPool(monkeypatch, [result(None)])
    await calls.encode(MediumFile(SMALL))
    assert calls.num_put == 0
    assert calls.carried == [(SMALL,)]
