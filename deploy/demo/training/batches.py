"""Packs encoded conversations into one batch of tensors, and runs the model's forward pass over it.

The vision tower of transformers computes attention picture by picture. Here all pictures of the same size go through in
one call, by an attention function registered under transformers' public extension point. The numbers are the same. The
module does not know how conversations are drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deploy.demo.training.encoding import IGNORED, Encoded, Grid

VISION_ATTENTION = "weft_demo_vision"
TEXT_ATTENTION = "weft_demo_text"
# Conversations share a padded attention call if their lengths, divided by this many tokens and rounded down, are equal.
_LENGTH_STEP = 48


@dataclass(slots=True)
class Batch:
    inputs: dict[str, Any]
    """Holds the arguments of the thinker's inner model: all conversations one after another in one row."""
    rows: torch.Tensor
    """Holds the positions whose next token belongs to an answer. Has shape `(num_targets,)`, int64."""
    targets: torch.Tensor
    samples: torch.Tensor
    """Says to which conversation each target belongs; it is -1 for a target of an earlier turn."""
    num_samples: int


def collate(encoded: Sequence[Encoded]) -> Batch:
    """Packs conversations into one batch; attention never reaches from one conversation to another."""
    rows, targets, samples, starts = [], [], [], []
    start = 0
    for index, one in enumerate(encoded):
        labels = np.array(one.labels)
        at = np.nonzero(labels != IGNORED)[0]
        rows.append(at - 1 + start)
        targets.append(labels[at])
        samples.append(np.where(at >= one.last_turn, index, -1))
        starts.append(start)
        start += len(one.ids)
    ids = np.concatenate([one.ids for one in encoded])
    positions = np.concatenate([block for one in encoded for block in one.positions], axis=1)
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(ids)[None],
        "position_ids": torch.from_numpy(positions)[:, None],
        "text_groups": _length_groups(starts, [len(one.ids) for one in encoded]),
    }
    images = [image for one in encoded for image in one.images]
    videos = [video for one in encoded for video in one.videos]
    sounds = [sound for one in encoded for sound in one.sounds]
    if images:
        inputs |= _named(vision_inputs(images), "pixel_values", "image")
    if videos:
        inputs |= _named(vision_inputs(videos), "pixel_values_videos", "video")
    if sounds:
        inputs |= audio_inputs(sounds)
    flat = [torch.from_numpy(np.concatenate(values)) for values in (rows, targets, samples)]
    return Batch(inputs, flat[0], flat[1], flat[2], len(encoded))


class PatchProjection(nn.Module):
    """Computes the vision tower's first layer as a matrix product, which is possible because its convolution's stride
    is its kernel size. It has the same parameters."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.proj = convolution

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def prepare_model(model: Any) -> None:
    """Makes the forward and backward passes fast on packed batches. Parameters and their names stay the same."""
    ALL_ATTENTION_FUNCTIONS.register(VISION_ATTENTION, vision_attention)
    ALL_ATTENTION_FUNCTIONS.register(TEXT_ATTENTION, text_attention)
    model.model.visual.config._attn_implementation = VISION_ATTENTION
    model.model.language_model.config._attn_implementation = TEXT_ATTENTION
    model.model.visual.patch_embed = PatchProjection(model.model.visual.patch_embed.proj)


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Returns the logits of the batch's targets. Has shape `(num_targets, vocab)`."""
    hidden = model.model(**batch.inputs, use_cache=False).last_hidden_state[0]
    logits: torch.Tensor = model.lm_head(hidden[batch.rows])
    return logits


@dataclass(slots=True)
class Groups:
    """Holds runs of tokens, each of which attends only within itself. Runs of one length form a group."""

    shapes: list[tuple[int, int]]
    """Gives for each group the number of its runs and the length of a run."""
    order: torch.Tensor
    """Holds the tokens of all groups, int64. A shorter run repeats its last token, which no earlier token sees."""
    first: torch.Tensor
    """Gives for each token its first place in `order`."""


def make_groups(groups: Sequence[npt.NDArray[np.int64]], num_tokens: int) -> Groups:
    """Returns the groups for arrays of token indices, each of shape `(num_runs, length)`."""
    order = np.concatenate([group.ravel() for group in groups])
    first = np.empty(num_tokens, np.int64)
    first[order[::-1]] = np.arange(len(order))[::-1]
    return Groups([group.shape for group in groups], torch.from_numpy(order), torch.from_numpy(first))


def vision_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    groups: Groups,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention within each picture. Maps `(1, heads, num_patches, head_dim)` to `(1, num_patches, heads,
    head_dim)`."""
    return _by_groups(query, key, value, groups, scaling, is_causal=False), None


def text_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    text_groups: Groups,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the same as `vision_attention`, but causal and within each conversation."""
    return _by_groups(query, key, value, text_groups, scaling, is_causal=True), None


def _by_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Groups, scaling: float, is_causal: bool
) -> torch.Tensor:
    gathered = [tensor[0].transpose(0, 1).index_select(0, groups.order) for tensor in (query, key, value)]
    outputs, at = [], 0
    for num_runs, length in groups.shapes:
        end = at + num_runs * length
        q, k, v = (part[at:end].unflatten(0, (num_runs, length)).transpose(1, 2) for part in gathered)
        output = scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=is_causal, enable_gqa=is_causal)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        at = end
    return torch.cat(outputs).index_select(0, groups.first)[None]


def _length_groups(starts: Sequence[int], lengths: Sequence[int]) -> Groups:
    step_to_indices: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        step_to_indices[length // _LENGTH_STEP].append(index)
    groups = []
    for indices in step_to_indices.values():
        longest = max(lengths[index] for index in indices)
        groups.append(np.stack([starts[i] + np.minimum(np.arange(longest), lengths[i] - 1) for i in indices]))
    return make_groups(groups, sum(lengths))


def vision_inputs(items: Sequence[tuple[np.ndarray, Grid]]) -> dict[str, Any]:
    """Returns the arguments of the vision tower: patches and grid of each picture or clip."""
    size_to_starts: dict[int, list[int]] = defaultdict(list)
    at = 0
    for _, (frames, rows, columns) in items:
        for _ in range(frames):
            size_to_starts[rows * columns].append(at)
            at += rows * columns
    groups = [np.array(starts)[:, None] + np.arange(size) for size, starts in sorted(size_to_starts.items())]
    return {
        "hidden_states": torch.from_numpy(np.concatenate([values for values, _ in items])),
        "grid_thw": torch.tensor([grid for _, grid in items]),
        # There is one run over everything, because the groups say which patches belong together.
        "cu_seqlens": torch.tensor([0, at], dtype=torch.int32),
        "groups": make_groups(groups, at),
    }


def _named(inputs: dict[str, Any], pixels: str, kind: str) -> dict[str, Any]:
    """Returns the vision tower's arguments under the prefixed names that the thinker expects."""
    return {pixels if name == "hidden_states" else f"{kind}_{name}": value for name, value in inputs.items()}


def audio_inputs(sounds: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns the arguments of the thinker for spectrograms, each of shape `(num_bins, num_frames)`."""
    length = max(sound.shape[1] for sound in sounds)
    features = np.zeros((len(sounds), sounds[0].shape[0], length), np.float32)
    mask = np.zeros((len(sounds), length), np.int64)
    for index, sound in enumerate(sounds):
        features[index, :, : sound.shape[1]] = sound
        mask[index, : sound.shape[1]] = 1
    return {"input_features": torch.from_numpy(features), "feature_attention_mask": torch.from_numpy(mask)}
