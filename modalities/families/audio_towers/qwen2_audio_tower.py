"""Loads and runs Qwen2-Audio's encoder and projector. Only this module knows the names of their weights.

The reference pads every sound with silence to 30 s and masks the rows of silence as keys. These rows influence no row
that counts, so this module leaves them out. Of the silence it reads only the two mel frames that the convolutions of
the last row see. It knows nothing of requests or queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen2AudioConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import (
    Qwen2AudioEncoder,
    Qwen2AudioMultiModalProjector,
    Qwen2AudioPreTrainedModel,
)

from modalities.checkpoint_files import names_of_others
from modalities.families.audio_towers.sound_encoder import (
    SoundEncoder,
    batched,
    pooled_pairs,
    taken,
)
from modalities.families.audio_towers.sound_plans import halved
from modalities.families.causal_lm.language_model import PartNames, load_part, read_pretrained_config
from modalities.family import EncoderInput
from modalities.packed_attention import Segments, use_packed_attention

_NAMES = {r"^(model\.)?(audio_tower|multi_modal_projector)\.": r"\2."}


class AudioHalf(Qwen2AudioPreTrainedModel):  # type: ignore[misc]  # mypy does not follow transformers
    """An `AudioHalf` is the audio tower and the projector: the model without its language model."""

    def __init__(self, config: Qwen2AudioConfig) -> None:
        super().__init__(config)
        self.audio_tower = Qwen2AudioEncoder(config.audio_config)
        self.multi_modal_projector = Qwen2AudioMultiModalProjector(config)
        self.post_init()


def load_encoder(model_dir: Path, place: tuple[str, str]) -> SoundEncoder:
    """Loads the encoder and the projector. `place` is (device, dtype). Raises ConfigError if a weight is missing."""
    config = read_pretrained_config(model_dir)
    names = PartNames(_NAMES, names_of_others("sound", "projector"))
    part = load_part(AudioHalf, model_dir, config, names, place, "sdpa")
    use_packed_attention(part)
    return SoundEncoder(part, _rows)


def _rows(part: Any, inputs: Sequence[EncoderInput]) -> Sequence[torch.Tensor]:
    tower = part.audio_tower
    values = batched([unit.pixels for unit in inputs], max(len(unit.pixels) for unit in inputs), tower.conv1.weight)
    values = functional.gelu(tower.conv1(values))
    values = functional.gelu(tower.conv2(values)).transpose(1, 2)
    values = values + tower.embed_positions.weight[: values.shape[1]]
    num_rows = [halved(unit.grid[0], 1) for unit in inputs]
    rows = taken(values, num_rows)
    segments = Segments(num_rows, rows.device)
    for layer in tower.layers:
        rows = layer(rows[None], None, segments=(segments,))[0]
    pooled = pooled_pairs(rows, num_rows)
    made: torch.Tensor = part.multi_modal_projector(tower.layer_norm(torch.cat(pooled)))
    per_unit: Sequence[torch.Tensor] = made.split([len(unit) for unit in pooled])
    return per_unit
