"""Checks a modality that Weft does not ship and that is registered from outside: point clouds pass through the whole
cluster and change the answer, without any change to Weft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from chat_media import user
from point_cloud import ARCHITECTURE, POINTS, register

from deploy.config import ClusterConfig
from deploy.testing import in_process_cluster, registered, small_config, write_demo_variant
from encoder_pool.calibration import MODALITY_TO_SAMPLES
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ClusterConfig]:
    """Registers the modality for the time of the test."""
    with registered(register):
        yield small_config(
            model={"path": str(write_demo_variant(tmp_path, ARCHITECTURE, POINTS))},
            encoders={"modalities": [POINTS]},
            media={"limit_mm_per_prompt": {POINTS: 1}},
        )


def cloud(seed: int, num_points: int = 40) -> dict[str, Any]:
    points = np.random.default_rng(seed).normal(3.0 * seed, 1.0, (num_points, 3)).round(3)
    return {"type": "point_cloud", "points": points.tolist()}


def test_a_registration_ends_with_its_test() -> None:
    before = REGISTRY.modalities, REGISTRY.architectures, dict(MODALITY_TO_SAMPLES)
    with registered(register):
        assert REGISTRY.modality_of_part("point_cloud") is REGISTRY.modality(POINTS)
        assert ARCHITECTURE in REGISTRY.architectures
        assert POINTS in MODALITY_TO_SAMPLES
    assert (REGISTRY.modalities, REGISTRY.architectures, MODALITY_TO_SAMPLES) == before
    assert REGISTRY.modality_of_part("point_cloud") is None


async def test_a_cloud_of_points_is_heard_of_by_registration_alone(config: ClusterConfig) -> None:
    async with in_process_cluster(config) as (cluster, client):

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
