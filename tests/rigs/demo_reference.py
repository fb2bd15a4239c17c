"""Prepares the demo's conversations about sounds and clips: as lossless files for the cluster, and as tensors for plain
transformers.

The tensors are the trainer's (test_demo_encoding.py compares them with the reference processors). Prompt, positions and
answers come from transformers itself.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lossless_files import mkv, quantised, wav
from reference_model import Answer
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from deploy.demo.ask import png
from deploy.demo.drawing.facts import Clip, Part, Picture, Sample, Sound
from deploy.demo.training.encoding import FRAMES_PER_SECOND, SampleEncoder

SECONDS_PER_GRID = 2 / FRAMES_PER_SECOND


def as_on_file(sample: Sample) -> Sample:
    """Returns the sample with its sounds quantised to 16 bits, as a file holds them."""
    turns = tuple(replace(turn, parts=tuple(_on_file(part) for part in turn.parts)) for turn in sample.turns)
    return replace(sample, turns=turns)


def lossless_messages(sample: Sample) -> list[dict[str, Any]]:
    """Returns the `messages` of a chat completion, with files that decode to exactly what the sample holds."""
    return [{"role": turn.role, "content": [_part(part) for part in turn.parts]} for turn in sample.turns]


class DemoReference:
    """Runs plain transformers on a checkpoint of the demo's form."""

    def __init__(self, directory: Path) -> None:
        self._encoder = SampleEncoder(directory)
        self._model: Any = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def answer(self, sample: Sample, max_tokens: int) -> Answer:
        """Decodes greedily to the end of the turn."""
        encoded = self._encoder.encode(sample)
        ids = torch.tensor([encoded.ids[: encoded.last_turn]])
        inputs: dict[str, Any] = {}
        for kind, name in ((encoded.images, "image"), (encoded.videos, "video")):
            if kind:
                pixels = "pixel_values" if name == "image" else "pixel_values_videos"
                inputs[pixels] = torch.from_numpy(np.concatenate([patches for patches, _ in kind]))
                inputs[f"{name}_grid_thw"] = torch.tensor([grid for _, grid in kind])
        if encoded.videos:
            inputs["video_second_per_grid"] = torch.full((len(encoded.videos),), SECONDS_PER_GRID)
            inputs["use_audio_in_video"] = any(isinstance(one, Clip) and one.sound for one in sample.media())
        if encoded.sounds:
            (sound,) = encoded.sounds
            inputs["input_features"] = torch.from_numpy(sound)[None]
            inputs["feature_attention_mask"] = torch.ones(1, sound.shape[1], dtype=torch.int64)
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = [logits[0].float().topk(2).values for logits in output.logits]
        margins = [float(top[0] - top[1]) for top in best]
        return Answer(ids[0].tolist(), output.sequences[0, ids.shape[1] :].tolist(), margins)


def _on_file(part: Part) -> Part:
    if isinstance(part, Sound):
        return replace(part, samples=quantised(part.samples))
    if isinstance(part, Clip) and part.sound is not None:
        return replace(part, sound=replace(part.sound, samples=quantised(part.sound.samples)))
    return part


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Picture):
        return {"type": "image_url", "image_url": {"url": _data_url("image/png", png(part))}}
    if isinstance(part, Sound):
        data = base64.b64encode(wav(part.samples)).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    file = mkv(part.frames, part.fps, None if part.sound is None else part.sound.samples)
    return {"type": "video_url", "video_url": {"url": _data_url("video/x-matroska", file)}}


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
