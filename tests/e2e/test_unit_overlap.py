"""Checks that the units of a video stream: the language model computes the first ones while later ones are still being
encoded."""

from __future__ import annotations

import numpy as np
import pytest
from chat_media import data_url, user
from media_corpus import Clip, encode_video

from deploy.config import ClusterConfig
from deploy.testing import in_process_cluster
from modalities.media import frame_sampling as video_rows

pytestmark = pytest.mark.torch


def film() -> bytes:
    """Returns a video of five seconds; sampled eight times a second, it has the model's 32 frames of 10 x 10
    patches."""
    rng = np.random.default_rng(5)
    frames = [rng.integers(0, 256, (160, 160, 3), dtype=np.uint8) for _ in range(4)]
    return encode_video([frames[at % 4] for at in range(40)], Clip(codec="mpeg4", num_frames=40, fps=8))


async def test_the_first_unit_is_prefilled_before_the_last_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are four units; each has a forward pass of its own, and a pause precedes each forward pass."""
    monkeypatch.setattr(video_rows, "UNIT_PATCHES", 400)
    config = ClusterConfig.model_validate(
        {
            "encoders": {
                "decode_processes": 0,
                "modalities": ["video"],
                "max_batch_cost": 1,
                "encode_delay_s": 0.7,
            },
            "workers": {"replicas": 1, "num_blocks": 640},
            "media": {"probe_processes": 0},
        }
    )
    async with in_process_cluster(config) as (_, client):
        body = {
            "model": "weft-demo",
            "messages": user({"type": "video_url", "video_url": {"url": data_url(film(), "video/mp4")}}, "What moves?"),
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
            "mm_processor_kwargs": {"fps": 8, "use_audio_in_video": False},
        }
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        trace = (await client.get(f"/weft/requests/{answer['id']}")).json()
        metrics = (await client.get("/metrics")).text
    events = trace["events"]
    encoded = [event for event in events if event["name"] == "unit_encoded"]
    landed = [event for event in events if event["name"] == "unit_landed"]
    assert [event["detail"]["unit"] for event in encoded] == [0, 1, 2, 3]
    assert landed[0]["at_s"] < encoded[-1]["at_s"]
    early = [e for e in events if e["name"] == "prefill" and landed[0]["at_s"] < e["at_s"] < encoded[-1]["at_s"]]
    assert early, [event["name"] for event in events]
    assert max(event["detail"]["end"] for event in early) > 100, "the first unit's 100 rows were computed"
    assert max(event["detail"]["end"] for event in early) < answer["usage"]["prompt_tokens"]
    assert sum(
        line.startswith("weft_encoder_batches_total{") and line.endswith(" 4.0") for line in metrics.splitlines()
    )
