"""Checks that a worker on a CUDA device takes as many KV blocks as the device holds, and answers with them. The tests
are skipped without a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chat_media import image_part, user

from deploy.config import ClusterConfig
from deploy.testing import in_process_cluster
from llm_workers.compute.device_memory import device_room

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 16), ("bfloat16", 256)])
async def test_blocks_follow_from_the_memory_of_the_device(dtype: str, block_size: int) -> None:
    """Pages of 256 tokens in bfloat16 are read in place, and decode steps are recorded at boot where this torch can do
    that."""
    device: dict[str, Any] = {"device": "cuda", "gpus_per_replica": 1}
    fitted = {"num_blocks": "auto", "block_size": block_size, "cuda_graphs": "auto", "max_sequences": 8}
    config = ClusterConfig.model_validate(
        {
            "model": {"dtype": dtype},
            "workers": {"replicas": 1, "max_step_tokens": 256, **fitted, **device},
            "encoders": {"decode_processes": 0, **device},
        }
    )
    async with in_process_cluster(config) as (_, client):
        room = device_room(torch.device("cuda"))
        assert room.free_bytes > 0.05 * room.total_bytes
        for messages in (user("Hello there!"), user("What is in this picture?", image_part(1))):
            body = {"model": "weft-demo", "messages": messages, "temperature": 0, "max_tokens": 12}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
