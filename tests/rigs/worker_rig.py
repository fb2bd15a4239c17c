"""Runs a worker in this process with everything real except its peers: a router that records the messages it receives,
and an encoder that publishes features when the test asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import shutil
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chat_media import picture, png

from deploy.demo.build import build_demo_checkpoint
from fabric.contracts import (
    Clock,
    FeatureNeeded,
    GenerateRequest,
    GenerateResult,
    KvEvents,
    KvSnapshot,
    MediaItem,
    MemberId,
    PlaceholderRange,
    PlaneMessage,
    RequestId,
    RouterHeartbeat,
    SamplingParams,
    StopConditions,
    SystemClock,
    TokenFrames,
    UnitReady,
    UnitRelease,
    WorkerReport,
)
from fabric.transport import LocalChannelHub, LocalFeatureSink, LocalFeatureSource, LocalHub, LocalPlane
from llm_workers.compute import register_attention
from llm_workers.own_engine import OwnEngine
from llm_workers.stages import ChunkTransferAdapter
from llm_workers.worker_config import WorkerConfig
from llm_workers.worker_service import WorkerService
from modalities.family import EncoderInput
from modalities.media import plan_media
from modalities.registry import REGISTRY
from modalities.text import TextCodec
from modalities.torch_dtypes import dtype_name

WORKER, ROUTER, ENCODER = MemberId("worker-0"), MemberId("router-0"), MemberId("encoder-0")
GREEDY = SamplingParams(temperature=0.0)


class Loaded:
    """Holds the demo checkpoint in float32, with both halves and the reference."""

    def __init__(self) -> None:
        from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

        torch.manual_seed(0)
        # The checkpoint is untrained, because its answers are long and all different. Those of the trained one end
        # after a word or two.
        self.directory = build_demo_checkpoint(Path(tempfile.mkdtemp(prefix="weft-demo-")))
        self.family = REGISTRY.load_family(self.directory)
        self.codec = TextCodec.load(self.directory)
        self.plugin = REGISTRY.modality("image")
        self.model = self.family.load_language_model(self.directory, "cpu", "float32", register_attention())
        self.encoder = self.family.load_encoder(self.directory, "cpu", "float32", ("image",))
        reference = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(self.directory, dtype=torch.float32)
        self.reference = reference.eval()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.codec.eos_token_ids


@functools.cache
def loaded() -> Loaded:
    return Loaded()


def remove_folder() -> None:
    """Removes the checkpoint's folder at the end of the run (see `conftest.py`), because all tests use this one
    checkpoint."""
    if loaded.cache_info().currsize:
        shutil.rmtree(loaded().directory)


@dataclass(frozen=True, eq=False)
class Prompt:
    """Holds a prompt as the worker receives it, with the encoder inputs of its pictures."""

    token_ids: tuple[int, ...]
    placeholders: tuple[PlaceholderRange, ...]
    media: tuple[MediaItem, ...]
    inputs: tuple[EncoderInput, ...]


@functools.cache
def prompt(*parts: str | int, size: tuple[int, int] = (160, 96)) -> Prompt:
    """Builds a prompt of one user turn. `parts` holds strings, or seeds of pictures."""
    parts_of_model = loaded()
    content, media, plans, inputs = [], [], [], []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        content.append({"type": "image"})
        data = png(picture(part, *size))
        header = parts_of_model.plugin.probe(data, "part")
        item = plan_media(parts_of_model.family, data, header, len(media), f"part.{len(media)}").item
        media.append(item)
        plans.append(parts_of_model.family.plan(header))
        inputs.extend(parts_of_model.family.preprocess(data, item))
    ids = parts_of_model.codec.render([{"role": "user", "content": content}])
    expanded = parts_of_model.family.expand(ids, plans)
    return Prompt(tuple(expanded.token_ids), tuple(expanded.placeholders), tuple(media), tuple(inputs))


@functools.cache
def feature(of: Prompt, index: int) -> torch.Tensor:
    with torch.inference_mode():
        return loaded().encoder.encode([of.inputs[index]])[0]


@functools.cache
def reference(of: Prompt, num_tokens: int) -> tuple[list[int], list[float]]:
    """Returns the greedy tokens of transformers, and the difference between its two best logits at each token."""
    media = {}
    if of.inputs:
        media["pixel_values"] = torch.from_numpy(np.concatenate([unit.pixels for unit in of.inputs]))
        media["image_grid_thw"] = torch.tensor([unit.grid for unit in of.inputs])
    out = loaded().reference.generate(
        input_ids=torch.tensor([of.token_ids]),
        attention_mask=torch.ones(1, len(of.token_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **media,
    )
    best = [step[0].topk(2).values.tolist() for step in out.logits]
    return out.sequences[0, len(of.token_ids) :].tolist(), [first - second for first, second in best]


@dataclass
class Recorder:
    """Records, as a router's endpoint, the messages it receives, and the tokens in order per (request, attempt,
    choice)."""

    messages: list[Any] = field(default_factory=list)
    tokens: dict[tuple[str, int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    on_needed: object = None

    def __call__(self, message: PlaneMessage) -> None:
        self.messages.append(message)
        if isinstance(message, TokenFrames):
            for frame in message.frames:
                tokens = self.tokens[frame.request_id, frame.attempt, frame.choice]
                assert frame.first_index == len(tokens), "frames of one worker come in order"
                tokens.extend(frame.token_ids)
        if isinstance(message, FeatureNeeded) and self.on_needed is not None:
            self.on_needed(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def reports(self) -> list[WorkerReport]:
        return self.of(WorkerReport)

    @property
    def needed(self) -> list[FeatureNeeded]:
        return self.of(FeatureNeeded)


class Rig:
    """Holds a worker and its peers. `parts` has a family, its model and its end tokens."""

    def __init__(
        self,
        config: WorkerConfig,
        inbox_bytes: int,
        clock: Clock,
        parts: Loaded,
        sender: ChunkTransferAdapter | None = None,
    ) -> None:
        self._eos_token_ids = parts.eos_token_ids
        self.hub, self.channel = LocalHub(), LocalChannelHub()
        self.router, self.encoder = Recorder(), Recorder()
        self.router_plane = LocalPlane(self.hub, "local://router")
        self.encoder_plane = LocalPlane(self.hub, "local://encoder")
        self.worker_plane = LocalPlane(self.hub, "local://worker")
        self.source = LocalFeatureSource(self.channel, "encoder", 1 << 22)
        self.sink = LocalFeatureSink(self.channel, "worker", inbox_bytes)
        make_engine = functools.partial(OwnEngine, config, parts.family, parts.model, clock, sender=sender)
        self.service = WorkerService(WORKER, config, parts.family, make_engine, self.worker_plane, self.sink, clock)
        self._ids = itertools.count()
        self.slots = {}

    def request(self, of: Prompt, num_tokens: int = 8, **changes: Any) -> GenerateRequest:
        number = next(self._ids)
        fields = {
            "request_id": RequestId(f"req-{number}"),
            "attempt": 0,
            "router_id": ROUTER,
            "router_address": self.router_plane.address,
            "token_ids": of.token_ids,
            "placeholders": of.placeholders,
            "media": of.media,
            "sampling": GREEDY,
            "stop": StopConditions(num_tokens, eos_token_ids=self._eos_token_ids),
            "age": (float(number), f"req-{number}"),
            "dispatched_items": tuple(range(len(of.media))),
        }
        return GenerateRequest(**(fields | changes))

    def publish(
        self, request: GenerateRequest, of: Prompt, index: int, tensor: torch.Tensor | None = None, unit_index: int = 0
    ) -> None:
        """Announces a feature to the worker, as an encoder does: unit `unit_index` of media item `index`."""
        tensor = feature(of, index) if tensor is None else tensor
        payload = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        slot = self.source.allocate(payload.nbytes)
        slot.buffer[:] = payload
        ticket = self.source.ticket(slot, tuple(tensor.shape), dtype_name(tensor.dtype), 60.0)
        unit = of.media[index].unit_keys()[unit_index]
        self.slots[request.request_id, unit, slot.generation] = slot
        ready = UnitReady(ENCODER, self.encoder_plane.address, request.request_id, request.attempt, unit, ticket)
        assert self.encoder_plane.send(self.worker_plane.address, ready)

    async def run(
        self, request: GenerateRequest, of: Prompt, delays: Sequence[tuple[int, int]] | None = None
    ) -> GenerateResult:
        """Generates and publishes the features. `delays` holds (turns, index) pairs: feature `index` is published after
        that many further turns of the event loop. With None, all features are published at once."""
        call = asyncio.ensure_future(self.service.generate(request))
        order = delays or [(0, index) for index in range(len(of.media))]
        for turns, index in order:
            for _ in range(turns):
                await asyncio.sleep(0.001)
            self.publish(request, of, index)
        return await call

    def tokens(self, request: GenerateRequest, choice: int = 0) -> list[int]:
        return self.router.tokens[request.request_id, request.attempt, choice]

    @property
    def releases(self) -> list[UnitRelease]:
        return self.encoder.of(UnitRelease)

    @property
    def kv_messages(self) -> list[Any]:
        return self.router.of(KvEvents) + self.router.of(KvSnapshot)

    def heartbeat(self, lease_s: float = 30.0, router_id: MemberId = ROUTER) -> None:
        message = RouterHeartbeat(router_id, self.router_plane.address, lease_s)
        self.router_plane.send(self.worker_plane.address, message)

    async def until(self, is_true: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Waits until `is_true` returns true, for a state that messages or the engine bring about. Fails after
        `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while not is_true():  # noqa: ASYNC110 - several components share this state, which has no event
                await asyncio.sleep(0.002)

    async def assert_idle(self) -> None:
        """Waits until the worker holds no sequence, block, slot or announcement."""

        def is_idle() -> bool:
            stats = self.service.report().engine
            gauges = (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.num_features)
            return not any(gauges) and self.sink.usage().used_bytes == 0 and self.service.num_units_held == 0

        await self.until(is_idle)


@contextlib.asynccontextmanager
async def rig(
    inbox_bytes: int = 1 << 22,
    clock: Clock | None = None,
    parts: Loaded | None = None,
    sender: ChunkTransferAdapter | None = None,
    **config: Any,
) -> AsyncIterator[Rig]:
    """Yields a started worker. `sender` takes what it makes for requests with a next stage."""
    made = Rig(WorkerConfig(**config), inbox_bytes, clock or SystemClock(), parts or loaded(), sender)
    made.router_plane.start(made.router)
    made.encoder_plane.start(made.encoder)
    await made.service.start()
    try:
        yield made
    finally:
        await made.service.stop()
        made.sink.close()
        made.source.close()
        for plane in (made.router_plane, made.encoder_plane, made.worker_plane):
            plane.close()
