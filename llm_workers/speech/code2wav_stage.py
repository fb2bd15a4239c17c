"""Implements the stage that turns codec frames into samples: `Code2WavStage`, a `StageModel` of the kind `generation`.

A unit is one codec frame. Each request has a place in `_MemoryPool`, which holds what the network remembers of it, so
that chunks of any size give the samples of one whole decode. One step computes all its requests in *passes*. Requests
that begin and requests that go on are in different passes, because their first layers differ. A pass has a limited
number of frames, so that its activations stay in the caches of a CPU and in the memory of a GPU. Rows of unequal length
are padded where the padding is small.

With `left_context_frames`, the stage keeps no memories and decodes that many frames again before each chunk. The number
of samples is the same then, but their values are only close to those of a whole decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fabric.contracts import ConfigError, ProtocolError, StageKey, StageRequest
from llm_workers.speech.code2wav_network import Code2WavNetwork, FrameBatch
from llm_workers.stages import StageChunk, StageOutput, StageSpan

SAMPLE_RATE = 24_000
"""Holds the rate of the samples of Qwen's omni models in Hz. Their config files do not name it."""
_CPU_FRAMES, _DEVICE_FRAMES = 50, 3200
"""These numbers limit the frames of one pass on a CPU and elsewhere. On one core, a network of 1.6 million parameters
needs 33 ms for each 25 frames with 50 in a pass, 47 ms with 200, and 145 ms with 1,600, because the activations leave
the caches. Elsewhere, one activation of the 30B model's network takes about 1.2 GB for 3,200 frames in half
precision."""
_MAX_ROW_FRAMES = 50
"""Limits the frames that one pass takes of one request, so that long requests share passes."""
_MAX_PADDING = 0.25
"""Limits the padding of a pass as a fraction of its frames."""


class Code2WavStage:
    """Implements `StageModel` over a `Code2WavNetwork`. Only the engine's thread may call it."""

    def __init__(self, network: Code2WavNetwork, left_context_frames: int | None = None) -> None:
        """Creates the stage. With `left_context_frames`, memories are replaced by decoding so many frames again.
        Raises ConfigError if these are too few to complete the samples of a chunk."""
        needed = network.min_first_frames
        if left_context_frames is not None and left_context_frames < needed:
            raise ConfigError(f"left_context_frames must be at least {needed}, but it is {left_context_frames}")
        self._network, self._context = network, left_context_frames
        self._pool = _MemoryPool(network)
        self._key_to_request: dict[StageKey, _Request] = {}
        self._max_frames = _CPU_FRAMES if network.device.type == "cpu" else _DEVICE_FRAMES

    @property
    def num_states(self) -> int:
        """Returns how many requests hold a place in the pool of memories."""
        return len(self._key_to_request)

    def open(self, request: StageRequest) -> None:
        """Takes a request in. Raises ProtocolError if the request is open already."""
        if request.key in self._key_to_request:
            raise ProtocolError(f"the request {request.key} is open already")
        codes = np.empty((0, self._network.num_quantizers), dtype=np.int64)
        self._key_to_request[request.key] = _Request(self._pool.take(), codes)

    def receive(self, chunk: StageChunk) -> None:
        """Takes the next codes, int64 `(num_frames, num_quantizers)`; a last chunk may have none. Raises ProtocolError
        if they do not continue the request or are no codes of this model."""
        request = self._key_to_request[chunk.key]
        if request.is_last:
            raise ProtocolError(f"the request {chunk.key} has had its last chunk already")
        if "codes" in chunk.payload:
            request.codes = np.concatenate([request.codes, self._new_codes(request, chunk)])
        elif not chunk.is_last:
            raise ProtocolError(f"chunk {chunk.number} of {chunk.key} has no codes")
        request.is_last = chunk.is_last

    def num_units_ready(self, key: StageKey) -> int:
        """Returns how many frames have come, or 0 as long as they are too few for a first pass."""
        request = self._key_to_request[key]
        is_enough = request.is_last or len(request.codes) >= self._network.min_first_frames
        return len(request.codes) if is_enough else 0

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        """Returns the samples that the spans' frames complete: `samples`, float32 `(n,)`, and `first_sample`. A request
        is computed as far as its passes succeeded, so a step that failed can be repeated."""
        for span in spans:
            request = self._key_to_request[span.key]
            if span.start != request.num_delivered:
                raise ProtocolError(f"{span.key} has {request.num_delivered} frames delivered, not {span.start}")
            request.end = span.start + span.num_units
        requests = [self._key_to_request[span.key] for span in spans]
        while turns := [turn for request in requests if (turn := self._turn(request))]:
            for one_pass in passes(turns, self._max_frames):
                self._run(one_pass)
        return {span.key: self._delivered(self._key_to_request[span.key]) for span in spans}

    def is_complete(self, key: StageKey) -> bool:
        request = self._key_to_request[key]
        return request.is_last and request.num_delivered == len(request.codes)

    def close(self, key: StageKey) -> None:
        self._pool.give_back(self._key_to_request.pop(key).place)

    def _new_codes(self, request: _Request, chunk: StageChunk) -> npt.NDArray[np.int64]:
        codes, first = chunk.payload["codes"], chunk.payload.get("first_frame")
        network = self._network
        if not isinstance(codes, np.ndarray) or codes.ndim != 2 or codes.dtype.kind not in "iu":
            raise ProtocolError(f"the codes of {chunk.key} must be integers with two axes")
        if codes.shape[1] != network.num_quantizers:
            raise ProtocolError(f"{chunk.key} has {codes.shape[1]} codes for a frame, not {network.num_quantizers}")
        if first != len(request.codes):
            raise ProtocolError(f"the codes of {chunk.key} start at frame {first}, but {len(request.codes)} have come")
        if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < network.codebook_size:
            raise ProtocolError(f"the codes of {chunk.key} must be in [0, {network.codebook_size})")
        return codes.astype(np.int64)

    def _turn(self, request: _Request) -> PassRow | None:
        """Returns what the request computes in the next pass, or None if its span is computed."""
        left = request.end - request.num_computed
        is_enough = request.num_computed > 0 or request.end >= self._network.min_first_frames
        if left <= 0 or not is_enough:
            return None
        if self._context is not None:
            start = max(0, request.num_computed - self._context)
            return PassRow(request, start, request.end, is_first=True)
        # A first pass must be long enough, so it takes what would be left of less.
        take = left if left <= max(_MAX_ROW_FRAMES, self._network.min_first_frames) else _MAX_ROW_FRAMES
        start = request.num_computed
        return PassRow(request, start, start + take, is_first=start == 0)

    def _run(self, turns: Sequence[PassRow]) -> None:
        """Computes one pass, and keeps its samples and memories."""
        network, lengths = self._network, [turn.length for turn in turns]
        codes = np.zeros((len(turns), network.num_quantizers, max(lengths)), dtype=np.int64)
        for row, turn in enumerate(turns):
            codes[row, :, : turn.length] = turn.request.codes[turn.start : turn.end].T
        starts = [0 if turn.is_first else turn.start for turn in turns]
        places = [turn.request.place for turn in turns]
        memories = network.new_memories(len(turns)) if turns[0].is_first else self._pool.read(places)
        batch = FrameBatch(torch.from_numpy(codes).to(network.device), lengths, starts)
        samples, memories = network.run(batch, memories)
        found = samples.cpu().numpy()
        if self._context is None:
            self._pool.write(places, memories)
        for row, turn in enumerate(turns):
            request = turn.request
            before, after = network.num_samples(request.num_computed), network.num_samples(turn.end)
            first = before - (turn.start * network.samples_per_frame if turn.is_first else before)
            request.samples.append(found[row, first : first + after - before].copy())
            request.num_computed = turn.end

    def _delivered(self, request: _Request) -> StageOutput:
        first = self._network.num_samples(request.num_delivered)
        samples = np.concatenate(request.samples) if request.samples else np.empty(0, dtype=np.float32)
        request.samples.clear()
        request.num_delivered = request.end
        is_finished = request.is_last and request.end == len(request.codes)
        return StageOutput({"samples": samples, "first_sample": first}, is_finished, len(samples))


@dataclass(slots=True)
class _Request:
    """Holds the state of one open request, except for what the network remembers of it."""

    place: int
    """Is the request's place in the pool of memories."""
    codes: npt.NDArray[np.int64]
    """Holds all codes that have come. Has shape `(num_frames, num_quantizers)`."""
    is_last: bool = False
    end: int = 0
    """Is the end of the latest span."""
    num_computed: int = 0
    num_delivered: int = 0
    samples: list[npt.NDArray[np.float32]] = field(default_factory=list)
    """Holds samples that are computed and not delivered."""


class PassRow(NamedTuple):
    """A `PassRow` is what one pass computes of one request: the frames `[start, end)`."""

    request: _Request
    start: int
    end: int
    is_first: bool
    """Says that the network remembers nothing before `start`."""

    @property
    def length(self) -> int:
        return self.end - self.start


def passes(turns: Sequence[PassRow], max_frames: int) -> Iterator[list[PassRow]]:
    """Yields the turns in groups that are computed together: all first or none, at most `max_frames` frames with their
    padding unless it is one turn, and little padding."""
    group: list[PassRow] = []
    for turn in sorted(turns, key=lambda turn: (turn.is_first, -turn.length)):
        padded = (len(group) + 1) * (group[0].length if group else turn.length)
        real = sum(other.length for other in group) + turn.length
        is_same = not group or group[0].is_first == turn.is_first
        if group and not (is_same and padded <= max_frames and padded <= real * (1 + _MAX_PADDING)):
            yield group
            group = []
        group.append(turn)
    if group:
        yield group


class _MemoryPool:
    """A `_MemoryPool` holds what the network remembers of all open requests, one row each. It doubles when it is
    full."""

    def __init__(self, network: Code2WavNetwork) -> None:
        self._network = network
        self._free: list[int] = []
        self._memories = network.new_memories(0)
        self._size = 0

    def take(self) -> int:
        """Returns a free place."""
        if not self._free:
            added = max(8, self._size)
            more = self._network.new_memories(added)
            self._memories = [torch.cat(pair) for pair in zip(self._memories, more, strict=True)]
            self._free = list(range(self._size, self._size + added))
            self._size += added
        return self._free.pop()

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def read(self, places: Sequence[int]) -> list[torch.Tensor]:
        at = torch.tensor(list(places), device=self._network.device)
        return [memory.index_select(0, at) for memory in self._memories]

    def write(self, places: Sequence[int], memories: Sequence[torch.Tensor]) -> None:
        at = torch.tensor(list(places), device=self._network.device)
        for memory, values in zip(self._memories, memories, strict=True):
            memory.index_copy_(0, at, values)
