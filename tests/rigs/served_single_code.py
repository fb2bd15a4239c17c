"""Saves a tiny whole Qwen2.5-Omni with the demo's tokenizer, to be served, and speaks its answers without a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_row import load_reference
from single_code_reference import ROW, outputs_of
from speech_line import Answer, SpeechLine
from tiny_single_code import tiny_single_code

from deploy.demo.build import demo_checkpoint
from fabric.contracts import StagePrompt
from llm_workers.speech import load_code2wav, load_talker

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PLACEHOLDER = "<|IMAGE|>"
NAME_TO_KEY = {
    "image_token_id": "image_token_index",
    "video_token_id": "video_token_index",
    "audio_token_id": "audio_token_index",
    "audio_start_token_id": "audio_start_token_id",
    "audio_end_token_id": "audio_end_token_id",
    "vision_start_token_id": "vision_start_token_id",
    "vision_end_token_id": "vision_end_token_id",
}
"""Maps the names of ids in the demo's config to those of this family."""
NUM_CODES = 40


def save_single_code(directory: Path) -> None:
    """Saves the checkpoint. Its talker ends after `NUM_CODES` codes at the latest."""
    demo = demo_checkpoint()
    for name in TEXT_FILES:
        (directory / name).write_text((demo / name).read_text().replace("<|image_pad|>", PLACEHOLDER))
    thinker = json.loads((demo / "config.json").read_text())["thinker_config"]
    ids = {key: thinker[name] for name, key in NAME_TO_KEY.items()}
    tiny_single_code(thinker["text_config"]["vocab_size"], **ids).save_pretrained(directory)
    for name, content in ROW.files.items():
        (directory / name).write_text(json.dumps(content))
    generation = {"eos_token_id": thinker["eos_token_id"], "talker_max_new_tokens": NUM_CODES + 1}
    (directory / "generation_config.json").write_text(json.dumps(generation))


def spoken_alone(directory: Path, prompt_ids: Sequence[int], text_ids: Sequence[int], **options: Any) -> np.ndarray:
    """Returns the samples of an answer to a prompt of text, as int16: the hidden states are those of transformers, and
    the models of the stages speak without a cluster."""
    thinker = load_reference(directory, "Qwen2_5OmniForConditionalGeneration").thinker
    hidden: list[torch.Tensor] = []
    with thinker.model.language_model.layers[-1].register_forward_hook(
        lambda module, inputs, output: hidden.append((output[0] if isinstance(output, tuple) else output)[0])
    ):
        thinker(input_ids=torch.tensor([[*prompt_ids, *text_ids]]))
    outputs = outputs_of(hidden[0].detach().numpy(), len(prompt_ids), list(text_ids))
    talker = load_talker(directory, "cpu", "float32", (200, 8))
    line = SpeechLine(talker, load_code2wav(directory, "cpu", "float32"))
    call = line.open("alone", Answer(StagePrompt(tuple(prompt_ids), (), ()), outputs, options))
    line.finish()
    return (np.clip(np.concatenate(call.samples), -1, 1) * 32767).round().astype(np.int16)
