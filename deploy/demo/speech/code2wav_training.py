"""Trains code2wav on recordings and their codes, without an adversary: it learns magnitudes of spectrograms at several
resolutions, and log-mel spectrograms.

A step draws crops of the recordings. The layers that work on frames see `CONTEXT` more frames before each crop, because
they remember; the convolutions that make samples see the crop alone, because they cost most and remember little.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from deploy.demo.speech.mel_codec import log_mel
from deploy.demo.speech.speech_data import SpeechData
from deploy.demo.speech_config import FRAME_SAMPLES, LOST_SAMPLES, NUM_CODEBOOKS, code2wav_config

NUM_STEPS = 7000
BATCH_SIZE = 8
CROP = 7
CONTEXT = 16
FIRST_SHARE = 0.15
"""Gives the share of steps whose crops begin where recordings begin, with nothing before them."""
PEAK_RATE, LAST_RATE_SHARE = 2e-3, 0.02
WARM_UP = 100
GRADIENT_NORM = 5.0
AVERAGE = 0.999
"""Says how much of the average of the weights stays from step to step."""
MEL_WEIGHT = 2.0
FFT_SIZES = (256, 512, 1024, 2048)
MAGNITUDE_FLOOR = 1e-4
SCALE_OF_BRANCHES = 0.3
"""Scales the branches of the upsampling blocks at first; transformers' own 0.000001 would never wake them."""


def new_code2wav(centroids: np.ndarray, seed: int) -> Any:
    """Returns code2wav with new weights. transformers' own initial values make an output of 0.000001; these make one of
    ordinary loudness. The code embeddings begin as the codec's centroids, with a constant beside them, because
    normalisation would erase how loud a frame is."""
    torch.manual_seed(seed)
    model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**code2wav_config()))
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d, nn.Linear)):
            module.reset_parameters()
    table = torch.zeros_like(model.code_embedding.weight)
    size = centroids.shape[2]
    books = torch.from_numpy(centroids).flatten(0, 1)
    # The model takes the mean over the codebooks, and the codec the sum.
    table[:, :size] = books * (NUM_CODEBOOKS / books[: centroids.shape[1]].std())
    table[:, size] = 1.0
    with torch.no_grad():
        model.code_embedding.weight.copy_(table)
        for _, block in model.upsample:
            block.gamma.fill_(SCALE_OF_BRANCHES)
    return model


class Crops:
    """Draws crops of the recordings, the same ones for the same seed."""

    def __init__(self, data: SpeechData, seed: int, device: torch.device) -> None:
        self._rng = np.random.default_rng((seed, 0xC0DE))
        self._codes = torch.from_numpy(data.sound_codes).to(device)
        self._samples = torch.from_numpy(data.samples).to(device)
        self._firsts = data.sound_starts[data.sound_starts < len(data.sound_codes) - CROP]
        weights = np.convolve(data.sound_weights, np.ones(CROP), "valid")[CONTEXT:]
        self._bounds = np.cumsum(weights) / weights.sum()
        self._device = device

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns codes `(batch, codebooks, frames)`, the samples of the last `CROP` frames, and how many frames stand
        before them."""
        if self._rng.random() < FIRST_SHARE:
            context, firsts = 0, self._rng.choice(self._firsts, BATCH_SIZE)
        else:
            context = CONTEXT
            firsts = CONTEXT + np.searchsorted(self._bounds, self._rng.random(BATCH_SIZE))
        starts = torch.from_numpy(firsts).to(self._device)[:, None]
        frames = starts - context + torch.arange(context + CROP, device=self._device)
        places = starts * FRAME_SAMPLES + torch.arange(CROP * FRAME_SAMPLES - LOST_SAMPLES, device=self._device)
        return self._codes[frames].transpose(1, 2), self._samples[places].float() / 2**15, context


def decode_crop(model: Any, codes: torch.Tensor, context: int) -> torch.Tensor:
    """Computes the samples of all frames but the first `context`, which only the layers on frames see."""
    hidden = model.code_embedding(codes + model.code_offset).mean(1)
    hidden = model.pre_transformer(inputs_embeds=hidden).last_hidden_state.transpose(1, 2)
    for blocks in model.upsample:
        for block in blocks:
            hidden = block(hidden)
    samples: torch.Tensor = hidden[..., context * int(np.prod(model.config.upsampling_ratios)) :]
    for block in model.decoder:
        samples = block(samples)
    return samples[:, 0]


def sound_loss(said: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss, and the distance of the log-mel spectrograms in it."""
    losses = []
    for size in FFT_SIZES:
        window = torch.hann_window(size, device=said.device)
        both = torch.stft(torch.cat([said, wanted]), size, size // 4, window=window, return_complex=True)
        ours, theirs = (both.abs() * (2 / window.sum())).chunk(2)
        shape = (ours - theirs).norm(dim=(1, 2)) / theirs.norm(dim=(1, 2)).clamp_min(1e-3)
        logs = ours.clamp_min(MAGNITUDE_FLOOR).log() - theirs.clamp_min(MAGNITUDE_FLOOR).log()
        losses.append(shape.mean() + logs.abs().mean())
    mel = (log_mel(said) - log_mel(wanted)).abs().mean()
    return torch.stack(losses).mean() + MEL_WEIGHT * mel, mel.detach()


def train_code2wav(data: SpeechData, seed: int, num_steps: int, device: torch.device, quiet: bool = False) -> Any:
    """Returns code2wav after `num_steps`: the running average of its weights, on the CPU in float32."""
    model = new_code2wav(data.centroids, seed).to(device).train()
    average = deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, betas=(0.8, 0.99), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps))
    crops = Crops(data, seed, device)
    smooth = 0.0
    with tqdm(range(num_steps), desc="code2wav", mininterval=5, disable=quiet) as bar:
        for step in bar:
            codes, wanted, context = crops.draw()
            said = decode_crop(model, codes, context)
            # The first frame of a crop lacks what the convolutions should have seen before it.
            cut = FRAME_SAMPLES if context else 0
            loss, mel = sound_loss(said[:, cut:], wanted[:, cut:])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
            optimizer.step()
            schedule.step()
            keep = min(AVERAGE, step / (step + 10))
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)
            if step % 20 == 0:
                smooth = 0.9 * smooth + 0.1 * float(mel) if step else float(mel)
                bar.set_postfix(mel=f"{smooth:.3f}")
    return average.cpu().eval()


def _rate(step: int, num_steps: int) -> float:
    """Returns the learning rate of a step as a share of the peak: a warm-up, then half a cosine."""
    progress = step / num_steps
    fall = LAST_RATE_SHARE + (1 - LAST_RATE_SHARE) * 0.5 * (1 + np.cos(np.pi * progress))
    return float(min(1.0, (step + 1) / WARM_UP) * fall)
