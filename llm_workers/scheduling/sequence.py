"""Describes one choice of one attempt as a `Sequence`, and turns a request into the sequences that serve it.

A `Sequence` holds the tokens of its choice, how far they are computed, and the blocks that hold the result. Prompt,
generated and migrated tokens are one array; there is no prefill phase and no decode phase. Adding one token never costs
time in proportion to the context. Everything that a sequence is made of stands here, because `prepare` builds it in one
go: the `PromptLayout` says where media stand in the prompt, `finish_reason` says when the choice ends, and the
`Stopwatch` measures its times.

`prepare` refuses a request that can never run before it takes anything. It does all work that costs time in proportion
to the prompt (arrays of its tokens, hashes of its blocks), so that it can run outside of the engine's thread: it
neither reads nor changes what the engine owns.

This module knows the limits of one worker, but nothing of the state of the block pool or of the references to features:
`SequenceResources` assigns blocks and claims units, and takes both away. It reads no clock: every moment is passed in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric.contracts import (
    POOLINGS,
    AttemptId,
    BlockHash,
    ContextLengthExceeded,
    FeatureMismatch,
    GenerateRequest,
    InvalidRequest,
    MediaItem,
    PlaceholderRange,
    ProtocolError,
    SequenceId,
    StopConditions,
    UnitKey,
    block_hashes,
)
from kv_index import keys_of_blocks
from llm_workers.scheduling.prompt_reader import PromptReader, PromptRows
from llm_workers.scheduling.scheduler_events import SequenceOutputs, SequenceTimes
from llm_workers.scheduling.step_plan import NO_BLOCK, GrowingArray, Guide, Splice, TokenCounts
from llm_workers.worker_config import WorkerConfig
from modalities.family import Positions

# ---------------------------------------------------------------- a sequence

AgeKey = tuple[float, str, int, int]
"""Defines a total order over all sequences: (wall time of admission, request id, attempt, choice)."""
Rank = tuple[int, float, str, int, int]
"""Holds the priority (the lowest number comes first), then the age. It orders which sequence is served first; the last
one gives up blocks first."""


class Sequence:
    """Holds the state of one sequence. Tokens `[0, num_computed)` have their KV in `table`; `hashes` names the full
    blocks in order, as far as they are known; the first `num_published` of them are findable."""

    def __init__(
        self,
        sequence_id: SequenceId,
        request: GenerateRequest,
        prompt: npt.NDArray[np.int64],
        layout: PromptLayout,
        positions: Positions,
        max_total_tokens: int,
        stopwatch: Stopwatch,
        guide: Guide | None = None,
    ) -> None:
        """Creates a sequence. `prompt` holds the request's tokens, `(num_prompt,)`. `guide` belongs to this sequence
        alone and is at the grammar's beginning; the constructor advances it past the emitted tokens."""
        self.sequence_id = sequence_id
        self.layout = layout
        self.sampling = request.sampling
        self.stop = request.stop
        self.priority = request.priority
        self.tenant = request.cache_salt
        """Tenants are told apart by their cache salt: requests that share no cache are served in turn."""
        self.side_names = frozenset(request.side_names)
        self.age: AgeKey = (*request.age, request.attempt, sequence_id.choice)
        self.rank: Rank = (request.priority, *self.age)
        self.max_total_tokens = max_total_tokens
        self.stopwatch = stopwatch
        self.num_prompt = len(prompt)
        emitted = request.emitted[sequence_id.choice] if request.emitted else ()
        self.tokens = GrowingArray(prompt)
        self.tokens.extend(emitted)
        self.counts = self._counts() if request.sampling.has_penalties else None
        self.guide = guide
        if guide is not None:
            guide.advance(emitted)
        wanted = request.prompt_outputs
        self.reader = None if wanted.is_empty else PromptReader(wanted, prompt)
        """Collects what the request wants of its prompt, until the prompt is computed; None if nothing is left to
        collect."""
        self._positions = positions
        self.table = GrowingArray(spare=16)
        self.hashes: list[BlockHash] = []
        self.num_computed = 0
        self.num_covered = 0
        """Counts, while the sequence has not begun, the tokens that were findable in the prefix cache when units were
        last claimed for it. The sequence holds none of their blocks."""
        self.num_published = 0
        self.is_private = False
        """Says that the sequence publishes no more blocks, because a block of its chain is findable without the side
        tensors and in use."""
        self.num_cached = 0
        """Counts the prompt tokens that were found in the prefix cache before the first step."""
        self.is_started = False
        """Says that the sequence had a chunk since it was added or preempted. Until then it holds no blocks."""
        self.is_forked = False
        """Says that the sequence took over its prompt from a sibling that had computed it."""
        self.may_share_tail = False
        """Says that the sequence gave or took over the block that its prompt ends in, and has not written after the
        prompt since."""
        self.is_at_doorstep = False
        self.copied_from = NO_BLOCK
        """Holds, until the step in flight has ended, the shared block whose content the step copies into the
        sequence's own block; otherwise it is `NO_BLOCK`."""

    @property
    def num_axes(self) -> int:
        """Counts the axes of the sequence's positions."""
        return int(self._positions.ids.shape[0])

    @property
    def position_delta(self) -> int:
        """Returns how far the position of a generated token is ahead of its index, on every axis."""
        return self._positions.delta

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def has_media(self) -> bool:
        """Returns whether the prompt contains media."""
        return bool(self.layout.unit_to_tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_generating(self) -> bool:
        """Returns whether the sequence draws tokens after its prompt. Otherwise it ends when its prompt is computed."""
        return self.stop.max_tokens > 0

    @property
    def claims_from(self) -> int:
        """Returns the position after which the sequence claims units: it claims those whose last run ends later."""
        return self.num_computed if self.is_started else self.num_covered

    @property
    def is_decoding(self) -> bool:
        """Returns whether only the token that was drawn last is not computed yet, and the sequence is not one that
        begins again."""
        num_tokens = len(self.tokens)
        return self.is_started and self.num_computed == num_tokens - 1 and num_tokens > self.num_prompt

    @property
    def num_barred(self) -> int:
        """Returns how many of the next draws must not end the sequence (as in vLLM). With a grammar the answer is 0,
        because the grammar decides: at its end no other token may come."""
        return 0 if self.guide is not None else max(0, self.stop.min_tokens - self.num_generated)

    @property
    def barred(self) -> tuple[int, ...]:
        """Returns the ids that must not be drawn yet."""
        return ending_ids(self.stop) if self.num_barred else ()

    @property
    def num_open(self) -> int:
        """Returns how many tokens may still be drawn at most."""
        return min(self.stop.max_tokens - self.num_generated, self.max_total_tokens - self.num_tokens)

    def take(self, token_ids: SequenceOf[int]) -> tuple[int, str | None]:
        """Adds drawn tokens up to one that ends the sequence. Returns how many it added, and the finish reason if there
        is one."""
        for index, token_id in enumerate(token_ids):
            self.tokens.append(token_id)
            if self.counts is not None:
                self.counts.add(token_id)
            if self.guide is not None:
                self.guide.advance((token_id,))
            if reason := self.finish_reason():
                return index + 1, reason
        return len(token_ids), None

    def take_reading(self, end: int, rows: PromptRows | None) -> list[SequenceOutputs]:
        """Collects what was read of a computed chunk that ends at `end`; `rows` is None if nothing was. Returns the
        outputs of the prompt, and drops the reader, when the prompt is complete."""
        reader = self.reader
        if reader is None:
            return []
        reader.take(end, rows)
        if not reader.is_complete:
            return []
        self.reader = None
        return [SequenceOutputs(self.sequence_id, reader.embedding(), reader.logprobs())]

    def finish_reason(self) -> str | None:
        """Returns the finish reason of the sequence in its present state; None while it may go on, or if nothing was
        generated yet."""
        if not self.num_generated:
            return None
        is_full = self.num_tokens >= self.max_total_tokens
        return finish_reason(self.stop, self.tokens[self.num_tokens - 1], self.num_generated, is_full)

    def _counts(self) -> TokenCounts:
        return TokenCounts(self.tokens.view(0, self.num_prompt), self.tokens.view(self.num_prompt))

    def positions(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Returns positions with shape `(num_axes, end - start)`: the prompt's as given, and index + delta on every
        axis after the prompt."""
        ids = self._positions.ids
        if end <= self.num_prompt:
            return ids[:, start:end]
        behind = np.arange(max(start, self.num_prompt), end, dtype=np.int64) + self._positions.delta
        generated = np.empty((ids.shape[0], len(behind)), dtype=np.int64)
        generated[:] = behind
        return generated if start >= self.num_prompt else np.concatenate([ids[:, start:], generated], axis=1)

    def extend_hashes(self, num_blocks: int, block_size: int) -> None:
        """Makes `hashes` name the first `num_blocks` blocks, all of which must be full; each hash is computed once."""
        first = len(self.hashes)
        if first >= num_blocks:
            return
        content = self.tokens.view(first * block_size, num_blocks * block_size).astype("<i4").tobytes()
        keys = self.layout.block_keys(first, num_blocks, block_size)
        self.hashes += block_hashes(self.hashes[-1] if self.hashes else None, content, 4 * block_size, keys)


def ending_ids(stop: StopConditions) -> tuple[int, ...]:
    """Returns the ids that end a choice."""
    return stop.stop_token_ids if stop.ignore_eos else (*stop.eos_token_ids, *stop.stop_token_ids)


def finish_reason(stop: StopConditions, token_id: int, num_generated: int, is_context_full: bool) -> str | None:
    """Returns the finish reason after `token_id` was drawn as generated token number `num_generated` (counted from 1),
    or None while the choice goes on. Below `min_tokens` no id ends the choice; the counts always do. Ids and counts
    alone decide: the router, which has the text, handles stop strings."""
    if num_generated >= stop.min_tokens:
        if token_id in stop.eos_token_ids and not stop.ignore_eos:
            return "stop"
        if token_id in stop.stop_token_ids:
            return "stop"
    if num_generated >= stop.max_tokens or is_context_full:
        return "length"
    return None


MAX_HELD_SPANS = 32
"""Limits the stays at a doorstep that a stopwatch keeps one by one; further stays only add to their sum."""


class Stopwatch:
    """Adds up how long one sequence waited, was computed, and was at its doorstep (waiting for the feature of its next
    token). Moments are seconds of one clock that never goes back."""

    def __init__(self, added_at_s: float) -> None:
        self._added_at_s = added_at_s
        self._queue_s: float | None = None
        self._first_token_s = 0.0
        self._prefill_s = 0.0
        self._held_s = 0.0
        self._held_since_s: float | None = None
        self._held_spans: list[tuple[float, float]] = []

    @property
    def has_begun(self) -> bool:
        return self._queue_s is not None

    def begin(self, now_s: float) -> None:
        """Notes that the first chunk was planned. A stay at the doorstep before that is not part of the queue."""
        self._queue_s = now_s - self._added_at_s - self._held_until(now_s)

    def add_prefill(self, seconds: float) -> None:
        self._prefill_s += seconds

    def first_token(self, now_s: float) -> None:
        """Notes the moment of the first token; later calls change nothing."""
        self._first_token_s = self._first_token_s or now_s - self._added_at_s

    def hold(self, is_held: bool, now_s: float) -> None:
        """Sets whether the sequence is at its doorstep from now on."""
        self._held_s = self._held_until(now_s)
        if self._held_since_s is not None and len(self._held_spans) < MAX_HELD_SPANS:
            self._held_spans.append((self._held_since_s, now_s))
        self._held_since_s = now_s if is_held else None

    def times(self, now_s: float) -> SequenceTimes:
        total_s, held_s = now_s - self._added_at_s, self._held_until(now_s)
        queue_s = total_s - held_s if self._queue_s is None else self._queue_s
        spans = self._held_spans
        if self._held_since_s is not None and len(spans) < MAX_HELD_SPANS:
            spans = [*spans, (self._held_since_s, now_s)]
        return SequenceTimes(queue_s, self._prefill_s, held_s, self._first_token_s, total_s, tuple(spans))

    def _held_until(self, now_s: float) -> float:
        """Returns the sum of the stays at the doorstep, with the present one until now."""
        return self._held_s + (now_s - self._held_since_s if self._held_since_s is not None else 0.0)


# ---------------------------------------------------------------- where media stand in a prompt


class PromptLayout:
    """Holds the runs of placeholder tokens of one prompt, the units (separate parts of a medium's features) whose rows
    replace them, and so which units must have landed. All choices of a request share one layout. It has no state:
    `FeatureReferences` knows which units can be read.

    The constructor raises ProtocolError for placeholders that contradict the prompt or its media, and FeatureMismatch
    if the request promises two sizes for one unit."""

    def __init__(self, request: GenerateRequest) -> None:
        self._runs = request.placeholders
        self._media = request.media
        self._cache_salt, self._adapter = request.cache_salt, request.adapter
        _check_runs(self._runs, self._media, len(request.token_ids))
        self._run_ends = [run.end for run in self._runs]
        self._run_units = [UnitKey(self._media[run.item].mm_hash, run.unit) for run in self._runs]
        self.unit_to_tokens = _unit_tokens(self._media, self._run_units)
        spans: dict[UnitKey, UnitSpan] = {}
        for run, unit in zip(self._runs, self._run_units, strict=True):
            spans[unit] = UnitSpan(unit, run.end)
        self._unit_to_runs: dict[UnitKey, list[PlaceholderRange]] = {}
        for run, unit in zip(self._runs, self._run_units, strict=True):
            self._unit_to_runs.setdefault(unit, []).append(run)
        self._spans = tuple(spans.values())
        self._spans_by_end = sorted(self._spans, key=lambda span: span.end)
        self._span_ends = [span.end for span in self._spans_by_end]

    def units_after(self, position: int) -> list[UnitKey]:
        """Returns the units with a run that ends after `position`, in the order in which the prompt reaches them."""
        return [span.unit for span in self._spans if span.end > position]

    def next_read(self, unit: UnitKey, position: int) -> int:
        """Returns the index at which the unit's first run that ends after `position` begins; there must be one."""
        runs = self._unit_to_runs[unit]
        return runs[bisect_right(runs, position, key=lambda run: run.end)].offset

    def units_completed(self, start: int, end: int) -> list[UnitKey]:
        """Returns the units whose last run ends in `(start, end]`."""
        first = bisect_right(self._span_ends, start)
        return [span.unit for span in self._spans_by_end[first : bisect_right(self._span_ends, end)]]

    def runs_between(self, start: int, end: int) -> list[tuple[PlaceholderRange, UnitKey]]:
        """Returns the runs that overlap `[start, end)`, in order, each with its unit."""
        found = []
        for index in range(bisect_right(self._run_ends, start), len(self._runs)):
            if self._runs[index].offset >= end:
                break
            found.append((self._runs[index], self._run_units[index]))
        return found

    def splices(self, start: int, end: int) -> tuple[Splice, ...]:
        """Returns the rows to splice into a chunk `[start, end)`."""
        splices = []
        for run, unit in self.runs_between(start, end):
            first, last = max(start, run.offset), min(end, run.end)
            splices.append(Splice(first - start, last - first, unit, run.row + first - run.offset))
        return tuple(splices)

    def block_keys(self, first: int, last: int, block_size: int) -> dict[int, list[bytes]]:
        """Returns the extra keys of the hashes of blocks `[first, last)`, for those blocks that have any, by the
        block's index counted from `first`. Looks only at the runs near these blocks."""
        begin = bisect_right(self._run_ends, first * block_size)
        if begin == len(self._runs) and first:
            return {}  # All runs end before these blocks; this holds for all blocks of generated tokens.
        end = bisect_left(self._runs, last * block_size, lo=begin, key=lambda run: run.offset)
        runs = self._runs[begin:end]
        return keys_of_blocks(first, last, block_size, runs, self._media, self._cache_salt, self._adapter)


class UnitSpan(NamedTuple):
    """A `UnitSpan` is a unit and the end of its last run, over all occurrences in the prompt."""

    unit: UnitKey
    end: int


def _check_runs(runs: tuple[PlaceholderRange, ...], media: tuple[MediaItem, ...], num_tokens: int) -> None:
    end = 0
    for run in runs:
        if run.offset < end or run.length < 1 or run.end > num_tokens:
            raise ProtocolError(
                f"placeholders [{run.offset}, {run.end}) are empty, overlap others, or exceed the prompt of "
                f"{num_tokens} tokens"
            )
        if not 0 <= run.item < len(media) or media[run.item].index != run.item:
            raise ProtocolError(
                f"placeholders [{run.offset}, {run.end}) name media item {run.item}, which the request does not have"
            )
        units = media[run.item].unit_tokens
        if not 0 <= run.unit < len(units) or run.row < 0 or run.row + run.length > units[run.unit]:
            raise ProtocolError(
                f"placeholders [{run.offset}, {run.end}) take rows that media item {run.item} does not have"
            )
        end = run.end


def _unit_tokens(media: tuple[MediaItem, ...], units: list[UnitKey]) -> dict[UnitKey, int]:
    """Returns the promised number of rows of every unit that the prompt uses. Raises FeatureMismatch if one unit is
    promised with two sizes."""
    promised: dict[UnitKey, int] = {}
    for item in media:
        for unit, num_tokens in zip(item.unit_keys(), item.unit_tokens, strict=True):
            if promised.setdefault(unit, num_tokens) != num_tokens:
                message = f"one medium was planned with {promised[unit]} tokens and with {num_tokens} tokens"
                raise FeatureMismatch(message, param=item.part)
    return {unit: promised[unit] for unit in units}


# ---------------------------------------------------------------- the arrival of a request


class Arrival(NamedTuple):
    """An `Arrival` is a request that can run and that the scheduler has not added yet."""

    attempt_id: AttemptId
    layout: PromptLayout
    sequences: tuple[Sequence, ...]
    """Holds one sequence per choice."""


def prepare(
    request: GenerateRequest,
    positions: Positions,
    config: WorkerConfig,
    max_model_len: int,
    arrived_at_s: float,
    guide: Guide | None = None,
) -> Arrival:
    """Returns the request's sequences. Each choice gets a fork of `guide` and, if the prefix cache is on, the hashes
    of the prompt's full blocks. Raises ContextLengthExceeded (the request exceeds the model's context or the KV pool),
    InvalidRequest, ProtocolError or FeatureMismatch."""
    _check_numbers(request, positions)
    _check_lengths(request, config, max_model_len)
    if unknown := set(request.side_names) - {name for name, _ in config.side_layers}:
        raise ProtocolError(f"this worker does not store the side tensors {', '.join(sorted(unknown))}")
    layout = PromptLayout(request)
    limit = max_total_tokens(config, max_model_len)
    prompt = np.array(request.token_ids, dtype=np.int64)
    sequences = tuple(
        Sequence(
            SequenceId(request.request_id, request.attempt, choice),
            request,
            prompt,
            layout,
            positions,
            limit,
            Stopwatch(arrived_at_s),
            None if guide is None else guide.fork(),
        )
        for choice in range(request.num_choices)
    )
    if config.is_prefix_cache_enabled:
        sequences[0].extend_hashes(len(prompt) // config.block_size, config.block_size)
        for sequence in sequences[1:]:
            sequence.hashes = sequences[0].hashes.copy()
    return Arrival(AttemptId(request.request_id, request.attempt), layout, sequences)


def max_total_tokens(config: WorkerConfig, max_model_len: int) -> int:
    """Returns the length of the longest possible sequence, prompt and output together. The last token is drawn and
    never computed, so it needs no block."""
    return min(max_model_len, config.num_blocks * config.block_size + 1)


def _check_numbers(request: GenerateRequest, positions: Positions) -> None:
    if not request.token_ids:
        raise InvalidRequest("the prompt is empty")
    if request.num_choices < 1:
        raise InvalidRequest(f"n must be at least 1, not {request.num_choices}", param="n")
    _check_outputs(request)
    if request.emitted and len(request.emitted) != request.num_choices:
        raise ProtocolError(
            f"the request has {request.num_choices} choices, but tokens of {len(request.emitted)} choices"
        )
    if positions.ids.ndim != 2 or positions.ids.shape[1] != len(request.token_ids):
        raise ProtocolError(
            f"the positions have shape {positions.ids.shape}, but the prompt has {len(request.token_ids)} tokens"
        )


def _check_outputs(request: GenerateRequest) -> None:
    """Raises InvalidRequest if the request would give nothing, or combines what can't be combined."""
    wanted, max_tokens = request.prompt_outputs, request.stop.max_tokens
    if wanted.pooling not in POOLINGS:
        raise InvalidRequest(f"the pooling must be `last` or `mean`, not {wanted.pooling!r}", param="pooling")
    if wanted.num_top_logprobs is not None and wanted.num_top_logprobs < 0:
        raise InvalidRequest(
            f"prompt_logprobs must be at least 0, not {wanted.num_top_logprobs}", param="prompt_logprobs"
        )
    least = 1 if wanted.is_empty else 0
    if max_tokens < least:
        raise InvalidRequest(f"max_tokens must be at least {least}, not {max_tokens}", param="max_tokens")
    if wanted.pooling and max_tokens:
        raise InvalidRequest(f"max_tokens must be 0 if an embedding is wanted, not {max_tokens}", param="max_tokens")
    if max_tokens == 0 and request.num_choices > 1:
        raise InvalidRequest(f"n must be 1 if nothing is generated, not {request.num_choices}", param="n")
    if max_tokens == 0 and any(request.emitted):
        raise ProtocolError("the request generates nothing, but has tokens of a former attempt")


def _check_lengths(request: GenerateRequest, config: WorkerConfig, max_model_len: int) -> None:
    """Raises ContextLengthExceeded for a prompt that can't be computed, or not be answered with at least one token."""
    num_tokens, capacity = len(request.token_ids), config.num_blocks * config.block_size
    is_answered = request.stop.max_tokens > 0
    if num_tokens + is_answered > max_model_len:
        needed = ", and the answer needs at least one" if is_answered else ""
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, but the context of the model has {max_model_len}{needed}",
            param="messages",
        )
    if num_tokens > capacity:
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, but a worker has room for {capacity}", param="messages"
        )
