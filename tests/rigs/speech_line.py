"""Drives a talker and a code2wav without the stages' engine: it hands chunks over and steps in any legal order.

`SpeechLine` takes the choices from its caller: which request's next chunk arrives, which requests a step computes and
how much of each, and which request is preempted. It holds the KV blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric.contracts import MemberId, RequestId, StagePrompt, StageRequest
from llm_workers.speech import Code2WavStage, TalkerStage, Token2WavStage, talker_to_code2wav, thinker_to_talker
from llm_workers.stages import ChunkAccumulator, Payload, StageChunk, StageOutput, StageSpan

Ints = npt.NDArray[np.int64]
NO_BLOCKS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Answer:
    """An `Answer` is what the thinker makes of one request."""

    prompt: StagePrompt
    outputs: Sequence[StageOutput]
    """Holds the outputs of the thinker's stage: hidden rows, then tokens; the last one is finished."""
    options: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(eq=False)
class SpeechCall:
    """A `SpeechCall` is one request on its way through the line."""

    request: StageRequest
    inbox: list[tuple[Payload, bool]]
    to_code2wav: ChunkAccumulator
    num_received: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    codes: list[Ints] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    num_decoded: int = 0
    samples: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def key(self) -> Any:
        return self.request.key


class SpeechLine:
    def __init__(self, talker: TalkerStage, code2wav: Code2WavStage | Token2WavStage, *, is_async: bool = True) -> None:
        self.talker, self.code2wav, self.is_async = talker, code2wav, is_async
        self.free = list(range(talker.kv.num_blocks))
        self.calls: list[SpeechCall] = []

    def open(self, name: str, answer: Answer) -> SpeechCall:
        request = StageRequest(
            RequestId(name), 0, MemberId("router"), "", 1, (0.0, name), None, answer.prompt, dict(answer.options)
        )
        first = ChunkAccumulator(request, self.is_async, {})
        inbox = []
        for output in answer.outputs:
            payload = thinker_to_talker(first, output)
            if payload is not None:
                inbox.append((payload, output.is_finished))
        call = SpeechCall(request, inbox, ChunkAccumulator(request, self.is_async, {}))
        self.talker.open(request)
        self.code2wav.open(request)
        self.calls.append(call)
        return call

    def receive(self, call: SpeechCall) -> bool:
        """Hands the next chunk of the thinker over, and returns whether there was one."""
        if call.num_received == len(call.inbox):
            return False
        payload, is_last = call.inbox[call.num_received]
        self.talker.receive(StageChunk(call.key, call.num_received, is_last, payload))
        call.num_received += 1
        return True

    def step(self, calls: Sequence[SpeechCall], most: int = 10**6) -> bool:
        """Computes at most `most` rows of each of these requests, and returns whether there were any."""
        spans, size = [], self.talker.kv.block_size
        for call in calls:
            if self.talker.is_complete(call.key):
                continue
            count = min(self.talker.num_units_ready(call.key) - call.num_computed, most)
            if count <= 0:
                continue
            while len(call.blocks) * size < call.num_computed + count:
                call.blocks.append(self.free.pop())
            spans.append((call, StageSpan(call.key, call.num_computed, count, np.array(call.blocks, dtype=np.int64))))
        if not spans:
            return False
        outputs = self.talker.execute([span for _, span in spans])
        for call, span in spans:
            call.num_computed += span.num_units
            if span.key in outputs:
                self._made(call, outputs[span.key])
        return True

    def preempt(self, call: SpeechCall) -> None:
        self.free += call.blocks
        call.blocks, call.num_computed = [], 0

    def decode(self, calls: Sequence[SpeechCall], most: int = 10**6) -> bool:
        """Computes at most `most` frames of each of these requests at code2wav."""
        spans = []
        for call in calls:
            count = min(self.code2wav.num_units_ready(call.key) - call.num_decoded, most)
            if count > 0:
                spans.append((call, StageSpan(call.key, call.num_decoded, count, NO_BLOCKS)))
        outputs = self.code2wav.execute([span for _, span in spans]) if spans else {}
        for call, span in spans:
            values: Any = outputs[span.key].values
            assert values["first_sample"] == sum(map(len, call.samples))
            call.samples.append(values["samples"])
            call.num_decoded += span.num_units
        return bool(spans)

    def finish(self) -> None:
        """Ends all requests in the plainest order."""
        for call in self.calls:
            while self.receive(call):
                pass
        while self.step(self.calls):
            pass
        while self.decode(self.calls):
            pass
        for call in self.calls:
            assert self.talker.is_complete(call.key)
            assert self.code2wav.is_complete(call.key)
        self.close()
        assert sorted(self.free) == list(range(self.talker.kv.num_blocks))
        assert self.talker.num_states == self.code2wav.num_states == 0

    def close(self) -> None:
        """Closes all requests that are open."""
        for call in self.calls:
            self.talker.close(call.key)
            self.code2wav.close(call.key)
            self.preempt(call)
        self.calls = []

    def _made(self, call: SpeechCall, output: StageOutput) -> None:
        values: Any = output.values
        assert values["first_frame"] == sum(map(len, call.codes))
        assert output.num_outputs == len(values["codes"])
        call.codes.append(values["codes"])
        payload = talker_to_code2wav(call.to_code2wav, output)
        if payload is not None:
            found: Any = payload.get("codes", ())
            call.chunk_sizes.append(len(found))
            number = call.to_code2wav.num_chunks
            self.code2wav.receive(StageChunk(call.key, number, output.is_finished, payload))
            call.to_code2wav.num_chunks += 1
