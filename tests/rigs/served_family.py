"""Saves tiny models of the family table with the demo's tokenizer, to be served, and asks transformers what they answer
to chats with pictures."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from chat_media import png
from family_row import FamilyRow, load_reference, spread
from family_rows_pictures import INTERNVL
from PIL import Image
from reference_model import Answer
from transformers import AutoTokenizer

from deploy.demo.build import demo_checkpoint

MAX_TOKENS = 8
NAME_TO_PLACEHOLDER = {
    "qwen2_5_omni": "<|IMAGE|>",
    "llava": "<image>",
    "llava_onevision": "<image>",
    "internvl": "<IMG_CONTEXT>",
}
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class ServedFamily:
    """A `ServedFamily` is a checkpoint of one row, and transformers' model of it."""

    row: FamilyRow
    directory: Path
    reference: Any
    placeholder: str
    image_token_id: int


def served_family(row: FamilyRow, directory: Path) -> ServedFamily:
    """Saves the row's tiny model with the demo's vocabulary. The placeholder has the family's own spelling."""
    demo = demo_checkpoint()
    placeholder = NAME_TO_PLACEHOLDER.get(row.name, "<|image_pad|>")
    for name in TEXT_FILES:
        text = (demo / name).read_text().replace("<|image_pad|>", placeholder)
        if row is INTERNVL:  # InternVL's template leaves the marks around a picture to the processor.
            is_template = name == "chat_template.jinja"
            for mark, own in (("<|vision_start|>", "<img>"), ("<|vision_end|>", "</img>")):
                text = text.replace(mark, "" if is_template else own)
        (directory / name).write_text(text)
    tokens = json.loads((demo / "config.json").read_text())["thinker_config"]
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
    return ServedFamily(row, directory, load_reference(directory, kind.__name__), placeholder, tokens["image_token_id"])


def expected(served: ServedFamily, messages: list[dict[str, Any]], pictures: list[Image.Image]) -> Answer:
    """Returns what transformers answers to one message with these pictures."""
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
