"""Draws seeded weights for the demo model, and saves weights in the layout of transformers.

Numpy draws every parameter from a stream of its own, keyed by seed and name, because torch's generators give other
numbers on other vector units. The module does not know how the model is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from blake3 import blake3
from transformers import GenerationConfig, Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

from deploy.demo.demo_config import generation_config, thinker_config
from deploy.demo.tokenizer import Vocabulary

EMBEDDING_STD = 0.7
VISUAL_POSITION_STD = 0.2
SMOOTH_POSITION_GAIN = 0.7
# This gain spreads the logits widely enough that the best token changes with the prompt; the final norm gives hidden
# states of unit variance.
HEAD_GAIN = 2.0


def save_model(out_dir: Path, thinker: dict[str, object], generation: dict[str, object], seed: int) -> None:
    """Writes config.json, generation_config.json and the safetensors in bfloat16. It leaves torch's random state
    unchanged."""
    arguments = {name: value for name, value in thinker.items() if name != "model_type"}
    config = Qwen3OmniMoeThinkerConfig(**arguments)
    with torch.random.fork_rng(devices=[]):
        model = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**generation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(draw(name, tuple(parameter.shape), seed)))
    with _quiet():
        model.to(torch.bfloat16).save_pretrained(out_dir)
    for path in out_dir.glob("*.safetensors"):
        path.chmod(0o644)  # The library makes these files readable by the owner alone.


def load_trainable(vocabulary: Vocabulary, seed: int, start_dir: Path | None) -> Any:
    """Returns a float32 thinker to train: with new weights from `seed`, or with those of `start_dir`."""
    if start_dir is not None:
        return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(start_dir, dtype=torch.float32)
    arguments = {name: value for name, value in thinker_config(vocabulary).items() if name != "model_type"}
    model = Qwen3OmniMoeThinkerForConditionalGeneration(Qwen3OmniMoeThinkerConfig(**arguments)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # With the gain of 0.3, no token is much likelier than another at first.
            gain = 0.3 if name == "lm_head.weight" else 1.0
            parameter.copy_(torch.from_numpy(draw(name, tuple(parameter.shape), seed)) * gain)
        table = model.model.visual.pos_embed.weight
        table.copy_(torch.from_numpy(smooth_positions(*table.shape)))
    return model


def smooth_positions(num_places: int, size: int) -> np.ndarray:
    """Returns a table of position embeddings for a square grid, row-major, made of sines and cosines of row and column.
    Has shape `(num_places, size)`. The model stretches the table over pictures of any size, so a random table would
    look different at each size."""
    side = int(num_places**0.5)
    angles = np.linspace(0, 1, side)[:, None] * np.pi / 2 * np.arange(1, size // 4 + 1)
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    table = np.concatenate([np.repeat(waves, side, axis=0), np.tile(waves, (side, 1))], axis=1)
    return (table * SMOOTH_POSITION_GAIN).astype(np.float32)


def save_trained(model: Any, out_dir: Path, vocabulary: Vocabulary) -> None:
    """Writes the weights in bfloat16 with their configs; it does not change the model itself."""
    arguments = {name: value for name, value in thinker_config(vocabulary).items() if name != "model_type"}
    copy = Qwen3OmniMoeThinkerForConditionalGeneration(Qwen3OmniMoeThinkerConfig(**arguments))
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(**generation_config(vocabulary))
    with _quiet():
        copy.to(torch.bfloat16).save_pretrained(out_dir)
    for path in out_dir.glob("*.safetensors"):
        path.chmod(0o644)


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Returns a parameter of `shape`, float32. Norms are one and biases are zero. Embeddings are normal, and matrices
    are normal divided by the root of their fan-in."""
    if len(shape) == 1:
        return np.zeros(shape, np.float32) if name.endswith("bias") else np.ones(shape, np.float32)
    key = int.from_bytes(blake3(f"{seed} {name}".encode()).digest(length=16), "little")
    values = np.random.Generator(np.random.PCG64(key)).standard_normal(shape, dtype=np.float32)
    return values * np.float32(_std(name, shape))


def _std(name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("embed_tokens.weight"):
        return EMBEDDING_STD
    if name.endswith("pos_embed.weight"):
        return VISUAL_POSITION_STD
    is_expert_stack = ".experts." in name
    fan_in = shape[-1] if is_expert_stack else int(np.prod(shape[1:]))
    gain = HEAD_GAIN if name == "lm_head.weight" else 1.0
    return float(gain / np.sqrt(fan_in))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the progress bar of a save that takes milliseconds."""
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()
