"""Tests that the demo model is trained on what transformers computes for the same conversation: prompt, positions,
logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen3OmniMoeThinkerForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from deploy.demo.build import build_demo_checkpoint
from deploy.demo.drawing.facts import Clip, Picture, Sample, Sound
from deploy.demo.drawing.speech import has_speech
from deploy.demo.tasks.catalogue import TASKS
from deploy.demo.training.batches import collate, forward, prepare_model
from deploy.demo.training.encoding import IGNORED, SampleEncoder

pytestmark = pytest.mark.torch

NAMES = [task.name for task in TASKS if has_speech() or not task.needs_speech]
NAME_TO_TASK = {task.name: task for task in TASKS}
KIND_TO_PART = {Picture: "image", Sound: "audio", Clip: "video"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_checkpoint(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def plain_model(model_dir: Path) -> Any:
    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def fast_model(model_dir: Path) -> Any:
    model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    prepare_model(model)
    return model


def samples_of(name: str) -> list[Sample]:
    rng = np.random.default_rng(NAMES.index(name))
    return [NAME_TO_TASK[name].draw(rng, scale) for scale in (0, 1, 2)]


def reference_inputs(model: Any, model_dir: Path, sample: Sample) -> dict[str, Any]:
    """Returns what transformers' chat template, processors and position rule compute. Media placeholders are expanded
    to their numbers of rows."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    messages = [
        {
            "role": turn.role,
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": KIND_TO_PART[type(part)]}
                for part in turn.parts
            ],
        }
        for turn in sample.turns
    ]
    messages.append({"role": "assistant", "content": sample.answer})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    inputs: dict[str, Any] = {}
    media = list(sample.media())
    if pictures := [Image.fromarray(m.pixels) for m in media if isinstance(m, Picture)]:
        inputs |= dict(Qwen2VLImageProcessorPil.from_pretrained(model_dir)(pictures, return_tensors="pt"))
        for grid in inputs["image_grid_thw"]:
            text = text.replace("<|image_pad|>", "<|image_rest|>" * (int(grid.prod()) // 4), 1)
        text = text.replace("<|image_rest|>", "<|image_pad|>")
    for clip in (m for m in media if isinstance(m, Clip)):
        inputs |= video_inputs(model_dir, clip)
    tracks = [m.sound for m in media if isinstance(m, Clip) and m.sound is not None]
    if waves := [sound.samples for sound in (*(m for m in media if isinstance(m, Sound)), *tracks)]:
        extract = WhisperFeatureExtractor.from_pretrained(model_dir)
        heard = extract(waves, sampling_rate=16_000, padding=True, return_attention_mask=True, return_tensors="pt")
        inputs |= {"input_features": heard["input_features"], "feature_attention_mask": heard["attention_mask"]}
        (num_frames,) = heard["attention_mask"].sum(-1).tolist()
        num_rows = rows_of_sound(model, num_frames)
        text = text.replace("<|audio_pad|>", "<|audio_pad|>" * num_rows)
        if tracks:
            text = text.replace("<|video_pad|>", interleaved(inputs["video_grid_thw"][0], num_rows))
            inputs["use_audio_in_video"] = True
    if "video_grid_thw" in inputs:
        num_rows = int(inputs["video_grid_thw"][0].prod()) // 4
        text = text if tracks else text.replace("<|video_pad|>", "<|video_pad|>" * num_rows)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    return inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def video_inputs(model_dir: Path, clip: Clip) -> dict[str, Any]:
    """Returns the patches of the frames in the order of Qwen's video processor. Clips are drawn with two frames a
    second, which is the rate that the model samples."""
    pictures = Qwen2VLImageProcessorPil.from_pretrained(model_dir)
    (_, rows, columns) = pictures([Image.fromarray(clip.frames[0])], return_tensors="pt")["image_grid_thw"][0].tolist()
    size = (columns * 16, rows * 16)
    frames = [np.asarray(Image.fromarray(frame).resize(size, resample=3)) / 127.5 - 1 for frame in clip.frames]
    patches = []
    for first in range(0, len(frames), 2):
        for row, column in np.ndindex(rows // 2, columns // 2):
            for y, x in np.ndindex(2, 2):
                top, left = (row * 2 + y) * 16, (column * 2 + x) * 16
                cut = np.stack([frame[top : top + 16, left : left + 16] for frame in frames[first : first + 2]])
                patches.append(cut.transpose(3, 0, 1, 2).ravel())
    return {
        "pixel_values_videos": torch.from_numpy(np.stack(patches)).float(),
        "video_grid_thw": torch.tensor([[len(frames) // 2, rows, columns]]),
        "video_second_per_grid": torch.tensor([1.0]),
    }


def interleaved(grid: torch.Tensor, num_heard: int) -> str:
    """Interleaves placeholders by time, with 13 positions a second, as
    Qwen3OmniMoeProcessor.replace_video_with_audio_token does."""
    moments = [time * 13 for time in range(int(grid[0])) for _ in range(int(grid[1] * grid[2]) // 4)]
    text, heard = "<|audio_start|>", 0
    for moment in moments:
        while heard < num_heard and heard < moment:
            text, heard = text + "<|audio_pad|>", heard + 1
        text += "<|video_pad|>"
    return text + "<|audio_pad|>" * (num_heard - heard) + "<|audio_end|>"


def rows_of_sound(model: Any, num_frames: int) -> int:
    features = torch.zeros(128, num_frames)
    return len(model.model.audio_tower(features, feature_lens=torch.tensor([num_frames])).last_hidden_state)


@pytest.mark.parametrize("name", NAMES)
def test_packed_conversations_equal_single_ones(name: str, model_dir: Path, plain_model: Any, fast_model: Any) -> None:
    encoder = SampleEncoder(model_dir)
    samples = samples_of(name)
    encoded = [encoder.encode(sample) for sample in samples]
    with torch.inference_mode():
        found = forward(fast_model, collate(encoded))
        expected = []
        for sample, one in zip(samples, encoded, strict=True):
            inputs = reference_inputs(plain_model, model_dir, sample)
            assert one.ids == inputs["input_ids"][0].tolist()
            logits = plain_model(**inputs).logits[0]
            at = np.nonzero(np.array(one.labels) != IGNORED)[0] - 1
            expected.append(logits[at])
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-3, rtol=1e-3)
