"""Tests on which stream the forward thread works, what it copies, and that memory is released when it runs out."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from encoder_pool import forward
from encoder_pool.device_streams import CudaStreams, DeviceStreams, HostStreams, open_streams
from encoder_pool.forward import ForwardThread
from encoder_pool.planning import FeatureSpec, ForwardResult, ForwardUnit, SoundJob, SoundResult
from fabric.contracts import EncodeFailed, MediaItem, MmHash
from modalities.device_copies import to_host
from modalities.family import EncoderInput, Waveform

pytestmark = pytest.mark.torch

SPEC = FeatureSpec(1, 4, "float32")


class RecordingStreams:
    """Implements `DeviceStreams`, and records what was entered; work outside of a block is an error."""

    def __init__(self) -> None:
        self.entered_modalities: list[str] = []
        self.current = ""
        self.num_releases = 0

    @contextmanager
    def entered(self, modality: str) -> Iterator[None]:
        assert not self.current
        self.current = modality
        self.entered_modalities.append(modality)
        try:
            yield
        finally:
            self.current = ""

    def release_memory(self) -> None:
        self.num_releases += 1


class Doubling:
    """Implements `EncoderModel` and `Spectrograms` on the streams that it is given. A batch that costs more than
    `most` runs out of memory."""

    def __init__(self, streams: RecordingStreams, most: int = 100) -> None:
        self._streams, self._most = streams, most

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        assert self._streams.current == inputs[0].modality
        if sum(len(unit.pixels) for unit in inputs) > self._most:
            raise torch.OutOfMemoryError("there is no memory")
        return [2 * torch.from_numpy(unit.pixels)[None] for unit in inputs]

    def units(self, waveforms: Sequence[Waveform]) -> list[list[EncoderInput]]:
        assert self._streams.current == "audio"
        return [[EncoderInput("audio", np.zeros((1, 4), np.float32), (1, 1, 1))] for _ in waveforms]


def unit_of(modality: str, num_rows: int, value: float = 1.0) -> ForwardUnit:
    pixels = np.full((num_rows, 4), value, np.float32)
    buffer = np.zeros(num_rows * 16, np.uint8)
    return ForwardUnit(EncoderInput(modality, pixels, (1, 1, num_rows)), num_rows, buffer)


def outcome(thread: ForwardThread, units: Sequence[ForwardUnit]) -> ForwardResult:
    results: queue.SimpleQueue[ForwardResult] = queue.SimpleQueue()
    thread.submit(units, results.put)
    return results.get(timeout=20)


@pytest.fixture
def streams() -> RecordingStreams:
    return RecordingStreams()


@contextmanager
def started(model: Doubling, streams: DeviceStreams) -> Iterator[ForwardThread]:
    thread = ForwardThread(model, model, streams)
    thread.start(SPEC, [EncoderInput("image", np.ones((1, 4), np.float32), (1, 1, 1))])
    try:
        yield thread
    finally:
        thread.close()


def test_each_batch_is_on_the_stream_of_its_modality(streams: RecordingStreams) -> None:
    with started(Doubling(streams), streams) as thread:
        for modality in ("image", "audio", "video"):
            unit = unit_of(modality, 2, 3.0)
            assert outcome(thread, [unit]).errors == [None]
            assert unit.buffer.view(np.float32).tolist() == [6.0] * 8
        results: queue.SimpleQueue[SoundResult] = queue.SimpleQueue()
        item = MediaItem(0, "audio", MmHash("0" * 32), (1, 1, 1), (1,), 1, "part")
        thread.submit_sounds([SoundJob(Waveform(np.zeros(4, np.float32), 16000, 4), item)], results.put)
        (units,) = results.get(timeout=20).outcomes
    assert isinstance(units, list)
    assert streams.entered_modalities == ["image", "audio", "video", "audio"]


def test_a_batch_is_copied_with_one_wait(streams: RecordingStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    def counted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert streams.current == "image"
        waits.append(len(tensors))
        return to_host(tensors)

    monkeypatch.setattr(forward, "to_host", counted)
    with started(Doubling(streams), streams) as thread:
        outcome(thread, [unit_of("image", size) for size in (1, 2, 3)])
    assert waits == [4]  # The sums of the features are copied with the three features.


def test_memory_is_released_when_it_runs_out(streams: RecordingStreams) -> None:
    with started(Doubling(streams, most=4), streams) as thread:
        assert outcome(thread, [unit_of("image", 3), unit_of("image", 4)]).errors == [None, None]
        assert streams.num_releases == 1
        found = outcome(thread, [unit_of("image", 5), unit_of("image", 1)]).errors
    assert isinstance(found[0], EncodeFailed)
    assert found[1] is None
    assert streams.num_releases == 3


def test_a_cpu_has_no_streams() -> None:
    streams = open_streams("cpu")
    assert isinstance(streams, HostStreams)
    with streams.entered("image"):
        streams.release_memory()
    assert isinstance(open_streams("cuda:0"), CudaStreams)


def test_pictures_and_videos_share_a_stream_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of CUDA's interface are replaced, so that the test needs no GPU. Weights are loaded on the default
    stream, so each new stream waits for that."""
    entered: list[FakeStream] = []

    class FakeStream:
        def __init__(self, device: torch.device) -> None:
            self.device, self.waited_for = device, list[str]()

        def wait_stream(self, other: str) -> None:
            self.waited_for.append(other)

    @contextmanager
    def entering(stream: FakeStream) -> Iterator[None]:
        entered.append(stream)
        yield

    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", entering)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default stream of {device}")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("all"))
    streams = open_streams("cuda:1")
    for modality in ("image", "audio", "video", "audio"):
        with streams.entered(modality):
            pass
    assert entered[0] is entered[2]
    assert entered[1] is entered[3]
    assert entered[0] is not entered[1]
    assert [each.waited_for for each in entered[:2]] == [["the default stream of cuda:1"]] * 2
    streams.release_memory()
    assert released == ["all"]


def test_tensors_of_a_cpu_stay_where_they_are() -> None:
    tensors = [torch.ones(2), torch.zeros(1)]
    assert [each.data_ptr() for each in to_host(tensors)] == [each.data_ptr() for each in tensors]
    assert to_host([]) == []
