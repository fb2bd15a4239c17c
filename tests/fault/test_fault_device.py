"""Checks a device of a worker or an encoder that fails permanently in the middle of many requests: the requests
continue elsewhere and end with the same answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from chat_media import image_part, user
from router_chats import read

from deploy.config import ClusterConfig
from deploy.local import LocalCluster, running
from fabric.contracts import EncodeFailed, EncoderLost, EngineFailed, MemberId, WeftError, WorkerLost
from llm_workers.engine import PROBE_ID, Executor
from llm_workers.scheduling import StepPlan, StepResult
from modalities.family import EncoderInput, EncoderModel
from router.api import ChatRequest, parse_chat

pytestmark = pytest.mark.torch

NUM_REQUESTS = 3000
NUM_AT_ONCE = 48
NUM_PROMPTS = 25
NUM_TOKENS = 5
POISON = "poison "


def config() -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "workers": {"replicas": 2, "num_blocks": 1024},
            "encoders": {"replicas": 0},
            "media": {"probe_processes": 0},
            "router": {"capacity_wait_s": 5.0},
        }
    )


def chat(number: int, words: str = "") -> ChatRequest:
    text = f"{words}What comes after {number % NUM_PROMPTS}?"
    body = {"model": "weft-demo", "messages": [{"role": "user", "content": text}], "temperature": 0}
    return parse_chat(json.dumps(body | {"max_tokens": NUM_TOKENS, "ignore_eos": True}).encode())


class Device:
    """Wraps an engine's executor. It fails every step once `is_broken` is set, and each step that contains the
    poison."""

    def __init__(self, cluster: LocalCluster, worker_id: MemberId) -> None:
        self.is_broken = False
        self.poison: tuple[int, ...] = ()
        self.num_probes = 0
        self._engine = cluster.workers.services[worker_id]._engine
        self._executor: Executor = self._engine._executor
        self._engine._executor = self

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_probes += plan.chunks[0].sequence_id == PROBE_ID
        if self.is_broken or any(self._is_poisoned(chunk.token_ids.tolist()) for chunk in plan.chunks):
            raise RuntimeError("it computes no more")
        return self._executor.execute(plan)

    def _is_poisoned(self, token_ids: Sequence[int]) -> bool:
        size = len(self.poison)
        return size > 0 and any(tuple(token_ids[at : at + size]) == self.poison for at in range(len(token_ids)))


async def ask(cluster: LocalCluster, request: ChatRequest) -> str:
    return (await read(await cluster.router.open(request)))[0][0]


async def test_three_thousand_requests_survive_a_device_that_dies_among_them() -> None:
    async with running(config()) as cluster:
        wanted = [await ask(cluster, chat(number)) for number in range(NUM_PROMPTS)]
        assert len(set(wanted)) > 5
        devices = {worker_id: Device(cluster, worker_id) for worker_id in cluster.workers.services}
        services = cluster.workers.services
        victims: list[MemberId] = []
        outcomes: Counter[str] = Counter()
        numbers = iter(range(NUM_REQUESTS))

        def break_the_busiest() -> None:
            victims.append(max(services, key=lambda each: services[each].report().engine.num_running))
            devices[victims[0]].is_broken = True

        async def client() -> None:
            for number in numbers:
                if number == NUM_REQUESTS // 2:
                    break_the_busiest()
                try:
                    is_right = await ask(cluster, chat(number)) == wanted[number % NUM_PROMPTS]
                    outcomes["right" if is_right else "wrong"] += 1
                except WeftError as error:
                    outcomes[error.code] += 1

        await asyncio.gather(*(client() for _ in range(NUM_AT_ONCE)))
        assert outcomes == {"right": NUM_REQUESTS}
        metric = cluster.router.metrics.registry.get_sample_value
        num_migrated = metric("weft_router_attempts_total", {"outcome": "worker_lost"})
        assert num_migrated is not None
        assert num_migrated >= 1, "nothing was on the worker that died: the test tests nothing"
        (victim_id,) = victims
        with pytest.raises(WorkerLost):
            services[victim_id].check_health()
        left = [member for member in cluster.router.members() if member["kind"] == "worker"]
        assert [member["member_id"] for member in left] == [each for each in devices if each != victim_id]
        survivor = next(service for each, service in services.items() if each != victim_id)
        survivor.check_health()
        assert survivor.report().is_lost is False
        assert survivor.report().engine.kv_blocks_used == 0


async def test_a_poisoned_request_among_healthy_ones_fails_alone_and_no_worker_is_lost() -> None:
    async with running(config()) as cluster:
        wanted = [await ask(cluster, chat(number)) for number in range(NUM_PROMPTS)]
        devices = [Device(cluster, worker_id) for worker_id in cluster.workers.services]
        codec = cluster.router._codec
        for device in devices:
            device.poison = tuple(codec.encode(POISON.strip()))
        healthy = [asyncio.create_task(ask(cluster, chat(number))) for number in range(4 * NUM_PROMPTS)]
        poisoned = [asyncio.create_task(ask(cluster, chat(number, POISON))) for number in range(3)]
        answers = await asyncio.gather(*healthy)
        ends = await asyncio.gather(*poisoned, return_exceptions=True)
        assert answers == wanted * 4
        assert [type(end) for end in ends] == [EngineFailed] * 3
        assert sum(device.num_probes for device in devices) >= 3
        for service in cluster.workers.services.values():
            service.check_health()
        assert cluster.router.readiness()[1]["num_workers"] == 2


class EncoderDevice:
    """Wraps an encoder's model. It fails every forward pass once `is_broken` is set, and each one with a wide picture
    if `is_wide_poison` is set."""

    def __init__(self, cluster: LocalCluster, encoder_id: MemberId) -> None:
        self.is_broken = False
        self.is_wide_poison = False
        self.num_forwards = 0
        forward = cluster.encoders.services[encoder_id]._forward
        self._model: EncoderModel = forward._model
        forward._model = self

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        self.num_forwards += 1
        if self.is_broken or (self.is_wide_poison and any(each.grid[1] != each.grid[2] for each in inputs)):
            raise RuntimeError("it computes no more")
        return self._model.encode(inputs)


def picture_config() -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "workers": {"replicas": 1, "num_blocks": 1024},
            "encoders": {"replicas": 2, "modalities": ["image"], "decode_processes": 0},
            "media": {"probe_processes": 0},
            "router": {"capacity_wait_s": 5.0},
        }
    )


def about_picture(seed: int, salt: str = "", **size: int) -> ChatRequest:
    body = {"model": "weft-demo", "messages": user(image_part(seed, **size), "What is this?"), "temperature": 0}
    return parse_chat(json.dumps(body | {"max_tokens": NUM_TOKENS, "ignore_eos": True, "cache_salt": salt}).encode())


async def test_pictures_survive_an_encoder_whose_device_dies() -> None:
    async with running(picture_config()) as cluster:
        wanted = [await ask(cluster, about_picture(seed)) for seed in range(40)]
        devices = {encoder_id: EncoderDevice(cluster, encoder_id) for encoder_id in cluster.encoders.services}
        victim_id, victim = next(iter(devices.items()))
        victim.is_broken = True
        answers = await asyncio.gather(*(ask(cluster, about_picture(seed, "anew")) for seed in range(40)))
        assert answers == wanted
        assert 2 <= victim.num_forwards <= 3, "a forward, its first item alone if there were several, and the probe"
        with pytest.raises(EncoderLost):
            cluster.encoders.services[victim_id].check_health()
        cluster.encoders.services[victim_id].tick()
        assert victim_id not in {member["member_id"] for member in cluster.router.members()}


async def test_a_poisoned_picture_fails_alone_and_no_encoder_is_lost() -> None:
    async with running(picture_config()) as cluster:
        wanted = [await ask(cluster, about_picture(seed)) for seed in range(20)]
        for encoder_id in cluster.encoders.services:
            EncoderDevice(cluster, encoder_id).is_wide_poison = True
        healthy = [asyncio.create_task(ask(cluster, about_picture(seed, "anew"))) for seed in range(20)]
        with pytest.raises(EncodeFailed):
            await ask(cluster, about_picture(99, "anew", width=256, height=64))
        assert await asyncio.gather(*healthy) == wanted
        for service in cluster.encoders.services.values():
            service.check_health()
