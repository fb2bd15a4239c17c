"""Implements the stage that turns the thinker's text into codec frames: `TalkerStage`, a `StageModel` of the kind `ar`.

A unit is one row of the talker's sequence (`talker_prompt`). The row that is the last of the prompt makes the first
frame, and each later row makes the next one: the talker draws the first code of the frame, and the code predictor the
others. A step takes rows of many requests at once: parts of prompts, and one row of each request that speaks.

The scheduler owns the KV blocks. A preempted request is computed again from its first row; the rows are made again of
ids, codes and hidden states that the stage keeps, and a frame that was made is not drawn again. Draws depend on the
request's seed, the frame and the group alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fabric.contracts import (
    EngineFailed,
    InvalidRequest,
    PlaceholderRange,
    ProtocolError,
    StageKey,
    StagePrompt,
    StageRequest,
)
from llm_workers.compute import PagedKV, SequenceRows, select_backend
from llm_workers.sampling import sample_tokens
from llm_workers.scheduling import NOT_FINITE_TOKEN
from llm_workers.speech.code_predictor import Choose
from llm_workers.speech.row_ids import Ints, RowBook
from llm_workers.speech.talker_network import RowInputs
from llm_workers.speech.talker_options import TalkerDefaults, TalkerOptions
from llm_workers.stages import Payload, StageChunk, StageOutput, StageSpan
from modalities.family import Family


class TalkerSettings(NamedTuple):
    """Holds what a talker reads from its checkpoint beside the weights."""

    new_rows: Callable[[StagePrompt, int], RowBook]
    """Makes the rows of a request of the thinker's prompt and the id of the voice. Raises InvalidRequest."""
    codec_ends: frozenset[int]
    """Holds the first codes that end the speech."""
    suppressed: Sequence[int]
    """Holds the first codes that are never drawn."""
    prompt_codes: frozenset[int]
    """Holds the ids of the codec to which the repetition penalty applies from the beginning."""
    defaults: TalkerDefaults
    family: Family
    """Computes the positions of prompts with media."""


class SpeechNetwork(Protocol):
    """A `SpeechNetwork` holds the weights of a talker. `talker_network` describes the calls."""

    device: torch.device
    dtype: torch.dtype
    num_layers: int
    kv_heads: tuple[int, int]
    num_groups: int
    """Counts the codes of a frame."""
    text_vocab_size: int
    thinker_width: int

    def rows(self, inputs: RowInputs) -> torch.Tensor: ...
    def forward(self, rows: torch.Tensor, positions: Ints, attention: Any, wanted: Ints) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def other_codes(self, hidden: torch.Tensor, first: torch.Tensor, choose: Choose) -> torch.Tensor: ...


class TalkerStage:
    """Implements `StageModel` over a `SpeechNetwork`. Only the engine's thread may call it."""

    def __init__(
        self, network: SpeechNetwork, settings: TalkerSettings, pool: tuple[int, int], attention: str = "auto"
    ) -> None:
        """Allocates the KV pages; `pool` is (num_blocks, block_size). `attention` names the backend. Raises ConfigError
        if that can't run."""
        self._network, self._settings = network, settings
        self.kv = PagedKV(network.num_layers, *pool, network.kv_heads, network.dtype, network.device)
        self._backend = select_backend(attention, self.kv)
        self._key_to_request: dict[StageKey, _SpokenRequest] = {}
        self._suppressed = torch.tensor(list(settings.suppressed), dtype=torch.int64, device=network.device)

    @property
    def voices(self) -> tuple[str, ...]:
        """Returns the names of the voices, in lower case."""
        return self._settings.defaults.voices

    @property
    def num_states(self) -> int:
        """Returns how many requests are open."""
        return len(self._key_to_request)

    def open(self, request: StageRequest) -> None:
        """Takes a request in. Raises InvalidRequest for an unknown voice, an option out of range, or a prompt that has
        no turn of the assistant, and ProtocolError if the call has no prompt or the key is open."""
        if request.key in self._key_to_request:
            raise ProtocolError(f"the request {request.key} is open already")
        prompt = request.prompt
        if prompt is None:
            raise ProtocolError(f"the call of {request.key} at the talker has no prompt")
        options = self._settings.defaults.options(request)
        rows = self._settings.new_rows(prompt, options.speaker)
        if prompt.token_ids and max(prompt.token_ids) >= self._network.text_vocab_size:
            raise InvalidRequest("the prompt has tokens that the talker does not know")
        positions = talker_positions(rows, request, self._settings.family)
        codes = np.empty((0, self._network.num_groups), dtype=np.int64)
        hidden = HiddenRows(self._network.thinker_width, self._network.dtype)
        penalised = set(self._settings.prompt_codes)
        self._key_to_request[request.key] = _SpokenRequest(options, rows, positions, codes, hidden, penalised)

    def receive(self, chunk: StageChunk) -> None:
        """Takes hidden states of the thinker (`prompt_hidden`, `prompt_hidden_at`), generated tokens (`token_ids`,
        `first_index`), or both. Raises ProtocolError if they do not continue the request."""
        request, payload = self._key_to_request[chunk.key], chunk.payload
        if "prompt_hidden" in payload:
            hidden = _hidden_rows(payload, self._network.thinker_width)
            request.rows.add_hidden(_integers(payload, "prompt_hidden_at"))
            request.hidden.append(hidden)
        token_ids = _integers(payload, "token_ids") if "token_ids" in payload else np.empty(0, dtype=np.int64)
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self._network.text_vocab_size:
            raise ProtocolError(f"{chunk.key} has tokens that the talker does not know")
        if "token_ids" in payload:
            first = payload.get("first_index")
            if not isinstance(first, int):
                raise ProtocolError(f"chunk {chunk.number} of {chunk.key} has no first_index")
            request.rows.add_text(token_ids.tolist(), first, is_last=chunk.is_last)
        elif chunk.is_last:
            request.rows.end_text()

    def num_units_ready(self, key: StageKey) -> int:
        request = self._key_to_request[key]
        return request.rows.num_ready(len(request.codes))

    def execute(self, spans: Sequence[StageSpan]) -> Mapping[StageKey, StageOutput]:
        """Computes rows. Returns for each request whose next frame was due its `codes`, int64 `(1, num_groups)`, and
        `first_frame`, or a finished output with no codes if the talker has ended the speech. Raises EngineFailed if the
        logits of a request are not finite."""
        network = self._network
        requests = [self._key_to_request[span.key] for span in spans]
        starts = np.cumsum([0, *(span.num_units for span in spans)])
        rows = [
            SequenceRows(int(at), span.start, span.num_units, span.block_ids)
            for at, span in zip(starts, spans, strict=False)
        ]
        positions = [
            request.positions_of(span.start, span.num_units) for request, span in zip(requests, spans, strict=True)
        ]
        # The rows that make a frame are finished. A step may have none; the layers then still need one row.
        due = [index for index, span in enumerate(spans) if requests[index].is_due(span)]
        wanted = starts[1:][due] - 1 if due else starts[1:2] - 1
        with torch.inference_mode():
            inputs = network.rows(_row_inputs(requests, spans, starts))
            step = self._backend(self.kv, rows)
            hidden = network.forward(inputs, np.concatenate(positions, axis=1), step, wanted)
            made = self._frames(hidden, [requests[index] for index in due]) if due else []
        return {spans[index].key: output for index, output in zip(due, made, strict=True)}

    def is_complete(self, key: StageKey) -> bool:
        return self._key_to_request[key].is_finished

    def close(self, key: StageKey) -> None:
        del self._key_to_request[key]

    def _frames(self, hidden: torch.Tensor, requests: Sequence[_SpokenRequest]) -> list[StageOutput]:
        """Draws the next frame of each request from its last hidden state, `(len(requests), hidden)`."""
        network, settings = self._network, self._settings
        logits = network.logits(hidden)
        _penalise(logits, requests)
        logits.index_fill_(1, self._suppressed, float("-inf"))
        first = sample_tokens(logits, [(each.options.first, 0, len(each.codes)) for each in requests])
        ids = first.cpu().numpy()
        if (ids == NOT_FINITE_TOKEN).any():
            raise EngineFailed("the talker's logits are not finite")
        is_spoken = ~np.isin(ids, list(settings.codec_ends)) & [not each.rows.is_silent for each in requests]
        speaking = np.flatnonzero(is_spoken)
        codes = np.empty((len(requests), network.num_groups), dtype=np.int64)
        if len(speaking):
            at = torch.from_numpy(speaking).to(network.device)
            chosen = first.index_select(0, at)
            draws = [(requests[row].options.residual, len(requests[row].codes)) for row in speaking.tolist()]

            def choose(logits: torch.Tensor, group: int) -> torch.Tensor:
                return sample_tokens(logits, [(params, group, frame) for params, frame in draws])

            rest = network.other_codes(hidden.index_select(0, at), chosen, choose)
            if bool((rest == NOT_FINITE_TOKEN).any()):
                raise EngineFailed("the talker's logits are not finite")
            codes[speaking] = torch.cat([chosen[:, None], rest], dim=1).cpu().numpy()
        return [
            request.add(codes[row : row + 1] if is_spoken[row] else codes[:0]) for row, request in enumerate(requests)
        ]


@dataclass(slots=True)
class _SpokenRequest:
    """Holds the state of one open request, except for its KV."""

    options: TalkerOptions
    rows: RowBook
    positions: Ints
    """Holds the positions of the rows of the prompt. Has shape `(3, num_prompt_rows)`."""
    codes: Ints
    """Holds the frames so far. Has shape `(num_frames, num_groups)`."""
    hidden: HiddenRows
    """Holds the thinker's hidden states that have come."""
    penalised: set[int]
    """Holds the first codes to which the repetition penalty applies."""
    is_finished: bool = False

    def positions_of(self, start: int, count: int) -> Ints:
        """Returns the positions of the rows `[start, start + count)`, `(3, count)`. The rows behind the prompt follow
        its largest position."""
        known = self.positions[:, start : start + count]
        index = np.arange(max(start, self.positions.shape[1]), start + count) - self.positions.shape[1]
        following = self.positions.max() + 1 + index
        return np.concatenate([known, np.broadcast_to(following, (3, len(following)))], axis=1)

    def is_due(self, span: StageSpan) -> bool:
        """Returns whether the last row of the span makes a frame that was not made before."""
        frame = span.start + span.num_units - self.rows.num_prompt_rows
        return frame == len(self.codes) and not self.is_finished

    def add(self, codes: Ints) -> StageOutput:
        """Adds the next frame, `(1, num_groups)`, or ends the speech if there is none, and returns the output."""
        first = len(self.codes)
        self.codes = np.concatenate([self.codes, codes])
        self.penalised.update(codes[:, 0].tolist())
        self.is_finished = not len(codes) or len(self.codes) >= self.options.max_frames
        return StageOutput({"codes": codes, "first_frame": first}, self.is_finished, len(codes))


class HiddenRows:
    """A `HiddenRows` holds rows of one request on the host, in the order in which they came. Appending copies nothing
    of what is there, except when the buffer is full and doubles: a long prompt has many megabytes of rows, and each
    chunk of the answer brings a few more."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._buffer, self._num_rows = torch.empty((0, width), dtype=dtype), 0

    def __len__(self) -> int:
        return self._num_rows

    def append(self, rows: torch.Tensor) -> None:
        """Appends rows `(n, width)`, rounded to the dtype of those here."""
        end = self._num_rows + len(rows)
        if end > len(self._buffer):
            grown = self._buffer.new_empty((max(end, 2 * len(self._buffer)), self._buffer.shape[1]))
            grown[: self._num_rows] = self._buffer[: self._num_rows]
            self._buffer = grown
        self._buffer[self._num_rows : end] = rows
        self._num_rows = end

    def take(self, indexes: Ints) -> torch.Tensor:
        """Returns the rows with these indexes, `(len(indexes), width)`."""
        return self._buffer[: self._num_rows].index_select(0, torch.from_numpy(indexes))


def talker_positions(rows: RowBook, request: StageRequest, family: Family) -> Ints:
    """Returns the positions of the rows of a talker's prompt, `(3, num_prompt_rows)`: those that the family gives a
    prompt of these rows, in which media keep their grids."""
    prompt = request.prompt
    assert prompt is not None
    count = rows.num_prompt_rows
    kept = frozenset(rows.user_at.tolist())
    runs = [
        PlaceholderRange(int(np.searchsorted(rows.user_at, run.offset)), run.length, run.item, run.unit, run.row)
        for run in prompt.placeholders
        if run.offset in kept
    ]
    if not runs:
        return np.broadcast_to(np.arange(count, dtype=np.int64), (3, count))
    return family.positions([0] * count, sorted(runs, key=lambda run: run.offset), prompt.media).ids


def _row_inputs(requests: Sequence[_SpokenRequest], spans: Sequence[StageSpan], starts: Ints) -> RowInputs:
    """Returns what the packed rows of a step are made of; the rows of span i begin at `starts[i]`."""
    texts, heads, hidden, hidden_rows, frames, frame_rows = [], [], [], [], [], []
    for request, span, at in zip(requests, spans, starts, strict=False):
        end, num_prompt = span.start + span.num_units, request.rows.num_prompt_rows
        parts = request.rows.parts(span.start, end)
        texts.append(parts.text_ids)
        heads.append(parts.codes)
        hidden.append(request.hidden.take(parts.hidden_indexes))
        hidden_rows.append(parts.hidden_rows + at)
        first = max(span.start, num_prompt)
        frames.append(request.codes[first - num_prompt : end - num_prompt] if first < end else request.codes[:0])
        frame_rows.append(np.arange(first, end, dtype=np.int64) - span.start + at)
    return RowInputs(
        np.concatenate(texts),
        np.concatenate(heads),
        torch.cat(hidden),
        np.concatenate(hidden_rows),
        np.concatenate(frames),
        np.concatenate(frame_rows),
    )


def _penalise(logits: torch.Tensor, requests: Sequence[_SpokenRequest]) -> None:
    """Applies the repetition penalty in place."""
    width = logits.shape[1]
    pairs = [
        (row * width + code, request.options.first.repetition_penalty)
        for row, request in enumerate(requests)
        if request.options.first.repetition_penalty != 1
        for code in request.penalised
    ]
    if not pairs:
        return
    at = torch.tensor([place for place, _ in pairs], device=logits.device)
    penalties = torch.tensor([penalty for _, penalty in pairs], dtype=logits.dtype, device=logits.device)
    values = logits.view(-1).index_select(0, at)
    logits.view(-1).index_copy_(0, at, torch.where(values < 0, values * penalties, values / penalties))


def _integers(payload: Payload, name: str) -> Ints:
    values = payload.get(name)
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        raise ProtocolError(f"{name} must be integers with one axis")
    return values.astype(np.int64)


def _hidden_rows(payload: Payload, width: int) -> torch.Tensor:
    """Returns the hidden rows `(n, width)` of a payload, which are float32, or bfloat16 as uint16."""
    values: Any = payload["prompt_hidden"]
    at: Any = payload.get("prompt_hidden_at")
    if not isinstance(values, np.ndarray) or values.ndim != 2 or values.shape[1] != width:
        raise ProtocolError(f"prompt_hidden must have rows of {width} values")
    if not isinstance(at, np.ndarray) or len(at) != len(values):
        raise ProtocolError("prompt_hidden_at must have one position for each row of prompt_hidden")
    copied: npt.NDArray[Any] = values.copy()
    if values.dtype == np.uint16:
        return torch.from_numpy(copied).view(torch.bfloat16)
    return torch.from_numpy(copied.astype(np.float32))
