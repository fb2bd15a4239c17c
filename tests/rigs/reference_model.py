"""Computes the answers of plain `transformers` from the same checkpoint, which define what is correct."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

NEAR_TIE = 1e-4
"""A difference is accepted only if the reference's two best logits differ by at most this, in at most 0.1 % of
sequences."""


@dataclass
class Answer:
    prompt_ids: list[int]
    token_ids: list[int]
    margins: list[float]
    """Holds the best minus the second best logit, for each generated token."""


@dataclass
class Comparison:
    """Counts the compared sequences. `check` fails at the first real difference."""

    num_sequences: int = 0
    near_ties: list[str] = field(default_factory=list)

    def check(self, expected: Answer, prompt_ids: list[int], token_ids: list[int], label: str) -> None:
        self.num_sequences += 1
        assert prompt_ids == expected.prompt_ids, f"{label}: another prompt"
        if token_ids == expected.token_ids:
            return
        pairs = zip(expected.token_ids, token_ids, strict=False)
        at = next(
            (i for i, (want, got) in enumerate(pairs) if want != got), min(len(expected.token_ids), len(token_ids))
        )
        margin = expected.margins[at] if at < len(expected.margins) else float("inf")
        assert margin <= NEAR_TIE, (
            f"{label}: token {at} differs with margin {margin}: {expected.token_ids} / {token_ids}"
        )
        self.near_ties.append(f"{label} at {at} (margin {margin:.1e})")

    def finish(self) -> None:
        print(f"\n{self.num_sequences} sequences, {len(self.near_ties)} near ties {self.near_ties}")
        assert len(self.near_ties) <= 0.001 * self.num_sequences, self.near_ties


class ReferenceModel:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._answers: dict[str, Answer] = {}

    @cached_property
    def _parts(self) -> tuple[Any, Any, Any]:
        model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(self._directory, dtype=torch.float32).eval()
        return (
            model,
            AutoTokenizer.from_pretrained(self._directory),
            Qwen2VLImageProcessorPil.from_pretrained(self._directory),
        )

    def answer(self, messages: list[dict[str, Any]], max_tokens: int) -> Answer:
        """Returns the greedy continuation of a chat whose pictures are data URLs. It ends at the model's end-of-turn
        token."""
        key = repr((messages, max_tokens))
        if key not in self._answers:
            self._answers[key] = self._compute(messages, max_tokens)
        return self._answers[key]

    def _compute(self, messages: list[dict[str, Any]], max_tokens: int) -> Answer:
        model, tokenizer, processor = self._parts
        images = [
            _image(part)
            for turn in messages
            if isinstance(turn["content"], list)
            for part in turn["content"]
            if part["type"] == "image_url"
        ]
        plain = [{**turn, "content": _template_content(turn["content"])} for turn in messages]
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        inputs: dict[str, Any] = {}
        if images:
            inputs = dict(processor(images, return_tensors="pt"))
            for grid in inputs["image_grid_thw"]:
                count = int(grid.prod()) // processor.merge_size**2
                text = text.replace("<|image_pad|>", "<|placeholder|>" * count, 1)
            text = text.replace("<|placeholder|>", "<|image_pad|>")
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = [logits[0].float().topk(2).values for logits in output.logits]
        return Answer(
            ids[0].tolist(), output.sequences[0, ids.shape[1] :].tolist(), [float(top[0] - top[1]) for top in best]
        )


def _template_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "image"} if part["type"] == "image_url" else part for part in content]


def _image(part: dict[str, Any]) -> Image.Image:
    url = part["image_url"]["url"]
    return Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))).convert("RGB")
