"""Simulates how one answer is spoken, stage by stage, on a virtual clock: `SpokenTimeline`.

The schedulers of the stages, the transfer adapter with its keys, and the functions that make each stage's input are
those of the product. What is simulated is time: the thinker makes a token after each of its steps, a step of the talker
and a frame of code2wav take given times, and a chunk is at the next stage after `CHUNK_S`. The models count tokens,
frames and samples, and compute nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fabric.contracts import MemberId, RequestId, StageKey, StageRequest, StageTarget
from fabric.transport import LocalStageConnector, LocalStageHub
from llm_workers.stages import (
    ArStageScheduler,
    ChunkSettings,
    ChunkTransferAdapter,
    GenerationStageScheduler,
    NextStageInput,
    Payload,
    RestoredRequest,
    StageChunk,
    StageModel,
    StageOutput,
    StageScheduler,
    StageSpan,
)
from loadtest.simulator.event_loop import VirtualLoop

CHUNK_S = 1e-4
"""A chunk takes this many seconds from stage to stage."""
SAMPLES_PER_FRAME = 1920
_CONNECTOR = "local"
_NOTHING = StageOutput({}, is_finished=True)


@dataclass(frozen=True, slots=True)
class SpeechStageTimes:
    """Holds what each stage takes for one answer in all, in seconds, and how the answer is made up."""

    thinker_s: float
    talker_s: float
    code2wav_s: float
    num_tokens: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class SpokenTimeline:
    """A `SpokenTimeline` says when the parts of one answer came, in seconds after the request."""

    token_s: tuple[float, ...]
    sound_s: tuple[float, ...]
    """Holds when each piece of sound came."""
    num_samples: int

    @property
    def first_sound_s(self) -> float:
        return self.sound_s[0]

    @property
    def total_s(self) -> float:
        return max(self.token_s[-1], self.sound_s[-1])


def spoken_timeline(
    times: SpeechStageTimes, *, is_async: bool, first_chunk_frames: int | None = None
) -> SpokenTimeline:
    """Simulates one answer, with chunks or in the sequential pipeline. `first_chunk_frames` is the size of the first
    chunk (`initial_codec_chunk_frames`); without it, the talker's load decides."""
    # The face of this folder knows the models of the stages too, so it imports torch.
    from llm_workers.speech import talker_to_code2wav, thinker_to_talker

    loop = VirtualLoop()  # type: ignore[abstract]  # it implements what tasks and futures need
    hub = LocalStageHub()
    options: dict[str, str | int | float] = {}
    if first_chunk_frames is not None:
        options["initial_codec_chunk_frames"] = first_chunk_frames
    code2wav = SimStage(loop, hub, 2, CountedCode2Wav(), times.code2wav_s / times.num_frames, None, is_async)
    talker_model = CountedTalker(times.num_frames)
    step_s = times.talker_s / times.num_frames
    talker = SimStage(loop, hub, 1, talker_model, step_s, talker_to_code2wav, is_async, code2wav)
    thinker = SimStage(loop, hub, 0, None, 0.0, thinker_to_talker, is_async, talker)
    for stage in (code2wav, talker, thinker):
        stage.open(options)
    token_s: list[float] = []

    def note_token(index: int) -> None:
        token_s.append(loop.now())
        values: Payload = {"token_ids": np.array([index], dtype=np.int64), "first_index": index}
        thinker.send(StageOutput(values, index == times.num_tokens - 1, 1))

    for index in range(times.num_tokens):
        loop.at((index + 1) * times.thinker_s / times.num_tokens, note_token, index)
    loop.run_while(lambda: True)
    return SpokenTimeline(tuple(token_s), tuple(code2wav.output_s), code2wav.num_outputs)


class SimStage:
    """A `SimStage` is one replica of a stage with one request. A step takes `s_per_unit` for each unit of its longest
    span. Without a model it is the thinker, which only sends."""

    def __init__(
        self,
        loop: VirtualLoop,
        hub: LocalStageHub,
        stage_id: int,
        model: StageModel | None,
        s_per_unit: float,
        make_payload: NextStageInput | None,
        is_async: bool,
        following: SimStage | None = None,
    ) -> None:
        self._loop, self._stage_id, self._model, self._s_per_unit = loop, stage_id, model, s_per_unit
        self._connector, self._following = LocalStageConnector(hub), following
        settings = ChunkSettings(make_payload, is_async)
        self._adapter = ChunkTransferAdapter({_CONNECTOR: self._connector}, loop, settings)
        self._scheduler = None if model is None else _scheduler(self._adapter, model)
        self._request: StageRequest | None = None
        self._is_busy = False
        self.output_s: list[float] = []
        """Holds the moments at which the last stage has made something."""
        self.num_outputs = 0

    def open(self, options: Mapping[str, str | int | float]) -> None:
        target = None
        if self._following is not None:
            following = self._following
            member_id = MemberId(f"stage-{following._stage_id}")
            target = StageTarget(following._stage_id, member_id, following._connector.inbox, _CONNECTOR)
        self._request = StageRequest(
            request_id=RequestId("spoken"),
            attempt=0,
            router_id=MemberId("router"),
            router_address="",
            stage_id=self._stage_id,
            age=(0.0, "spoken"),
            next_stage=target,
            options=dict(options),
        )
        self._adapter.open(self._request)
        if self._model is not None and self._scheduler is not None:
            self._model.open(self._request)
            self._scheduler.add(self._request)
            self._loop.soon(self._turn)

    def send(self, output: StageOutput) -> None:
        """Sends an output on its way; the next stage has its chunk, if one is due, after `CHUNK_S`."""
        assert self._request is not None
        if self._following is None:
            if output.num_outputs:
                self.output_s.append(self._loop.now())
                self.num_outputs += output.num_outputs
        elif self._adapter.save(output, self._request):
            self._adapter.save_once()
            self._loop.after(CHUNK_S, self._following.receive)

    def receive(self) -> None:
        """Takes in what lies in the inbox."""
        self._adapter.receive_once(_CONNECTOR, 0.0)
        self._turn()

    def _turn(self) -> None:
        """Begins the next step if there is one and the device is idle, as the stage's engine does."""
        model, scheduler = self._model, self._scheduler
        if self._is_busy or model is None or scheduler is None:
            return
        self._take(model, scheduler.take_chunks())
        plan = scheduler.schedule()
        if plan.spans:
            self._is_busy = True
            num_units = max(span.num_units for span in plan.spans)
            self._loop.after(num_units * self._s_per_unit, self._end_step, plan.spans)
        self._take(model, plan.restored)
        for key in plan.idle:
            self._finish(key, _NOTHING)

    def _take(self, model: StageModel, restored: Sequence[RestoredRequest]) -> None:
        for _, loaded in restored:
            if loaded.error is not None:
                raise loaded.error
            for chunk in loaded.chunks:
                model.receive(chunk)

    def _end_step(self, spans: Sequence[StageSpan]) -> None:
        model, scheduler = self._model, self._scheduler
        assert model is not None
        assert scheduler is not None
        outputs = model.execute(spans)
        scheduler.commit(spans)
        self._is_busy = False
        for key, output in outputs.items():
            if output.is_finished or model.is_complete(key):
                self._finish(key, output)
            else:
                self.send(output)
        self._turn()

    def _finish(self, key: StageKey, output: StageOutput) -> None:
        assert self._scheduler is not None
        assert self._model is not None
        self.send(output._replace(is_finished=True))
        self._scheduler.remove(key)
        self._model.close(key)
        self._adapter.close(key)


def _scheduler(adapter: ChunkTransferAdapter, model: StageModel) -> StageScheduler:
    if isinstance(model, CountedTalker):
        return ArStageScheduler(adapter, model.num_units_ready, 32, 1024, 16, 512)
    return GenerationStageScheduler(adapter, model.num_units_ready, 64, 256, 512)


# ------------------------------------------------------------ models that count


@dataclass(slots=True)
class _Counts:
    num_in: int = 0
    num_out: int = 0
    is_last: bool = False


@dataclass(slots=True)
class CountedTalker:
    """Implements `StageModel`: a frame needs the frame before it and the token with its number, or the end of the text.
    It ends after a number of frames."""

    num_frames: int
    _counts: dict[StageKey, _Counts] = field(default_factory=dict)

    def open(self, request: StageRequest) -> None:
        self._counts[request.key] = _Counts()

    def receive(self, chunk: StageChunk) -> None:
        counts, token_ids = self._counts[chunk.key], chunk.payload.get("token_ids")
        counts.num_in += len(token_ids) if isinstance(token_ids, np.ndarray) else 0
        counts.is_last = chunk.is_last

    def num_units_ready(self, key: StageKey) -> int:
        counts = self._counts[key]
        return min(counts.num_out + 1, self.num_frames if counts.is_last else counts.num_in)

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        outputs = {}
        for span in spans:
            counts = self._counts[span.key]
            values: Payload = {"codes": np.zeros((1, 1), dtype=np.int64), "first_frame": counts.num_out}
            counts.num_out += 1
            outputs[span.key] = StageOutput(values, self.is_complete(span.key), 1)
        return outputs

    def is_complete(self, key: StageKey) -> bool:
        return self._counts[key].num_out >= self.num_frames

    def close(self, key: StageKey) -> None:
        del self._counts[key]


@dataclass(slots=True)
class CountedCode2Wav:
    """Implements `StageModel`: each frame becomes samples."""

    _counts: dict[StageKey, _Counts] = field(default_factory=dict)

    def open(self, request: StageRequest) -> None:
        self._counts[request.key] = _Counts()

    def receive(self, chunk: StageChunk) -> None:
        counts, codes = self._counts[chunk.key], chunk.payload.get("codes")
        counts.num_in += len(codes) if isinstance(codes, np.ndarray) else 0
        counts.is_last = chunk.is_last

    def num_units_ready(self, key: StageKey) -> int:
        return self._counts[key].num_in

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        outputs = {}
        for span in spans:
            self._counts[span.key].num_out = span.start + span.num_units
            num_samples = span.num_units * SAMPLES_PER_FRAME
            outputs[span.key] = StageOutput({}, self.is_complete(span.key), num_samples)
        return outputs

    def is_complete(self, key: StageKey) -> bool:
        counts = self._counts[key]
        return counts.is_last and counts.num_out == counts.num_in

    def close(self, key: StageKey) -> None:
        del self._counts[key]
