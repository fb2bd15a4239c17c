"""Is a text-to-speech of two stages that is no part of Weft, as somebody could register their own: a talker that makes
codes, one after the other, and a vocoder that turns codes into samples. Both are plain arithmetic, and each of their
values depends on everything before it, so a lost, repeated or misplaced chunk changes the samples.

The talker keeps its rows in the KV blocks that the engine gives it, and reads all of them for each new code."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fabric.contracts import InvalidRequest, ProtocolError, StageKey, StageRequest
from llm_workers.stages import ChunkAccumulator, Payload, StageChunk, StageOutput, StageSpan

SAMPLES_PER_FRAME = 4
POISON = 1009
"""Is a prompt token that breaks every step in which it is computed."""
NUM_BLOCKS, BLOCK_SIZE = 24, 4


def spoken(prompt: Sequence[int], num_frames: int) -> npt.NDArray[np.float32]:
    """Returns the samples of a whole answer, computed at once."""
    rows, codes = list(prompt), []
    for place in range(num_frames):
        codes.append(next_code(np.array(rows), place))
        rows.append(codes[-1])
    return samples_of(np.array(codes), 0)


def next_code(rows: npt.NDArray[np.int64], place: int) -> int:
    return int((rows * np.arange(1, len(rows) + 1)).sum() + place) % 997


def samples_of(codes: npt.NDArray[np.int64], before: int) -> npt.NDArray[np.float32]:
    """Returns the samples of codes that follow the code `before`."""
    shifted = np.concatenate([[before], codes[:-1]])
    parts = np.arange(SAMPLES_PER_FRAME)[None, :]
    return ((codes[:, None] * (parts + 1) + shifted[:, None] * 3) % 1000 / 1000.0 - 0.5).astype(np.float32).ravel()


@dataclass
class TalkerState:
    prompt: tuple[int, ...]
    num_frames: int
    step_ms: int
    codes: list[int] = field(default_factory=list)


class ToyTalker:
    """Implements `StageModel` as the first stage of a pipeline: its rows are those of the prompt, and then one for each
    code that it has made."""

    def __init__(self) -> None:
        self._states: dict[StageKey, TalkerState] = {}
        self._cache = np.full(NUM_BLOCKS * BLOCK_SIZE, -1, dtype=np.int64)
        self.num_steps = 0

    def __len__(self) -> int:
        return len(self._states)

    def open(self, request: StageRequest) -> None:
        if request.prompt is None or not request.prompt.token_ids:
            raise InvalidRequest("the toy needs a prompt")
        num_frames, step_ms = request.options.get("num_frames", 0), request.options.get("step_ms", 0)
        assert isinstance(num_frames, int)
        assert isinstance(step_ms, int)
        self._states[request.key] = TalkerState(request.prompt.token_ids, num_frames, step_ms)

    def receive(self, chunk: StageChunk) -> None:
        raise ProtocolError("the first stage gets no chunks")

    def num_units_ready(self, key: StageKey) -> int:
        state = self._states[key]
        return len(state.prompt) + len(state.codes)

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        self.num_steps += 1
        time.sleep(max(self._states[span.key].step_ms for span in spans) / 1e3)  # It takes the time of a larger model.
        outputs: dict[StageKey, StageOutput] = {}
        for span in spans:  # A step that fails must change nothing.
            if POISON in self._states[span.key].prompt[span.start : span.start + span.num_units]:
                raise RuntimeError("a token is poisoned")
        for span in spans:
            state = self._states[span.key]
            rows = np.array([*state.prompt, *state.codes])
            end = span.start + span.num_units
            at = np.arange(end)
            slots = span.block_ids[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            self._cache[slots[span.start :]] = rows[span.start : end]
            if end == len(rows):
                state.codes.append(next_code(self._cache[slots], len(state.codes)))
                is_finished = len(state.codes) == state.num_frames
                outputs[span.key] = StageOutput({"code": state.codes[-1]}, is_finished, 1)
        return outputs

    def is_complete(self, key: StageKey) -> bool:
        state = self._states[key]
        return len(state.codes) == state.num_frames

    def close(self, key: StageKey) -> None:
        del self._states[key]


@dataclass
class VocoderState:
    codes: list[int] = field(default_factory=list)
    """Holds the codes that were not computed yet."""
    before: int = 0
    num_ready: int = 0
    num_samples: int = 0
    has_last: bool = False


class ToyVocoder:
    """Implements `StageModel` as a generation stage that carries one code from chunk to chunk."""

    def __init__(self) -> None:
        self._states: dict[StageKey, VocoderState] = {}
        self.largest_batch = 0

    def __len__(self) -> int:
        return len(self._states)

    def open(self, request: StageRequest) -> None:
        self._states[request.key] = VocoderState()

    def receive(self, chunk: StageChunk) -> None:
        state = self._states[chunk.key]
        codes = chunk.payload.get("codes")
        if isinstance(codes, np.ndarray):
            if chunk.payload["first_frame"] != state.num_ready:
                raise ProtocolError(f"frame {chunk.payload['first_frame']} comes after {state.num_ready} frames")
            state.codes += codes.tolist()
            state.num_ready += len(codes)
        state.has_last = chunk.is_last

    def num_units_ready(self, key: StageKey) -> int:
        return self._states[key].num_ready

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        self.largest_batch = max(self.largest_batch, len(spans))
        outputs: dict[StageKey, StageOutput] = {}
        for span in spans:
            state = self._states[span.key]
            codes, state.codes = np.array(state.codes[: span.num_units]), state.codes[span.num_units :]
            samples = samples_of(codes, state.before)
            values: Payload = {"samples": samples, "first_sample": state.num_samples}
            outputs[span.key] = StageOutput(values, False, len(samples))
            state.before, state.num_samples = int(codes[-1]), state.num_samples + len(samples)
        return outputs

    def is_complete(self, key: StageKey) -> bool:
        state = self._states[key]
        return state.has_last and not state.codes

    def close(self, key: StageKey) -> None:
        del self._states[key]


def toy_codes(accumulator: ChunkAccumulator, output: StageOutput) -> Payload | None:
    """Makes the vocoder's input: `codec_chunk_frames` codes at a time, or all at the end."""
    if "code" in output.values:
        accumulator.held.append(output)
    size = int(accumulator.settings.get("codec_chunk_frames", 5)) if accumulator.is_async else 1 << 30
    if len(accumulator.held) < size and not output.is_finished:
        return None
    codes = np.array([each.values["code"] for each in accumulator.held], dtype=np.int64)
    accumulator.held.clear()
    first = int(accumulator.request.options.get("sent", 0))
    accumulator.request.options["sent"] = first + len(codes)
    return {"codes": codes, "first_frame": first}
