"""Serves a tiny model by a real cluster whose encoder and worker with vLLM share one GPU. The test is skipped without a
CUDA device, or without the environment of `make install-vllm VLLM=gpu`. It has not run on a GPU yet (docs/gpu.md)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from chat_media import data_url, picture, png
from cluster_process import start_cluster
from contract_model import contract_model

PYTHON = Path(f"{sys.prefix}-vllm") / "bin" / "python"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ray,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make install-vllm VLLM=gpu` was not run"),
]


def test_an_encoder_and_vllm_share_a_gpu() -> None:
    """vLLM takes what the encoder leaves, because the config does not set gpu_memory_utilization."""
    sections: dict[str, dict[str, object]] = {
        "model": {"path": str(contract_model("qwen2_5_vl").directory), "name": "tiny", "dtype": "float32"},
        "encoders": {"replicas": 1, "device": "cuda", "gpus_per_replica": 0.25},
        "workers": {
            "engine": "vllm",
            "replicas": 1,
            "device": "cuda",
            "gpus_per_replica": 0.75,
            "block_size": 32,
            "max_step_tokens": 256,
            "max_sequences": 8,
            "vllm": {"enforce_eager": True, "max_model_len": 2048},
        },
    }
    shown = {"type": "image_url", "image_url": {"url": data_url(png(picture(1)))}}
    content = [shown, {"type": "text", "text": "What do you see?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0}
    with start_cluster(**sections, allow_shared_gpu=True) as cluster, cluster.client() as client:
        answers = [client.post("/v1/chat/completions", json=body).json() for _ in range(2)]
    assert answers[0]["choices"][0]["message"]["content"] == answers[1]["choices"][0]["message"]["content"]
    assert answers[0]["usage"]["completion_tokens"] == 12
