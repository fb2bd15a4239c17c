"""Trains the audio tower alone, before the language model: a temporary head learns to name from each feature what there
is to hear, and is discarded afterwards.

The module knows no text. `deploy.demo.training.vision_tower_lessons` says why the towers are trained alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from deploy.demo.drawing.facts import NUMBERS
from deploy.demo.drawing.figures import COLOURS
from deploy.demo.drawing.speech import has_speech
from deploy.demo.tasks import heard
from deploy.demo.tasks.catalogue import TowerStage
from deploy.demo.training.batches import audio_inputs
from deploy.demo.training.encoding import SampleEncoder, num_audio_tokens

NAME_TO_WORDS: Mapping[str, tuple[str, ...]] = {
    "beeps": NUMBERS[1:6],
    "pitch": ("low", "high"),
    "glide": ("rising", "falling"),
    "spoken digit": NUMBERS,
    "spoken colour": COLOURS,
}
"""Maps each kind of sound to the words for what there is to hear in it."""
_DRAW = (heard.beeping, heard.pitched, heard.gliding, heard.spoken_digit, heard.spoken_colour)
SHARES = (0.3, 0.1, 0.1, 0.25, 0.25)
SILENT_SHARES = (0.6, 0.2, 0.2, 0.0, 0.0)
"""These shares apply where espeak-ng is not installed, so that no sample needs speech."""


@dataclass(slots=True)
class SoundBatch:
    inputs: dict[str, Any]
    kinds: torch.Tensor
    """Gives the kind of sound of each feature as an index into NAME_TO_WORDS. Has shape `(num_features,)`, int64."""
    words: torch.Tensor
    """Gives the word of each feature as an index into the words of its kind. Has shape `(num_features,)`, int64."""


class SoundBatches(Dataset[SoundBatch]):
    """Draws the sounds of each step from the random stream of (seed, learner, step)."""

    def __init__(self, stage: TowerStage, key: tuple[int, int], model_dir: Path) -> None:
        self.stage = stage
        self._key = key
        self._model_dir = model_dir
        self._encoder: SampleEncoder | None = None

    def __len__(self) -> int:
        return self.stage.num_steps

    def __getitem__(self, step: int) -> SoundBatch:
        self._encoder = self._encoder or SampleEncoder(self._model_dir)
        rng = np.random.default_rng((*self._key, 102, step))
        names = list(NAME_TO_WORDS)
        kinds = rng.choice(len(names), self.stage.batch_size, p=SHARES if has_speech() else SILENT_SHARES)
        spectrograms, words = [], []
        for kind in kinds.tolist():
            sound, fact = _DRAW[kind](rng)
            spectrograms.append(self._encoder.spectrogram(sound.samples))
            words.append(NAME_TO_WORDS[names[kind]].index(fact.word))
        lengths = [num_audio_tokens(one.shape[1]) for one in spectrograms]
        every = (torch.from_numpy(np.repeat(values, lengths)) for values in (kinds, np.array(words)))
        return SoundBatch(audio_inputs(spectrograms), *every)


class AudioTowerTrainer(nn.Module):
    """Holds the audio tower and the temporary head, which is discarded after this stage."""

    def __init__(self, tower: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(hidden_size, sum(map(len, NAME_TO_WORDS.values())))

    def losses(self, sounds: SoundBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns for each kind of sound the loss, and the share of features that the head classifies correctly."""
        mask = sounds.inputs["feature_attention_mask"]
        frames = sounds.inputs["input_features"].permute(0, 2, 1)[mask.bool()].T
        features = self.tower(frames, feature_lens=mask.sum(1), return_dict=True).last_hidden_state
        losses, rights = [], []
        for kind, logits in enumerate(self.head(features).split([len(w) for w in NAME_TO_WORDS.values()], dim=1)):
            said = sounds.kinds == kind
            words = sounds.words[said]
            losses.append(cross_entropy(logits[said], words) if len(words) else logits.sum() * 0)
            rights.append((logits[said].argmax(1) == words).float().mean() if len(words) else torch.tensor(1.0))
        return torch.stack(losses), torch.stack(rights)

    def judge(self, sounds: SoundBatch) -> tuple[torch.Tensor, float]:
        """Returns the loss of a step and the share of correct predictions, over all kinds of sound."""
        losses, rights = self.losses(sounds)
        return losses.sum(), float(rights.mean())
