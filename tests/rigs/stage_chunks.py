"""Provides requests, chunks and connectors for the tests of stages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fabric.contracts import MemberId, RequestId, StageRequest, StageTarget, TransferFailed, stage_key
from fabric.transport import InboxEntry, LocalStageConnector, StageConnector
from llm_workers.stages import ChunkAccumulator, Payload, StageChunk, StageOutput


def stage_request(
    name: str, stage_id: int = 1, arrived_s: float = 0.0, target: StageTarget | None = None
) -> StageRequest:
    return StageRequest(
        request_id=RequestId(name),
        attempt=0,
        router_id=MemberId("router-1"),
        router_address="router",
        stage_id=stage_id,
        age=(arrived_s, name),
        next_stage=target,
    )


def chunk(name: str, number: int, is_last: bool = False, value: int = 0) -> StageChunk:
    return StageChunk(stage_key(RequestId(name), 0), number, is_last, {"value": value})


def target_of(connector: StageConnector, kind: str = "in_process", stage_id: int = 1) -> StageTarget:
    return StageTarget(stage_id, MemberId(f"stage-{stage_id}"), connector.inbox, kind)


def numbers_in_pairs(accumulator: ChunkAccumulator, output: StageOutput) -> Payload | None:
    """Is a function that makes the next stage's input: it sends the numbers of two outputs at a time, and all at the
    end in the sequential pipeline."""
    accumulator.held.append(output)
    size = 2 if accumulator.is_async else 1 << 30
    if len(accumulator.held) < size and not output.is_finished:
        return None
    numbers = np.concatenate([np.atleast_1d(each.values["number"]) for each in accumulator.held])
    accumulator.held.clear()
    return {"numbers": numbers}


class FlakyConnector:
    """A `FlakyConnector` is a connector whose `put` fails as often as a test says, before or after the data has
    arrived."""

    def __init__(self, inner: LocalStageConnector) -> None:
        self._inner = inner
        self.next_put: Callable[[], str] = lambda: "good"
        """Returns `good`, `lost` (the call fails) or `doubtful` (it fails although the data has arrived)."""
        self.put_keys: list[str] = []

    @property
    def inbox(self) -> str:
        return self._inner.inbox

    def put(self, from_stage: int, to_stage: str, key: str, data: bytes) -> None:
        how = self.next_put()
        if how != "lost":
            self._inner.put(from_stage, to_stage, key, data)
            self.put_keys.append(key)
        if how != "good":
            raise TransferFailed("the put has failed")

    def get(self, from_stage: int, to_stage: str, key: str, timeout: float) -> bytes | None:
        return self._inner.get(from_stage, to_stage, key, timeout)

    def arrivals(self, timeout: float) -> list[InboxEntry]:
        return self._inner.arrivals(timeout)

    def wake(self) -> None:
        self._inner.wake()

    def discard(self, prefix: str) -> int:
        return self._inner.discard(prefix)

    @property
    def is_alive(self) -> bool:
        return self._inner.is_alive

    def close(self) -> None:
        self._inner.close()
