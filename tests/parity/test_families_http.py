"""Tests families in a whole cluster in one process: chats over HTTP, from pixels to tokens, equal what transformers'
own model generates. Tokeniser and chat template are those of the demo checkpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_media import image_part, picture, user
from family_row import FamilyRow
from family_rows_pictures import INTERNVL, LLAVA, LLAVA_ONEVISION
from family_rows_qwen_vl import QWEN2_5_OMNI, QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from family_rows_text import LLAMA, QWEN2, QWEN3
from PIL import Image
from reference_model import Comparison
from served_family import MAX_TOKENS, ServedFamily, expected, served_family

from deploy.config import ClusterConfig
from deploy.testing import in_process_cluster

pytestmark = pytest.mark.torch

ROWS = (LLAMA, QWEN2, QWEN3, LLAVA, LLAVA_ONEVISION, INTERNVL, QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN2_5_OMNI)
CHATS: list[tuple[list[dict[str, Any]], list[Image.Image]]] = [
    (user("Hello there, how are you today?"), []),
    (user("What is in this picture?", image_part(1)), [picture(1)]),
    (
        user("Compare", image_part(3, width=160, height=96), "with", image_part(4, width=64, height=128), "please."),
        [picture(3, 160, 96), picture(4, 64, 128)],
    ),
]


@pytest.fixture(scope="module", params=ROWS, ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedFamily:
    row: FamilyRow = request.param
    return served_family(row, tmp_path_factory.mktemp(row.name))


async def test_chats_over_http_equal_transformers(served: ServedFamily) -> None:
    comparison = Comparison()
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(served.directory), "name": "tiny"},
            "workers": {"replicas": 1, "max_step_tokens": 16, "num_blocks": 256},
            "encoders": {"replicas": int(bool(served.row.modalities)), "decode_processes": 0},
        }
    )
    async with in_process_cluster(config) as (_, client):

        async def ask(messages: list[dict[str, Any]], pictures: list[Image.Image]) -> None:
            body = {
                "model": "tiny",
                "messages": messages,
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = await client.post("/v1/chat/completions", json=body)
            answer = response.json()
            assert response.status_code == 200, answer
            want = expected(served, messages, pictures)
            comparison.check(want, answer["prompt_token_ids"], answer["choices"][0]["token_ids"], served.row.name)

        await asyncio.gather(*[ask(*chat) for chat in CHATS if served.row.modalities or not chat[1]])
    comparison.finish()
