"""Tests families in a whole cluster in one process: chats over HTTP, from pixels to tokens, equal what transformers'
own model generates. Tokeniser and chat template are those of the demo checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_media import image_part, picture, png, user
from family_row import FamilyRow, load_reference, spread
from family_rows_pictures import INTERNVL, LLAVA, LLAVA_ONEVISION
from family_rows_qwen_vl import QWEN2_5_OMNI, QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from family_rows_text import LLAMA, QWEN2, QWEN3
from PIL import Image
from reference_model import Answer, Comparison
from transformers import AutoTokenizer

from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.testing import in_process_cluster

pytestmark = pytest.mark.torch

MAX_TOKENS = 8
ROWS = (LLAMA, QWEN2, QWEN3, LLAVA, LLAVA_ONEVISION, INTERNVL, QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN2_5_OMNI)
NAME_TO_PLACEHOLDER = {
    "qwen2_5_omni": "<|IMAGE|>",
    "llava": "<image>",
    "llava_onevision": "<image>",
    "internvl": "<IMG_CONTEXT>",
}
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHATS: list[tuple[list[dict[str, Any]], list[Image.Image]]] = [
    (user("Hello there, how are you today?"), []),
    (user("What is in this picture?", image_part(1)), [picture(1)]),
    (
        user("Compare", image_part(3, width=160, height=96), "with", image_part(4, width=64, height=128), "please."),
        [picture(3, 160, 96), picture(4, 64, 128)],
    ),
]


@dataclass(frozen=True)
class Served:
    row: FamilyRow
    directory: Path
    reference: Any
    placeholder: str
    image_token_id: int


@pytest.fixture(scope="module", params=ROWS, ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Saves the row's tiny model with the demo's vocabulary. The placeholder has the family's own spelling."""
    row: FamilyRow = request.param
    directory, demo = tmp_path_factory.mktemp(row.name), demo_checkpoint()
    placeholder = NAME_TO_PLACEHOLDER.get(row.name, "<|image_pad|>")
    for name in TEXT_FILES:
        text = (demo / name).read_text().replace("<|image_pad|>", placeholder)
        if row is INTERNVL:  # InternVL's template leaves the marks around a picture to the processor.
            is_template = name == "chat_template.jinja"
            for mark, own in (("<|vision_start|>", "<img>"), ("<|vision_end|>", "</img>")):
                text = text.replace(mark, "" if is_template else own)
        (directory / name).write_text(text)
    tokens = json.loads((demo / "config.json").read_text())
    kind = type(row.build())
    config = row.build().config
    getattr(config, "text_config", config).vocab_size = tokens["text_config"]["vocab_size"]
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if row.modalities and hasattr(config, key):
            setattr(config, key, tokens[key])
    spread(kind(config)).save_pretrained(directory)
    for name, content in row.files.items():
        if name not in TEXT_FILES:
            (directory / name).write_text(json.dumps(content))
    shutil.copy(demo / "generation_config.json", directory)
    return Served(row, directory, load_reference(directory, kind.__name__), placeholder, tokens["image_token_id"])


def expected(served: Served, messages: list[dict[str, Any]], pictures: list[Image.Image]) -> Answer:
    tokenizer = AutoTokenizer.from_pretrained(served.directory)
    content = [{"type": "image"} if p["type"] == "image_url" else p for p in messages[0]["content"]]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs: dict[str, Any] = {}
    if pictures:
        assert served.row.process is not None
        processed = served.row.process(served.directory, [("image", png(picture)) for picture in pictures])
        inputs = processed.inputs
        before, after = ("<img>", "</img>") if served.row is INTERNVL else ("", "")
        for num_tokens in processed.num_tokens:
            text = text.replace(served.placeholder, before + "<|here|>" * num_tokens + after, 1)
        text = text.replace("<|here|>", served.placeholder)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    if served.row.name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        inputs["mm_token_type_ids"] = (ids == served.image_token_id).int()
    with torch.inference_mode():
        out = served.reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **inputs,
        )
    best = [step[0].topk(2).values.tolist() for step in out.logits]
    return Answer(
        ids[0].tolist(), out.sequences[0, ids.shape[1] :].tolist(), [first - second for first, second in best]
    )


async def test_chats_over_http_equal_transformers(served: Served) -> None:
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
