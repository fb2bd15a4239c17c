"""Provides fake workers and encoders for tests of the router, on a real local plane and without a model.

A fake worker answers with a fixed function of (prompt, seed, choice), token by token. It waits for the features that it
lacks, keeps a prefix cache and obeys aborts. A test can make it pause, lose frames or die. A fake encoder announces
the units of its requests. This module knows nothing of the router.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fabric.contracts import (
    WEFT_KV,
    AbortAttempt,
    ArenaStats,
    AttemptId,
    BlockHash,
    BlocksStored,
    ChoiceResult,
    DeviceStats,
    EncodeRequest,
    EncodeResult,
    EncoderReport,
    EngineStats,
    ErrorInfo,
    FeatureNeeded,
    FeatureStats,
    FeatureTicket,
    GenerateRequest,
    GenerateResult,
    ItemResult,
    ItemStats,
    KvEvents,
    KvScheme,
    KvSnapshot,
    MediaItem,
    Member,
    MemberId,
    PlaneMessage,
    PromptLogprobs,
    RouterHeartbeat,
    SnapshotRequest,
    StageTimes,
    SystemClock,
    TokenFrame,
    TokenFrames,
    TokenLogprobs,
    TraceEvent,
    UnitKey,
    UnitReady,
    WeftError,
    WorkerReport,
    split_hashes,
)
from fabric.transport import LocalHub, LocalPlane
from kv_index import prompt_block_hashes
from modalities.text import TextCodec

BLOCK_SIZE = 16
SCHEME = KvScheme(WEFT_KV, BLOCK_SIZE)


def reply_text(token_ids: Sequence[int], seed: int, choice: int) -> str:
    """Returns the answer of every fake worker. It contains multi-byte characters."""
    digest = hashlib.sha256(repr((tuple(token_ids), seed, choice)).encode()).hexdigest()[:8]
    return f"choice {choice} of {len(token_ids)} tokens: {digest} – grüß dich 🙂 ok"


def reply_outputs(request: GenerateRequest) -> tuple[bytes, PromptLogprobs | None]:
    """Returns what every fake worker gives of a prompt besides tokens: an embedding of 8 numbers (empty without a
    pooling), and log-probabilities if they are wanted."""
    wanted, embedding = request.prompt_outputs, b""
    if wanted.pooling:
        digest = hashlib.sha256(repr((request.token_ids, wanted.pooling)).encode()).digest()
        vector = np.frombuffer(digest[:8], np.uint8).astype("<f4") - 100
        embedding = (vector / np.linalg.norm(vector) if wanted.is_normalised else vector).astype("<f4").tobytes()
    if wanted.num_top_logprobs is None:
        return embedding, None
    targets = np.array(request.token_ids[1:], dtype="<i4")
    top = np.broadcast_to(np.arange(wanted.num_top_logprobs, dtype="<i4"), (len(targets), wanted.num_top_logprobs))
    token_ids = np.concatenate([targets[:, None], top], axis=1)
    logprobs = -np.concatenate([targets[:, None] / 64, top + 0.5], axis=1).astype("<f4")
    return embedding, PromptLogprobs(top.shape[1], token_ids.tobytes(), logprobs.tobytes(), (targets + 1).tobytes())


@dataclass
class WorkerScript:
    """Holds a test's instructions for a fake worker. Tokens are counted per attempt."""

    die_at: int | None = None
    """The worker raises `error` (an error like WorkerLost) after this many tokens."""
    error: WeftError | None = None
    pause_at: int | None = None
    """The worker waits for `resume` before this token."""
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    frames: Callable[[list[TokenFrame]], list[TokenFrame]] = lambda frames: frames
    """Returns the frames that the worker sends instead. It may lose, repeat or delay frames."""
    reply: str | None = None
    """The worker answers with this text instead of the fixed function; names of special tokens become these tokens."""
    forgets_prefix: bool = False
    """The worker admits requests without the cached blocks that the router may expect."""


class FakeWorker:
    """A `FakeWorker` is a member. One `generate` call is one task, and its steps yield to the event loop."""

    def __init__(self, hub: LocalHub, name: str, codec: TextCodec) -> None:
        self.member_id = MemberId(name)
        self.plane = LocalPlane(hub, f"local://{name}")
        self.script = WorkerScript()
        self.requests: list[GenerateRequest] = []
        self.aborted: list[AbortAttempt] = []
        self.heartbeats: list[RouterHeartbeat] = []
        self.snapshot_requests = 0
        self.num_open = 0
        self.num_cancelled = 0
        self._codec = codec
        self._blocks: set[BlockHash] = set()
        self._chain: list[BlockHash] = []
        self._kv_seq = 0
        self._units: set[tuple[AttemptId, UnitKey]] = set()
        self._news = asyncio.Event()

    @property
    def member(self) -> Member:
        return Member(self.member_id, "worker", self.plane.address, "host-0", 1, kv_scheme=SCHEME)

    def handle(self, message: PlaneMessage) -> None:
        match message:
            case AbortAttempt():
                self.aborted.append(message)
            case UnitReady(request_id=request_id, attempt=attempt, unit=unit):
                self._units.add((AttemptId(request_id, attempt), unit))
            case RouterHeartbeat():
                self.heartbeats.append(message)
            case SnapshotRequest(address=address):
                self.snapshot_requests += 1
                chains = (BlocksStored(None, b"".join(self._chain)),) if self._chain else ()
                self.plane.send(address, KvSnapshot(self.member_id, 1, self._kv_seq - 1, chains))
        self._news.set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        self.num_open += 1
        try:
            return await self._generate(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        num_cached = self._admit(request)
        await self._features(request, num_cached)
        replies = [self._reply(request, choice) for choice in range(request.num_choices)]
        emitted = request.emitted or ((),) * request.num_choices
        at = [len(tokens) for tokens in emitted]
        reasons: list[str | None] = [None] * request.num_choices
        for step in range(max(len(ids) for ids, _ in replies) + 1):
            if step == self.script.pause_at:
                await self.script.resume.wait()
            if step == self.script.die_at and self.script.error is not None:
                raise self.script.error
            await asyncio.sleep(0)
            frames = []
            for choice, (ids, reason) in enumerate(replies):
                if self._is_aborted(request, choice):
                    reasons[choice] = reasons[choice] or "abort"
                if reasons[choice] is not None:
                    continue
                token_ids = tuple(ids[at[choice] : at[choice] + 1])
                is_last = at[choice] + len(token_ids) >= len(ids)
                reasons[choice] = reason if is_last else None
                wants_logprobs = request.sampling.num_top_logprobs is not None
                frame = TokenFrame(
                    request.request_id,
                    request.attempt,
                    choice,
                    at[choice],
                    token_ids,
                    reasons[choice],
                    tuple(TokenLogprobs(-0.5, ((token_id, -0.5),)) for token_id in token_ids) if wants_logprobs else (),
                )
                if request.stop.max_tokens:
                    frames.append(frame)
                at[choice] += len(token_ids)
            self._send_frames(request, frames)
            if all(reasons):
                break
        self._store(request)
        choices = tuple(ChoiceResult(choice, reasons[choice] or "abort", at[choice]) for choice in range(len(at)))
        trace = (TraceEvent(SystemClock().now(), self.member_id, "prefill", {"cached": num_cached}),)
        times = (0.001, 0.01, 0.0, 0.02)
        num_prompt, (embedding, logprobs) = len(request.token_ids), reply_outputs(request)
        return GenerateResult(self.member_id, choices, num_prompt, num_cached, *times, trace, None, embedding, logprobs)

    def _send_frames(self, request: GenerateRequest, frames: list[TokenFrame]) -> None:
        sent = self.script.frames(frames)
        if sent:
            self.plane.send(request.router_address, TokenFrames(self.member_id, tuple(sent)))

    def _reply(self, request: GenerateRequest, choice: int) -> tuple[list[int], str]:
        text = reply_text(request.token_ids, request.sampling.seed, choice)
        eos = self._codec.eos_token_ids[0]
        reply = self.script.reply
        ids = [*(self._codec.encode(text) if reply is None else self._with_specials(reply)), eos]
        if request.stop.ignore_eos:
            ids = (ids * (request.stop.max_tokens // len(ids) + 1))[: request.stop.max_tokens]
            return ids, "length"
        stops = {index for index, token_id in enumerate(ids) if token_id in (*request.stop.stop_token_ids, eos)}
        end = min(stops) + 1
        return (ids[: request.stop.max_tokens], "length") if end > request.stop.max_tokens else (ids[:end], "stop")

    def _with_specials(self, text: str) -> list[int]:
        names = [re.escape(str(self._codec.token_text(each))) for each in self._codec.special_token_ids]
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(names)})", text):
            special = self._codec.token_id(piece) if piece else None
            ids += self._codec.encode(piece) if special is None else [special]
        return ids

    def _is_aborted(self, request: GenerateRequest, choice: int) -> bool:
        mine = [
            each for each in self.aborted if (each.request_id, each.attempt) == (request.request_id, request.attempt)
        ]
        return any(not each.choices or choice in each.choices for each in mine)

    # ------------------------------------------------------------ caches

    def _hashes(self, request: GenerateRequest) -> list[BlockHash]:
        return split_hashes(
            prompt_block_hashes(
                SCHEME, request.token_ids, request.placeholders, request.media, request.cache_salt, request.adapter
            )
        )

    def _admit(self, request: GenerateRequest) -> int:
        if self.script.forgets_prefix:
            self._blocks.clear()
        num_blocks = 0
        for block in () if request.prompt_outputs.needs_all_positions else self._hashes(request):
            if block not in self._blocks:
                break
            num_blocks += 1
        return min(num_blocks * BLOCK_SIZE, len(request.token_ids) - 1)

    def _store(self, request: GenerateRequest) -> None:
        hashes = self._hashes(request)
        if not set(hashes) <= self._blocks:
            self._blocks |= set(hashes)
            events = (BlocksStored(None, b"".join(hashes)),)
            self.plane.send(request.router_address, KvEvents(self.member_id, 1, self._kv_seq, events))
            self._kv_seq += 1
            self._chain = hashes

    async def _features(self, request: GenerateRequest, num_cached: int) -> None:
        runs = [run for run in request.placeholders if run.end > num_cached]
        needed = {UnitKey(request.media[run.item].mm_hash, run.unit) for run in runs}
        coming = {unit for index in request.dispatched_items for unit in request.media[index].unit_keys()}
        if needed - coming:
            lacking = FeatureNeeded(
                self.member_id, request.request_id, request.attempt, tuple(sorted(needed - coming)), "not_covered"
            )
            self.plane.send(request.router_address, lacking)
        attempt = AttemptId(request.request_id, request.attempt)
        while not {(attempt, unit) for unit in needed} <= self._units:
            self._news.clear()
            await self._news.wait()

    def report(self, seq: int) -> WorkerReport:
        return WorkerReport(
            worker_id=self.member_id,
            epoch=1,
            seq=seq,
            acknowledged=(),
            engine=EngineStats(
                num_running=self.num_open,
                kv_blocks_used=7,
                kv_blocks_total=100,
                num_features=3,
                steps=11,
                tokens_generated=12,
                prompt_tokens_computed=13,
                prefix_hit_tokens=14,
                prefix_query_tokens=15,
            ),
            features=FeatureStats(inbox_bytes_used=4096, inbox_bytes_total=65536),
            prefill_s_per_token=1e-4,
            step_overhead_s=1e-3,
        )


class FakeEncoder:
    """A `FakeEncoder` is a member. Each call uses up one of `failures`: an exception is raised, and an ErrorInfo
    becomes the error of every item."""

    def __init__(self, hub: LocalHub, name: str) -> None:
        self.member_id = MemberId(name)
        self.plane = LocalPlane(hub, f"local://{name}")
        self.requests: list[EncodeRequest] = []
        self.media: list[bytes] = []
        self.aborted: list[AbortAttempt] = []
        self.failures: list[WeftError | ErrorInfo] = []
        self.fails: Callable[[MediaItem], ErrorInfo | None] = lambda item: None
        """Returns the error of an item, or None. It is called in every attempt."""
        self.modalities: tuple[str, ...] = ("image",)
        self.gate: asyncio.Event | None = None
        self.num_cancelled = 0

    @property
    def member(self) -> Member:
        return Member(self.member_id, "encoder", self.plane.address, "host-0", 1, self.modalities, str(self.member_id))

    def handle(self, message: PlaneMessage) -> None:
        if isinstance(message, AbortAttempt):
            self.aborted.append(message)

    async def encode(self, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        self.requests.append(request)
        self.media += media
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        await asyncio.sleep(0)
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, WeftError):
            raise failure
        item_to_error = {item.index: failure or self.fails(item) for item in request.items}
        for item in request.items:
            for unit in item.unit_keys() if item_to_error[item.index] is None else ():
                self._announce(request, unit)
        times = StageTimes(0.0, 0.001, 0.001, 0.002, 1, 4)
        items = tuple(ItemResult(item.index, times, item_to_error[item.index]) for item in request.items)
        return EncodeResult(self.member_id, items)

    def _announce(self, request: EncodeRequest, unit: UnitKey) -> None:
        ticket = FeatureTicket("fake", b"", 0, 0, 32, 1, (1, 1, 8), "float32", 60.0)
        ready = UnitReady(self.member_id, self.plane.address, request.request_id, request.attempt, unit, ticket)
        self.plane.send(request.destination.address, ready)

    def report(self, seq: int) -> EncoderReport:
        return EncoderReport(
            encoder_id=self.member_id,
            epoch=1,
            seq=seq,
            acknowledged=(),
            items=ItemStats(num_encoded=26, num_cache_hits=28),
            device=DeviceStats(num_batches=27),
            arena=ArenaStats(used_bytes=22, cached_bytes=23, total_bytes=24, num_leases=25),
            queued_cost=21,
            encode_s_per_cost=1e-5,
            batch_overhead_s=1e-3,
        )
