"""Tests features that clients send in place of pictures, in a whole cluster in one process: the features are those that
transformers' own vision tower computes, and the answer is the one that transformers gives to the picture itself."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
import safetensors.torch
import torch
from chat_media import data_url, picture, png, text_part
from family_row import FamilyRow
from family_rows_pictures import INTERNVL, LLAVA, LLAVA_ONEVISION
from family_rows_qwen_vl import QWEN2_5_OMNI, QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from PIL import Image
from reference_model import Comparison
from served_family import MAX_TOKENS, ServedFamily, expected, served_family

from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.testing import in_process_cluster
from modalities.media import plan_media
from modalities.registry import REGISTRY

pytestmark = pytest.mark.torch

ROWS = (LLAVA, LLAVA_ONEVISION, INTERNVL, QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN2_5_OMNI)
PICTURES = [picture(3, 160, 96), picture(4, 64, 128)]


@pytest.fixture(scope="module", params=ROWS, ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedFamily:
    row: FamilyRow = request.param
    return served_family(row, tmp_path_factory.mktemp(row.name))


def encoded(**tensors: torch.Tensor) -> str:
    return base64.b64encode(safetensors.torch.save(tensors)).decode()


def features_parts(served: ServedFamily, pictures: list[Image.Image]) -> list[dict[str, Any]]:
    """Returns the parts with the features of pictures, each with what its family needs to know of the picture: once as
    a tensor of its own, once in the file of the features."""
    assert served.row.process is not None
    assert served.row.features is not None
    parts = []
    for index, one in enumerate(pictures):
        processed = served.row.process(served.directory, [("image", png(one))])
        with torch.inference_mode():
            (feature,) = served.row.features(served.reference, processed)
        rows = feature.transpose(0, 1).flatten(1).contiguous()  # The levels of a token follow each other, as in vLLM.
        more = {name: processed.inputs[name] for name in ("image_grid_thw",) if name in processed.inputs}
        if served.row is LLAVA_ONEVISION:
            more = {"image_sizes": torch.tensor([[one.height, one.width]])}
        value: Any = encoded(image_embeds=rows, **more)
        if index == 0:
            value = {"image_embeds": encoded(image_embeds=rows), **{name: encoded(it=it) for name, it in more.items()}}
        parts.append({"type": "image_embeds", "image_embeds": value})
    return parts


async def test_features_of_transformers_give_the_tokens_of_the_pictures(served: ServedFamily) -> None:
    comparison = Comparison()
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(served.directory), "name": "tiny"},
            "media": {"image_embeds": True},
            "workers": {"replicas": 1, "max_step_tokens": 16, "num_blocks": 256},
            "encoders": {"replicas": 1, "decode_processes": 0},
        }
    )
    first, second = features_parts(served, PICTURES)
    content: list[dict[str, Any]] = [text_part("Compare"), first, text_part("with"), second, text_part("please.")]
    pictured = [part if part["type"] == "text" else {"type": "image_url"} for part in content]
    want = expected(served, [{"role": "user", "content": pictured}], PICTURES)
    async with in_process_cluster(config) as (_, client):

        async def ask() -> dict[str, Any]:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.json()
            return response.json()

        for answer in await asyncio.gather(ask(), ask()):
            comparison.check(want, answer["prompt_token_ids"], answer["choices"][0]["token_ids"], served.row.name)
            details = answer["usage"]["prompt_tokens_details"]
            assert details["image_tokens"] > 0
    comparison.finish()


async def test_features_of_an_encoder_in_bfloat16_give_the_tokens_of_the_picture() -> None:
    """The demo model has DeepStack levels. Its features are sent as bfloat16, and as float32, which rounds back to the
    same numbers."""
    directory, data = demo_checkpoint(), png(picture(5, 128, 96))
    family = REGISTRY.load_family(directory)
    item = plan_media(family, data, REGISTRY.modality("image").probe(data, "p"), 0, "p").item
    model = family.load_encoder(directory, "cpu", "bfloat16", ("image",))
    with torch.inference_mode():
        (feature,) = model.encode(family.preprocess(data, item))
    assert feature.dtype == torch.bfloat16
    assert len(feature) == family.shape.num_levels > 1
    rows, grid = feature.transpose(0, 1).flatten(1).contiguous(), torch.tensor(item.grid)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(data)}},
        {"type": "image_embeds", "image_embeds": encoded(image_embeds=rows, image_grid_thw=grid)},
        {"type": "image_embeds", "image_embeds": encoded(image_embeds=rows.float(), image_grid_thw=grid)},
        {"type": "image_embeds", "image_embeds": encoded(image_embeds=rows * 0, image_grid_thw=grid)},
    ]
    config = ClusterConfig.model_validate(
        {
            "model": {"dtype": "bfloat16", "name": "demo"},
            "media": {"image_embeds": True},
            "workers": {"replicas": 1},
            "encoders": {"replicas": 1, "decode_processes": 1},
        }
    )
    async with in_process_cluster(config) as (_, client):
        found = []
        for part in parts:
            content = [part, text_part("What is in this picture?")]
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": 16,
                "logprobs": True,
                "return_token_ids": True,
            }
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            (choice,) = answer["choices"]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            found.append((answer["prompt_token_ids"], choice["token_ids"], logprobs))
    shown, given, widened, black = found
    assert shown == given == widened
    assert black[0] == shown[0]
    assert black[2] != shown[2], "the model sees what the features show"
