"""Provides a cluster for tests of the router: fake members around a real service, planner and plane.

The codec is the real one, with a vocabulary of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime

from router_fake_members import BLOCK_SIZE, FakeEncoder, FakeWorker, Script, reply_text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fabric.contracts import (
    Clock,
    EncodeRequest,
    EncodeResult,
    GenerateRequest,
    GenerateResult,
    InvalidMedia,
    Member,
    MemberId,
    MmHash,
    SystemClock,
    TargetGone,
)
from fabric.transport import LocalHub, LocalPlane
from modalities.family import (
    DEFAULT_OPTIONS,
    ExpandedPrompt,
    Family,
    ImageHeader,
    ItemPlan,
    MediaHeader,
    MediaOptions,
    ModelShape,
    expand_placeholders,
)
from modalities.registry import REGISTRY, Registry
from modalities.text import TextCodec
from modalities.text.codec import ChatTemplate
from modalities.text.detokenizer import LETTER_TO_BYTE
from router.prompt import PromptBuilder
from router.router_config import RouterConfig
from router.run import Pools
from router.service import RouterService

SPECIALS = ("<|eos|>", "<|image|>", "<|turn|>", "<|end|>", "<|video|>", "<|audio|>")
EOS, IMAGE, VIDEO, AUDIO = 256, 257, 260, 261
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% elif p.type == 'video' %}<|video|>"
    "{% elif p.type == 'audio' %}<|audio|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MODEL = "tiny"


def tiny_codec() -> TextCodec:
    """Returns a codec with bytes 0 to 255 as ids 0 to 255, followed by the special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(LETTER_TO_BYTE), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return TextCodec(tokenizer, ChatTemplate(TEMPLATE, {}, datetime.now), (EOS,))


class NoProber:
    """Refuses every file. Tests use it with files that need no prober, because their first bytes say what they are."""

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def probe(self, modality: str, data: bytes, param: str) -> MediaHeader:
        raise InvalidMedia(f"{param}: not plainly a {modality}", param=param)


class TinyFamily:
    """Takes images and turns them into one row per 32 x 32 pixels."""

    name = "tiny"
    model_id = "tiny-0"
    max_items: Mapping[str, int] = {"image": 4}

    def __init__(self, max_model_len: int = 2048) -> None:
        self.shape = ModelShape(
            hidden_size=8,
            num_levels=1,
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=256 + len(SPECIALS),
            max_model_len=max_model_len,
        )

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        assert isinstance(header, ImageHeader)
        grid = (1, -(-header.height // 32), -(-header.width // 32))
        rows = grid[1] * grid[2]
        return ItemPlan("image", grid, (rows,), rows * 4, (header.width, header.height))

    def placeholder_text(self, modality: str) -> str:
        return "<|image|>"

    def expand(
        self,
        token_ids: Sequence[int],
        plans: Sequence[ItemPlan],
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> ExpandedPrompt:
        return expand_placeholders(token_ids, {"image": IMAGE}, plans)

    def options(self, modality: str) -> str:
        return "{}"


class FakePools:
    """Implements both pools by member id. Raises TargetGone for a member that is not present."""

    def __init__(self) -> None:
        self.workers: dict[MemberId, FakeWorker] = {}
        self.encoders: dict[MemberId, FakeEncoder] = {}

    async def generate(self, worker_id: MemberId, request: GenerateRequest) -> GenerateResult:
        if worker_id not in self.workers:
            raise TargetGone(f"{worker_id} has left")
        return await self.workers[worker_id].generate(request)

    async def encode(self, encoder_id: MemberId, request: EncodeRequest, media: Sequence[bytes]) -> EncodeResult:
        if encoder_id not in self.encoders:
            raise TargetGone(f"{encoder_id} has left")
        return await self.encoders[encoder_id].encode(request, media)


class FakeCluster:
    """Holds a router service and its members. A test may add and remove members; `publish` informs the router."""

    def __init__(
        self,
        num_workers: int,
        num_encoders: int,
        config: RouterConfig,
        family: Family,
        codec: TextCodec,
        registry: Registry,
        clock: Clock,
    ) -> None:
        self.hub = LocalHub()
        self.codec = codec
        self.pools = FakePools()
        self.workers = [FakeWorker(self.hub, f"worker-{index}", self.codec) for index in range(num_workers)]
        self.encoders = [FakeEncoder(self.hub, f"encoder-{index}") for index in range(num_encoders)]
        self.pools.workers = {worker.member_id: worker for worker in self.workers}
        self.pools.encoders = {encoder.member_id: encoder for encoder in self.encoders}
        self.plane = LocalPlane(self.hub, "local://router")
        self.service = RouterService(
            MemberId("router-0"),
            config,
            PromptBuilder(config, family, self.codec, registry, NoProber()),
            self.plane,
            Pools(self.pools, self.pools),
            clock,
        )

    @property
    def members(self) -> list[Member]:
        present = [*self.pools.workers.values(), *self.pools.encoders.values()]
        return [each.member for each in present]

    def publish(self) -> None:
        self.service.update_members(self.members)

    def add_worker(self) -> FakeWorker:
        """Adds a worker with a new name and returns it. The router knows it after `publish`."""
        worker = FakeWorker(self.hub, f"worker-{len(self.workers)}", self.codec)
        worker.plane.start(worker.handle)
        self.workers.append(worker)
        self.pools.workers[worker.member_id] = worker
        return worker

    def add_encoder(self) -> FakeEncoder:
        """Adds an encoder with a new name and returns it. The router knows it after `publish`."""
        encoder = FakeEncoder(self.hub, f"encoder-{len(self.encoders)}")
        encoder.plane.start(encoder.handle)
        self.encoders.append(encoder)
        self.pools.encoders[encoder.member_id] = encoder
        return encoder

    def remove(self, member: FakeWorker | FakeEncoder) -> None:
        """Removes a member. The router knows this after `publish`."""
        self.pools.workers.pop(member.member_id, None)
        self.pools.encoders.pop(member.member_id, None)

    def mm_hashes(self) -> list[MmHash]:
        return [item.mm_hash for encoder in self.encoders for request in encoder.requests for item in request.items]


@asynccontextmanager
async def fake_cluster(
    num_workers: int = 1,
    num_encoders: int = 1,
    max_model_len: int = 2048,
    model: tuple[Family, TextCodec] | None = None,
    registry: Registry = REGISTRY,
    encoder_modalities: tuple[str, ...] = ("image",),
    clock: Clock | None = None,
    **settings: object,
) -> AsyncIterator[FakeCluster]:
    """Starts a cluster whose members the router knows, and asserts at the end that no request is in flight. `model`
    replaces the tiny family and codec; `settings` are fields of RouterConfig."""
    waits = {"gap_timeout_s": 0.2, "settle_timeout_s": 0.2, "capacity_wait_s": 0.2}
    defaults: dict[str, object] = {"block_size": BLOCK_SIZE, "heartbeat_s": 60.0, **waits}
    config = RouterConfig(model_name=MODEL, **(defaults | settings))
    family, codec = model or (TinyFamily(max_model_len), tiny_codec())
    clock = clock or SystemClock()
    cluster = FakeCluster(num_workers, num_encoders, config, family, codec, registry, clock)
    for encoder in cluster.encoders:
        encoder.modalities = encoder_modalities
    for each in (*cluster.workers, *cluster.encoders):
        each.plane.start(each.handle)
    await cluster.service.start()
    cluster.publish()
    try:
        yield cluster
        assert cluster.service.admission.num_in_flight == 0
        assert cluster.service.admission.bodies_bytes == 0
    finally:
        await cluster.service.stop()
        for plane in (cluster.plane, *(each.plane for each in (*cluster.workers, *cluster.encoders))):
            plane.close()


async def settled(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Runs the event loop until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a fake sets no event for this condition
            await asyncio.sleep(0)


__all__ = [
    "BLOCK_SIZE",
    "EOS",
    "MODEL",
    "FakeCluster",
    "FakeEncoder",
    "FakeWorker",
    "Script",
    "fake_cluster",
    "reply_text",
    "settled",
    "tiny_codec",
]
