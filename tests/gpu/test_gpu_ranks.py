"""Checks a worker of two ranks on two CUDA devices, which sums over nccl, against plain transformers. The tests are
skipped without two devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chat_media import image_part, user
from reference_model import Comparison, ReferenceModel

from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.testing import in_process_cluster

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")]

PROMPTS: list[list[dict[str, Any]]] = [
    user("Hello there!"),
    user(image_part(2, width=160, height=96), "and", image_part(3), "differ how?"),
]


async def test_greedy_tokens_of_two_devices_equal_transformers() -> None:
    """Compares float32 on the devices with float32 on the CPU."""
    device = {"device": "cuda", "gpus_per_replica": 1}
    workers = {"replicas": 1, "tensor_parallel": 2, "num_blocks": 512, "max_step_tokens": 32, **device}
    config = ClusterConfig.model_validate({"workers": workers, "encoders": {"decode_processes": 0, **device}})
    reference, comparison = ReferenceModel(demo_checkpoint()), Comparison()
    async with in_process_cluster(config) as (_, client):
        for messages in PROMPTS:
            body = {"model": "weft-demo", "messages": messages, "temperature": 0, "max_tokens": 12}
            response = await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
            answer = response.json()
            assert response.status_code == 200, answer
            tokens = answer["choices"][0]["token_ids"]
            comparison.check(reference.answer(messages, 12), answer["prompt_token_ids"], tokens, "two devices")
    comparison.finish()
