"""Lets the demo's talker and code2wav say answers, many at a time, to measure them.

The function `speak` follows the rules of transformers' `generate` for the whole model, for prompts of text. It takes
the talker's steps itself, because `generate` takes one call of the code predictor's own `generate` for each frame. The
module does not know how the cluster speaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen3OmniMoeForConditionalGeneration

from deploy.demo.drawing.facts import Clip, Sample
from deploy.demo.speech.recordings import Samples
from deploy.demo.speech.speech_data import Ints
from deploy.demo.speech_config import (
    CODEBOOK_SIZE,
    CODEC_BOS,
    CODEC_EOS,
    CODEC_PAD,
    FRAME_SAMPLES,
    NO_THINK,
    NUM_CODEBOOKS,
    SPEAKER_TO_ID,
    THINK_BOS,
    THINK_EOS,
)
from deploy.demo.training.encoding import FRAMES_PER_SECOND, SampleEncoder

MOST_FRAMES = 600
_TOP_K, _RESIDUAL_TOP_P = 50, 0.8


@dataclass(frozen=True, slots=True)
class Drawing:
    """Says how codes are drawn; the defaults are those of transformers' `generate`."""

    temperature: float = 0.9
    """Scales the draw of the first code of a frame; 0 means the most likely codes everywhere."""
    repetition_penalty: float = 1.05


GREEDY = Drawing(temperature=0.0, repetition_penalty=1.0)


def load_voice(model_dir: Path) -> Any:
    """Loads the whole model in float32, as the cluster runs it on a CPU."""
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def speak(
    model: Any, prompt: Ints, answers: Sequence[Ints], voice: str, drawing: Drawing = GREEDY, seed: int = 0
) -> list[Ints]:
    """Returns the codes of each answer, of shape `(num_frames, NUM_CODEBOOKS)`; one that never ends has `MOST_FRAMES`
    frames. `prompt` holds the tokens of the user's turns and of the head of the assistant's turn."""
    generator = torch.Generator().manual_seed(seed)
    talker, later = model.talker, _later_rows(model, answers)
    rows = _first_rows(model, prompt, answers, voice)
    cache = DynamicCache()
    frames: list[torch.Tensor] = []
    num_frames = torch.full((len(answers),), MOST_FRAMES)
    seen = torch.zeros(len(answers), CODEBOOK_SIZE + 1, dtype=torch.bool)
    every = torch.arange(len(answers))
    while len(frames) < MOST_FRAMES:
        hidden = talker.model(inputs_embeds=rows, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        logits = _first_logits(talker, hidden, seen, drawing)
        first = _drawn(logits / (drawing.temperature or 1.0), drawing, 1.0, generator)
        is_end = (first == CODEBOOK_SIZE) & (num_frames == MOST_FRAMES)
        num_frames[is_end] = len(frames)
        if bool((num_frames < MOST_FRAMES).all()):
            break
        seen[every, first] = True
        codes, row = _frame(talker, hidden, first.clamp_max(CODEBOOK_SIZE - 1), drawing, generator)
        rows = (row + later[:, min(len(frames), later.shape[1] - 1)])[:, None]
        frames.append(codes)
    said = torch.stack(frames, 1).numpy()
    return [codes[:end] for codes, end in zip(said, num_frames.tolist(), strict=True)]


@torch.inference_mode()
def sound(model: Any, codes: Ints) -> Samples:
    """Returns the samples of codes, in one whole decode; a frame of silence where there are none."""
    if not len(codes):
        return np.zeros(FRAME_SAMPLES, np.float32)
    samples: torch.Tensor = model.code2wav(torch.from_numpy(codes).T[None])
    return np.asarray(samples[0, 0].float().numpy())


@torch.inference_mode()
def answer(model: Any, encoder: SampleEncoder, sample: Sample, voice: str) -> tuple[list[int], Samples]:
    """Returns the tokens with which the whole model answers a conversation, and their sound, from transformers' own
    `generate`, with the most likely token and code everywhere."""
    encoded = encoder.encode(sample)
    ids = torch.tensor([encoded.ids[: encoded.last_turn]])
    inputs: dict[str, Any] = {}
    for kind, name, pixels in (
        (encoded.images, "image", "pixel_values"),
        (encoded.videos, "video", "pixel_values_videos"),
    ):
        if kind:
            inputs[pixels] = torch.from_numpy(np.concatenate([patches for patches, _ in kind]))
            inputs[f"{name}_grid_thw"] = torch.tensor([grid for _, grid in kind])
    if encoded.videos:
        inputs["video_second_per_grid"] = torch.full((len(encoded.videos),), 2 / FRAMES_PER_SECOND)
        inputs["use_audio_in_video"] = any(isinstance(one, Clip) and one.sound for one in sample.media())
    if encoded.sounds:
        (heard,) = encoded.sounds
        inputs |= {
            "input_features": torch.from_numpy(heard)[None],
            "feature_attention_mask": torch.ones(1, heard.shape[1], dtype=torch.int64),
        }
    # Its talker looks for the layout of sounds in its own config, where no checkpoint has it.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    tokens, samples = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        speaker=voice,
        return_audio=True,
        thinker_do_sample=False,
        thinker_max_new_tokens=64,
        thinker_eos_token_id=model.config.im_end_token_id,
        talker_do_sample=False,
        talker_repetition_penalty=1.0,
        talker_max_new_tokens=MOST_FRAMES,
        **inputs,
    )
    return tokens[0, ids.shape[1] :].tolist(), np.asarray(samples[0, 0].numpy())


def _text_rows(model: Any, ids: Ints) -> torch.Tensor:
    rows: torch.Tensor = model.talker.text_projection(model.thinker.get_input_embeddings()(torch.from_numpy(ids)))
    return rows


def _first_rows(model: Any, prompt: Ints, answers: Sequence[Ints], voice: str) -> torch.Tensor:
    config = model.config
    marks = [config.tts_pad_token_id] * 4 + [config.tts_bos_token_id]
    ids = np.stack([np.concatenate([prompt, marks, answer[:1]]) for answer in answers])
    specials = [NO_THINK, THINK_BOS, THINK_EOS, SPEAKER_TO_ID[voice], CODEC_PAD, CODEC_BOS]
    rows = _text_rows(model, ids)
    rows[:, -len(specials) :] += model.talker.get_input_embeddings()(torch.tensor(specials))
    return rows


def _later_rows(model: Any, answers: Sequence[Ints]) -> torch.Tensor:
    """Returns what the text adds to each later row: the other tokens, the end mark, then pads. The last row holds for
    all that follow."""
    config = model.config
    longest = max(map(len, answers)) + 1
    ids = np.full((len(answers), longest), config.tts_pad_token_id)
    for row, answer in zip(ids, answers, strict=True):
        row[: len(answer)] = [*answer[1:], config.tts_eos_token_id]
    return _text_rows(model, ids)


def _first_logits(talker: Any, hidden: torch.Tensor, seen: torch.Tensor, drawing: Drawing) -> torch.Tensor:
    """Returns the logits of all codes and, last, of the end of speech; the other special ids are never drawn."""
    every = talker.codec_head(hidden)
    logits = torch.cat([every[:, :CODEBOOK_SIZE], every[:, CODEC_EOS : CODEC_EOS + 1]], 1)
    penalty = drawing.repetition_penalty
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _frame(
    talker: Any, hidden: torch.Tensor, first: torch.Tensor, drawing: Drawing, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of a frame whose first codes are given, and the sum of their embeddings."""
    predictor = talker.code_predictor
    row = talker.get_input_embeddings()(first)
    codes, shown = [first], [hidden, row]
    for at in range(NUM_CODEBOOKS - 1):
        states = predictor.model(inputs_embeds=torch.stack(shown, 1), use_cache=False).last_hidden_state
        code = _drawn(predictor.lm_head[at](states[:, -1]), drawing, _RESIDUAL_TOP_P, generator)
        codes.append(code)
        shown.append(predictor.model.codec_embedding[at](code))
        row = row + shown[-1]
    return torch.stack(codes, 1), row


def _drawn(logits: torch.Tensor, drawing: Drawing, top_p: float, generator: torch.Generator) -> torch.Tensor:
    if drawing.temperature == 0:
        return logits.argmax(-1)
    values, codes = logits.topk(_TOP_K)
    shares = values.softmax(-1)
    # A code is kept if those before it have not reached the share yet.
    shares = shares * (shares.cumsum(-1) - shares < top_p)
    chosen = torch.multinomial(shares, 1, generator=generator)
    return codes.gather(1, chosen)[:, 0]
