"""Runs whole clusters whose encoders keep features on a device and whose workers receive them on one, and compares
their tokens with plain transformers.

The devices are simulated, so the models compute on the processor. Torch sees a slot of a simulated device as its bytes
on the host, which are poison as long as a copy to them has not ended.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from chat_media import image_part, user
from fake_device import FakeDeviceMemory
from reference_model import Comparison, ReferenceModel

from deploy import local
from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.testing import in_process_cluster
from fabric.transport import DeviceView, LocalFeatureSink, LocalFeatureSource, SlotMemory
from fabric.transport.routes import LinkRoutes, Route

pytestmark = pytest.mark.torch

DEVICE_BYTES, SPILL_BYTES = 1 << 16, 1 << 20
"""An encoder's device has room for one picture."""
PROMPTS: list[list[dict[str, Any]]] = [
    user("What is in this picture?", image_part(1)),
    user(image_part(2, width=160, height=96), "and", image_part(3), "differ how?"),
    user("Once more.", image_part(1)),
]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[FakeDeviceMemory]:
    """Returns the devices of a cluster that is started within the test: those of its encoders, then of its workers."""
    made: list[FakeDeviceMemory] = []

    def make_memory(nbytes: int) -> FakeDeviceMemory:
        made.append(FakeDeviceMemory(nbytes))
        return made[-1]

    as_tensor = torch.as_tensor

    def on_host(data: Any, **options: Any) -> torch.Tensor:
        if not isinstance(data, DeviceView):
            return as_tensor(data, **options)
        (memory,) = (each for each in made if each.place.holds(data.place))
        start = data.place.address - memory.place.address
        return torch.from_numpy(memory.bytes[start : start + data.nbytes])

    monkeypatch.setattr(torch, "as_tensor", on_host)
    spill = SlotMemory(SPILL_BYTES)
    source = partial(LocalFeatureSource, make_memory=lambda nbytes: make_memory(DEVICE_BYTES), spill=spill)
    sink = partial(LocalFeatureSink, make_memory=make_memory, staging=SlotMemory(1 << 20))
    monkeypatch.setattr(local, "LocalFeatureSource", source)
    monkeypatch.setattr(local, "LocalFeatureSink", sink)
    return made


@pytest.mark.parametrize("route", list(Route))
async def test_tokens_equal_transformers_with_features_on_devices(
    route: Route, devices: list[FakeDeviceMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena on the device holds only some features of the requests, so others spill to the host."""
    monkeypatch.setattr(LinkRoutes, "route", lambda self, key: route)
    landed: list[tuple[str, bool]] = []
    end = LocalFeatureSink._end

    def note(sink: Any, pull: Any, error: Any) -> bool:
        landed.append((pull.ticket.memory_kind, pull.is_staged))
        return end(sink, pull, error)

    monkeypatch.setattr(LocalFeatureSink, "_end", note)
    config = ClusterConfig.model_validate(
        {
            "workers": {"replicas": 1, "num_blocks": 512, "keep_features": "always", "prefix_cache": False},
            "encoders": {"decode_processes": 0},
        }
    )
    reference, comparison = ReferenceModel(demo_checkpoint()), Comparison()
    async with in_process_cluster(config) as (_, client):
        for messages in PROMPTS:
            body = {"model": "weft-demo", "messages": messages, "temperature": 0, "max_tokens": 8}
            response = await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
            answer = response.json()
            assert response.status_code == 200, answer
            tokens = answer["choices"][0]["token_ids"]
            comparison.check(reference.answer(messages, 8), answer["prompt_token_ids"], tokens, "devices")
    comparison.finish()
    assert len(devices) == 2
    assert {is_staged for _, is_staged in landed} == {route is Route.STAGED}
    assert {kind for kind, _ in landed} == {"VRAM", "DRAM"}, "the arena on the device must be too small for all"
    assert all(memory.copies for memory in devices)
