"""Tests sounds in a whole cluster in one process: chats over HTTP, from files to tokens, equal what transformers' own
Qwen2-Audio generates. The tokeniser is that of the demo checkpoint, the chat template is transformers' own."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from chat_media import user
from family_row import load_reference, spread
from family_rows_audio import QWEN2_AUDIO, RATE
from reference_model import Answer, Comparison
from sound_files import encoded, noise
from transformers import AutoTokenizer, Qwen2AudioProcessor

from deploy.config import ClusterConfig
from deploy.demo.build import demo_checkpoint
from deploy.testing import in_process_cluster

pytestmark = pytest.mark.torch

MAX_TOKENS = 8
PLACEHOLDER = "<|AUDIO|>"
NAME_TO_OURS = {"<|audio_pad|>": PLACEHOLDER, "<|audio_start|>": "<|audio_bos|>", "<|audio_end|>": "<|audio_eos|>"}


def file(milliseconds: int, seed: int, name: str = "wav") -> bytes:
    return encoded(noise(milliseconds * RATE // 1000, seed)[None], RATE, name)


def sound_part(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def url_part(data: bytes) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + base64.b64encode(data).decode()}}


ONE, OTHER, LONG = file(800, 1), file(1500, 2), file(5100, 3)
CHATS: list[tuple[list[dict[str, Any]], list[bytes]]] = [
    (user("Hello there, how are you today?"), []),
    (user(sound_part(ONE), "What do you hear?"), [ONE]),
    (user("Compare", sound_part(OTHER), "with", url_part(ONE), "and", sound_part(OTHER)), [OTHER, ONE, OTHER]),
    (user(url_part(LONG), "How does it end?"), [LONG]),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves the row's tiny model with the demo's vocabulary. Control tokens have the family's own spelling."""
    found, demo = tmp_path_factory.mktemp("qwen2_audio"), demo_checkpoint()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (demo / name).read_text()
        for theirs, ours in NAME_TO_OURS.items():
            text = text.replace(theirs, ours)
        (found / name).write_text(text)
    # The template writes "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>" for a sound.
    template = Qwen2AudioProcessor.default_chat_template.fget(None)
    (found / "chat_template.jinja").write_text(template)
    tokens = json.loads((demo / "config.json").read_text())["thinker_config"]
    built = QWEN2_AUDIO.build()
    built.config.text_config.vocab_size = tokens["text_config"]["vocab_size"]
    built.config.audio_token_index = tokens["audio_token_id"]
    spread(type(built)(built.config)).save_pretrained(found)
    for name, content in QWEN2_AUDIO.files.items():
        (found / name).write_text(json.dumps(content))
    (found / "generation_config.json").write_bytes((demo / "generation_config.json").read_bytes())
    return found


def expected(directory: Path, reference: Any, messages: list[dict[str, Any]], files: list[bytes]) -> Answer:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    content = [part if part["type"] == "text" else {"type": "audio"} for part in messages[0]["content"]]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs: dict[str, Any] = {}
    if files:
        assert QWEN2_AUDIO.process is not None
        processed = QWEN2_AUDIO.process(directory, [("audio", data) for data in files])
        inputs = processed.inputs
        for num_tokens in processed.num_tokens:
            text = text.replace(PLACEHOLDER, "<|here|>" * num_tokens, 1)
        text = text.replace("<|here|>", PLACEHOLDER)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        out = reference.generate(
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


async def test_chats_over_http_equal_transformers(directory: Path) -> None:
    comparison = Comparison()
    reference = load_reference(directory, "Qwen2AudioForConditionalGeneration")
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(directory), "name": "tiny"},
            "workers": {"replicas": 1, "max_step_tokens": 16, "num_blocks": 256},
            "encoders": {"replicas": 1, "decode_processes": 0},
        }
    )
    async with in_process_cluster(config) as (_, client):

        async def ask(messages: list[dict[str, Any]]) -> httpx.Response:
            body = {
                "model": "tiny",
                "messages": messages,
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            return await client.post("/v1/chat/completions", json=body)

        async def check(messages: list[dict[str, Any]], files: list[bytes]) -> None:
            response = await ask(messages)
            answer = response.json()
            assert response.status_code == 200, answer
            want = expected(directory, reference, messages, files)
            comparison.check(want, answer["prompt_token_ids"], answer["choices"][0]["token_ids"], "qwen2_audio")

        await asyncio.gather(*[check(*chat) for chat in CHATS])
        for data, words in ((ONE[: len(ONE) // 2], "truncated"), (file(5, 1), "too short"), (b"hello" * 9, "format")):
            response = await ask(user("What is", sound_part(data)))
            assert response.status_code == 400
            error = response.json()["error"]
            assert words in error["message"]
            assert error["param"] == "messages.0.content.1"
        await check(*CHATS[1])
    comparison.finish()
