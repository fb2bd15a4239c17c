"""Loads and runs the encoders of the Qwen vision families: they turn patches of many pictures or frames, and
spectrograms, into features.

A family's `Checkpoint` names its transformers classes, and loads their parts from a checkpoint: the vision tower, the
tower for sounds, and the text half. Only this module knows the weight names of vision tower and text half.
`load_encoder` returns a `VisionEncoder`, or an `OmniEncoder` with one tower per modality. `fused_tower` rebuilds the
blocks of a vision tower from their own weights, with few large operations: query, key and value are one product and are
rotated together; residuals and gate are computed within the products; all windows attend in one call; the convolution
over patches, which do not overlap, is computed as the product that it equals. Blocks, mergers and patch
embedding take and return what the original ones did, so the tower around them remains that of transformers.

The module knows nothing of requests and queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fabric.contracts import ConfigError
from modalities.checkpoint_files import names_of_others
from modalities.device_copies import join_on_device
from modalities.families.causal_lm.fused_layers import GatedMlp, RowNorm, rotate
from modalities.families.causal_lm.language_model import PartNames, load_part
from modalities.families.causal_lm.projection import project, projection_of
from modalities.families.qwen_vl.layout import AUDIO, IMAGE, VIDEO, QwenVLConfig
from modalities.families.qwen_vl.tower_tables import tower_tables
from modalities.family import EncoderInput, EncoderModel
from modalities.media import VideoRows
from modalities.packed_attention import Segments, attend_packed, segments_of, use_packed_attention
from modalities.video_features import thinned

# ------------------------------------------------------------ the encoders


def load_encoder(
    checkpoint: Checkpoint,
    model_dir: Path,
    config: QwenVLConfig,
    place: tuple[str, str],
    modalities: Sequence[str],
) -> EncoderModel:
    """Loads only the towers of `modalities`; pictures and videos share one. `place` is (device, dtype). Raises
    ConfigError if a weight is missing."""
    found: dict[str, EncoderModel] = {}
    if set(modalities) - {AUDIO}:
        tower = fused_tower(checkpoint.load_vision_tower(model_dir, config, *place))
        vision = VisionEncoder(tower, has_deepstack=config.num_deepstack_levels > 0)
        if AUDIO not in modalities:
            return vision
        found = {IMAGE: vision, VIDEO: vision}
    return OmniEncoder({**found, AUDIO: checkpoint.load_sound_tower(model_dir, config, place)})


class VisionEncoder:
    """Implements `modalities.family.EncoderModel`. Only one forward pass may run at a time: the class is not
    thread-safe."""

    def __init__(self, tower: PreTrainedModel, has_deepstack: bool) -> None:
        self._tower, self._has_deepstack = tower, has_deepstack

    @torch.no_grad()
    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Returns, per unit, `(1 + num_deepstack_levels, num_tokens, hidden)`: level 0 replaces the embedding, and
        level i is added to the hidden states after layer i - 1 of the text model. Pictures do not attend to each other,
        and neither do the temporal patches of a video."""
        if not inputs:
            return []
        tower = self._tower
        grids = [unit.grid for unit in inputs]
        tables = tower_tables(tower, grids)
        pixels = join_on_device([unit.pixels for unit in inputs], tower.device, tower.dtype)
        output = tower(pixels, grid_thw=torch.tensor(grids), return_dict=True, **tables)
        deepstack = output.deepstack_features if self._has_deepstack else ()
        levels = torch.stack([output.pooler_output, *deepstack])
        num_tokens = [prod(grid) // tower.spatial_merge_size**2 for grid in grids]
        features = zip(inputs, levels.split(num_tokens, dim=1), strict=True)
        return [_thinned_unit(unit, feature).contiguous() for unit, feature in features]


def _thinned_unit(unit: EncoderInput, feature: torch.Tensor) -> torch.Tensor:
    """Returns the rows that remain of a video's unit `(num_levels, num_tokens, hidden)` after thinning; other units
    stay unchanged."""
    if unit.modality != VIDEO:
        return feature
    steps = feature.unflatten(1, (unit.grid[0], -1))
    return thinned(steps, VideoRows.of_geometry(unit.geometry))


class OmniEncoder:
    """Holds one tower per modality. Implements `modalities.family.EncoderModel` as the towers do."""

    def __init__(self, modality_to_encoder: Mapping[str, EncoderModel]) -> None:
        self._modality_to_encoder = modality_to_encoder

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Encodes the inputs, which all have one modality, with the tower of that modality."""
        return self._modality_to_encoder[inputs[0].modality].encode(inputs) if inputs else []


# ------------------------------------------------------------ the parts of a checkpoint

_VISION_NAMES = {r"^(thinker\.)?(model\.)?visual\.": ""}
_TEXT_NAMES = {
    r"^thinker\.lm_head\.": "lm_head.",
    r"^(thinker\.)?model\.language_model\.": "model.",
    r"^thinker\.model\.": "model.",
}
# This implementation sorts tokens by expert and sums each token's experts in a fixed order. `eager` adds with atomics
# on CUDA, so its sums depend on the batch; `batched_mm` copies the weights once per token.
_EXPERTS = "grouped_mm"


LoadSound = Callable[[Path, PreTrainedConfig, QwenVLConfig, tuple[str, str]], EncoderModel]
"""Loads the encoder of sounds; its parameters are the model directory, `audio_config`, the family's config, and
(device, dtype)."""


@dataclass(frozen=True)
class Checkpoint:
    """Holds a family's transformers classes."""

    config: type[PreTrainedConfig]
    """Names the config class of the model with vision and text."""
    tower: type[PreTrainedModel]
    text_model: type[PreTrainedModel]
    whole_config: type[PreTrainedConfig] | None = None
    """Names the config class of a checkpoint that holds the model as its thinker (the part of an omni model that reads
    media and writes text); None for a family that has no such checkpoints."""
    has_experts: bool = False
    load_sound: LoadSound | None = None
    """Loads the encoder of sounds; None for a family that takes no sound."""

    def load_vision_tower(self, model_dir: Path, config: QwenVLConfig, device: str, dtype: str) -> PreTrainedModel:
        """Loads the vision tower on `device`, in evaluation mode. Raises ConfigError."""
        kind = type("VisionTower", (self.tower,), {})
        vision_config = self._model_config(model_dir, config).vision_config
        names = PartNames(_VISION_NAMES, names_of_others("vision"))
        tower: PreTrainedModel = load_part(kind, model_dir, vision_config, names, (device, dtype), "sdpa")
        use_packed_attention(tower)
        return tower

    def load_sound_tower(self, model_dir: Path, config: QwenVLConfig, place: tuple[str, str]) -> EncoderModel:
        """Loads the encoder of sounds; `place` is (device, dtype). Raises ConfigError, also for a family that does not
        take sound."""
        if self.load_sound is None:
            raise ConfigError(f"{model_dir} has no audio tower")
        audio_config = self._model_config(model_dir, config).audio_config
        return self.load_sound(model_dir, audio_config, config, place)

    def load_text_half(
        self, model_dir: Path, config: QwenVLConfig, device: str, dtype: str, attention_name: str
    ) -> PreTrainedModel:
        """Loads the text half, with `model` and `lm_head`; its attention is the function registered as
        `attention_name`. Raises ConfigError."""
        model_config = self._model_config(model_dir, config)
        text_config = model_config.text_config
        text_config.tie_word_embeddings = bool(model_config.tie_word_embeddings)
        if self.has_experts:
            text_config.output_router_logits = False
        kind = text_half_of(self.text_model)
        names = PartNames(_TEXT_NAMES, names_of_others("text"))
        part = load_part(kind, model_dir, text_config, names, (device, dtype), attention_name)
        if self.has_experts:
            part.model.set_experts_implementation(_EXPERTS)
        return part

    def _model_config(self, model_dir: Path, config: QwenVLConfig) -> PreTrainedConfig:
        try:
            if config.is_thinker_only or self.whole_config is None:
                return self.config.from_pretrained(model_dir, local_files_only=True)
            return self.whole_config.from_pretrained(model_dir, local_files_only=True).thinker_config
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"can't read the config of {model_dir}: {error}") from error


def text_half_of(text_model: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Returns a class that holds a text model and its head, without the encoders."""
    # The base class is the family's PreTrainedModel, which knows the initial weights and the supported attention.
    (family,) = text_model.__bases__

    class TextHalf(family):  # type: ignore[misc, valid-type]  # The base class is known at run time only.
        config_class = text_model.config_class
        input_modalities = ("text",)
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' attribute)

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    return TextHalf


# ------------------------------------------------------------ the blocks of a vision tower

BLOCKS = frozenset(
    {
        "Qwen2VLVisionBlock",
        "Qwen2_5_VLVisionBlock",
        "Qwen2_5OmniVisionBlock",
        "Qwen3VLVisionBlock",
        "Qwen3OmniMoeVisionBlock",
    }
)
"""Lists the classes of transformers 5.23 whose blocks are norm, attention, sum, norm, MLP, sum."""


def fused_tower(tower: Any) -> Any:
    """Replaces the blocks, the patch embedding and the mergers' products of `tower`, a vision tower of transformers, in
    place, and returns it. Blocks that are not known here stay unchanged. Calls of the tower must then pass the keywords
    of `tower_tables`."""
    for index, block in enumerate(tower.blocks):
        if type(block).__name__ in BLOCKS:
            tower.blocks[index] = FusedVisionBlock(block)
    tower.patch_embed = PatchEmbedding(tower.patch_embed.proj)
    for merger in (tower.merger, *getattr(tower, "deepstack_merger_list", ())):
        _project_linears(merger)
    return tower


def _project_linears(part: nn.Module) -> None:
    """Replaces the linear layers of `part`, which must give them rows `(n, in_features)`."""
    for parent in list(part.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, project(child))


class FusedVisionBlock(nn.Module):
    """Computes one block. Its input stays unchanged."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = _norm(block.norm1), _norm(block.norm2)
        self.attention = FusedVisionAttention(block.attn)
        self.mlp = _mlp(block.mlp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        segments: Sequence[Segments] = (),
        **_: Any,
    ) -> torch.Tensor:
        """Takes and returns `(num_patches, hidden)`. Patches attend within the one of `segments` whose bounds are
        `cu_seqlens`; the rotary table is (cos, sin), each `(num_patches, head_dim)`. Raises ConfigError if there are no
        such segments."""
        layout = segments_of(segments, cu_seqlens)
        hidden = self.attention(self.before_attention(hidden_states), hidden_states, layout, position_embeddings)
        out: torch.Tensor = self.mlp(self.before_mlp(hidden), hidden)
        return out


def _norm(norm: nn.Module) -> nn.Module:
    return norm if isinstance(norm, nn.LayerNorm) else RowNorm(norm)


def _mlp(mlp: Any) -> nn.Module:
    if hasattr(mlp, "gate_proj"):
        return GatedMlp(mlp)
    if hasattr(mlp, "fc1"):
        return PlainMlp(mlp.fc1, mlp.act, mlp.fc2)
    return PlainMlp(mlp.linear_fc1, mlp.act_fn, mlp.linear_fc2)


class FusedVisionAttention(nn.Module):
    """Computes the attention of one block, its residual included."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scaling = attention.num_heads, attention.head_dim, attention.scaling
        if hasattr(attention, "qkv"):
            self.inputs = project(attention.qkv)
        else:
            self.inputs = project(attention.q, attention.k, attention.v)
        self.output = project(attention.proj)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        segments: Segments,
        table: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Takes and returns `(num_patches, hidden)`."""
        heads = self.inputs(x).view(x.shape[0], -1, self.head_dim)
        rotated, v = heads.split([2 * self.num_heads, self.num_heads], dim=1)
        cos, sin = (each.float()[None] for each in table)
        q, k = rotate(rotated.float(), cos, sin).to(x.dtype).split(self.num_heads, dim=1)
        attended = attend_packed(q, k, v, segments, self.scaling)
        return self.output.plus(attended.flatten(1), residual)


class PlainMlp(nn.Module):
    """Computes second(activation(first(x))), and adds the residual."""

    def __init__(self, first: nn.Linear, activation: nn.Module, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.activation, self.second = project(first), activation, project(second)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.second.plus(self.activation(self.first(x)), residual)


class PatchEmbedding(nn.Module):
    """Computes the patch embedding as a product: its convolution's kernel is as large as a patch, and so are its
    strides."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        assert convolution.stride == convolution.kernel_size
        self.projection = projection_of(convolution.weight.detach().flatten(1), convolution.bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps `(num_patches, values of a patch)` to `(num_patches, hidden)`."""
        projected: torch.Tensor = self.projection(patches)
        return projected
