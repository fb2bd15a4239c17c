"""Tests checkpoints with SentencePiece-like tokenizers in a whole cluster in one process: LLaVA-1.5 and Llama-2 answer
chats over HTTP as transformers does, from pixels to letters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from chat_media import image_part, picture, user
from family_row import FamilyRow, load_reference, spread
from family_rows_pictures import LLAVA
from family_rows_text import LLAMA
from piece_tokenizers import NUM_TOKENS, llava_tokenizer, write_llama2, write_llava
from PIL import Image
from reference_model import Answer, Comparison
from transformers import AutoTokenizer, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from deploy.config import ClusterConfig
from deploy.testing import in_process_cluster

pytestmark = pytest.mark.torch

MAX_TOKENS = 24
TEXTS = ["What is in this picture?", "Naïve ☃?\nPlease say </s><image> <s>."]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["the end", "naïve ☃"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def write_checkpoint(row: FamilyRow, directory: Path) -> Any:
    """Saves the row's tiny model with the vocabulary of a SentencePiece-like tokenizer. Returns transformers' model,
    which ends no text."""
    kind, config = type(row.build()), row.build().config
    getattr(config, "text_config", config).vocab_size = NUM_TOKENS
    if row is LLAVA:
        config.image_token_index = config.image_token_id = llava_tokenizer().token_to_id("<image>")
    spread(kind(config)).save_pretrained(directory)
    saved = (directory / "config.json").read_text()
    (write_llava if row is LLAVA else write_llama2)(directory)
    (directory / "config.json").write_text(saved)
    for name, content in row.files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return load_reference(directory, kind.__name__)


def expected(directory: Path, reference: Any, text: str, pictures: list[Image.Image]) -> tuple[Answer, str]:
    """Returns what transformers answers: the ids, and their text. LLaVA's own processor makes its prompts."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs: dict[str, Any]
    if LLAVA.name in directory.name:
        processor = LlavaProcessor(
            CLIPImageProcessorPil.from_pretrained(directory),
            tokenizer,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=(directory / "chat_template.jinja").read_text(),
        )
        parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
        prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        inputs = dict(processor(text=prompt, images=pictures or None, return_tensors="pt"))
    else:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        inputs = {"input_ids": torch.tensor([ids])}
    inputs = {key: inputs[key] for key in ("input_ids", "pixel_values") if key in inputs}
    ids = inputs["input_ids"]
    with torch.inference_mode():
        out = reference.generate(
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **inputs,
        )
    best = [step[0].topk(2).values.tolist() for step in out.logits]
    token_ids = out.sequences[0, ids.shape[1] :].tolist()
    answer = Answer(ids[0].tolist(), token_ids, [first - second for first, second in best])
    return answer, tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("row", [LLAVA, LLAMA], ids=str)
async def test_chats_over_http_equal_transformers(row: FamilyRow, tmp_path: Path) -> None:
    directory = tmp_path / row.name
    reference = write_checkpoint(row, directory)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(directory), "name": "tiny"},
            "workers": {"replicas": 1, "max_step_tokens": 16, "num_blocks": 256},
            "encoders": {"replicas": int(row is LLAVA), "decode_processes": 0},
        }
    )
    comparison = Comparison()
    async with in_process_cluster(config) as (_, client):

        async def ask(**fields: Any) -> dict[str, Any]:
            body = {"model": "tiny", "temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True, **fields}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        async def streamed(messages: list[dict[str, Any]]) -> str:
            body = {"model": "tiny", "temperature": 0, "max_tokens": MAX_TOKENS, "messages": messages}
            response = await client.post("/v1/chat/completions", json={**body, "ignore_eos": True, "stream": True})
            events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
            return "".join(delta.get("content") or "" for delta in deltas)

        async def check(text: str, pictures: list[Image.Image], parts: list[dict[str, Any]]) -> None:
            messages = user(*parts, text)
            answer = await ask(messages=messages, ignore_eos=True)
            choice = answer["choices"][0]
            want, shown = expected(directory, reference, text, pictures)
            comparison.check(want, answer["prompt_token_ids"], choice["token_ids"], row.name)
            assert choice["message"]["content"] == shown
            assert await streamed(messages) == shown

        await check(TEXTS[0], [], [])
        if row is LLAVA:
            await check(TEXTS[0], [picture(1)], [image_part(1)])
        response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
        answers = await asyncio.gather(
            *(ask(messages=user(text), response_format=response_format, max_tokens=100) for text in TEXTS)
        )
        for answer in answers:
            jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
        prompt_ids = answers[1]["prompt_token_ids"]
        control_ids = {*range(3), llava_tokenizer().token_to_id("<image>")}
        assert [token_id for token_id in prompt_ids if token_id in control_ids] == [1], "control tokens stay letters"
    comparison.finish()
