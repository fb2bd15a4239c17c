"""Checks a modality that Weft does not ship and that is registered from outside: point clouds pass through the whole
cluster and change the answer, without any change to Weft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from chat_media import user
from point_cloud import POINTS, register, write_model

from deploy.config import ClusterConfig
from deploy.local import running
from encoder_pool import calibration as samples
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Registers the modality for the time of the test and returns the folder of its model."""
    for name in ("_modality_to_plugin", "_part_type_to_plugin", "_architecture_to_loader"):
        monkeypatch.setattr(REGISTRY, name, dict(getattr(REGISTRY, name)))
    monkeypatch.setattr(samples, "MODALITY_TO_SAMPLES", samples.MODALITY_TO_SAMPLES)
    monkeypatch.setitem(samples.MODALITY_TO_SAMPLES, POINTS, None)  # the fixture removes it at the end
    register(REGISTRY)
    return write_model(tmp_path)


def cloud(seed: int, num_points: int = 40) -> dict[str, Any]:
    points = np.random.default_rng(seed).normal(3.0 * seed, 1.0, (num_points, 3)).round(3)
    return {"type": "point_cloud", "points": points.tolist()}


async def test_a_cloud_of_points_is_heard_of_by_registration_alone(model_dir: Path) -> None:
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(model_dir)},
            "encoders": {"modalities": [POINTS], "decode_processes": 0},
            "workers": {"replicas": 1, "num_blocks": 128},
            "media": {"limit_mm_per_prompt": {POINTS: 1}},
        }
    )
    async with (
        running(config) as cluster,
        httpx.AsyncClient(transport=httpx.ASGITransport(cluster.app), base_url="http://weft", timeout=60) as client,
    ):

        async def post(*parts: dict[str, Any] | str) -> httpx.Response:
            options = {"temperature": 0, "max_tokens": 3, "logprobs": True, "ignore_eos": True}
            body = {"model": cluster.model.name, "messages": user(*parts)} | options
            return await client.post("/v1/chat/completions", json=body)

        assert (await client.get("/health/ready")).status_code == 200
        answers = [(await post("What is it?", cloud(seed))).json() for seed in (1, 2, 1)]
        logprobs = [[each["logprob"] for each in a["choices"][0]["logprobs"]["content"]] for a in answers]
        assert [a["usage"]["prompt_tokens_details"][f"{POINTS}_tokens"] for a in answers] == [5, 5, 5]
        assert logprobs[0] == pytest.approx(logprobs[2], abs=1e-4)
        assert abs(logprobs[0][0] - logprobs[1][0]) > 1e-3, "another cloud, another answer"

        refused = [
            await post(cloud(1), cloud(2)),
            await post("?", {"type": "point_cloud", "points": [[1, 2]]}),
            await post({"type": "image_url", "image_url": {"url": "data:,"}}),
            await post({"type": "hologram"}),
        ]
        errors = [response.json()["error"] for response in refused]
        assert [response.status_code for response in refused] == [400] * 4
        assert [(error["code"], error["param"]) for error in errors] == [
            ("invalid_request", "messages.0.content.1"),
            ("invalid_media", "messages.0.content.1"),
            ("unsupported_modality", "messages.0.content.0"),
            ("invalid_request", "messages.0.content.0"),
        ]
