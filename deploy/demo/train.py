"""Trains the demo model from new weights: `python -m deploy.demo.train OUT`. The same seed on the same machine gives
the same result.

The towers learn first and alone (`training/vision_tower_lessons.py`, `training/audio_tower_lessons.py`). Then the whole
model learns conversations, with the loss on the assistant's words alone. Two processes learn, each from its half of
every batch (see `deploy.demo.training.learners`); each takes one core, or a GPU where there is one. The module does
not know how good the model is: `deploy.demo.evaluate` measures that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from deploy.demo.build import write_all_but_weights
from deploy.demo.demo_config import HIDDEN_SIZE
from deploy.demo.tasks.catalogue import AUDIO_TOWER_STAGE, STAGES, VISION_TOWER_STAGE, TowerStage, TrainingStage
from deploy.demo.training.audio_tower_lessons import AudioTowerTrainer, SoundBatches
from deploy.demo.training.batches import Batch, collate, forward, prepare_model
from deploy.demo.training.encoding import SampleEncoder
from deploy.demo.training.learners import NUM_LEARNERS, average_gradients, learners_device, run_together, to_device
from deploy.demo.training.optimizers import Optimizers
from deploy.demo.training.vision_tower_lessons import CROWDED, VisionBatch, VisionBatches, VisionTowerTrainer
from deploy.demo.weights import load_trainable, save_trained
from deploy.process_setup import ask_for_large_pages, keep_freed_memory

GRADIENT_NORM = 1.0
SAVE_EVERY = 500
"""Training writes the weights each time that this many more steps are done, so that people can inspect them."""
LOOK_WEIGHT = 0.2
"""Weights the loss of the vision tower's own labels, relative to the loss of the answers."""
ALL_STAGES: tuple[TowerStage | TrainingStage, ...] = (VISION_TOWER_STAGE, AUDIO_TOWER_STAGE, *STAGES)


class Lesson(NamedTuple):
    """Holds the data of one stage, the module that learns from them, and the function that judges a step."""

    shown: Dataset[Any]
    pupil: nn.Module
    judge: Callable[[Any], tuple[torch.Tensor, float]]
    """Returns the loss of a step and the share of predictions that are right."""


class Conversations(Dataset[Batch]):
    """Draws a learner's share of batch `step` of a stage from the random stream of (seed, stage, learner, step)."""

    def __init__(self, stage: TrainingStage, key: tuple[int, int, int], model_dir: Path) -> None:
        self.stage = stage
        self._key = key
        self._tasks = (*stage.tasks, *stage.lessons)
        self._model_dir = model_dir
        self._encoder: SampleEncoder | None = None

    def __len__(self) -> int:
        return self.stage.num_steps

    def __getitem__(self, step: int) -> Batch:
        self._encoder = self._encoder or SampleEncoder(self._model_dir)
        rng = np.random.default_rng((*self._key, step))
        size = self.stage.batch_size // NUM_LEARNERS
        chosen = rng.choice(len(self._tasks), size, p=self.stage.shares(step))
        scales = rng.choice(3, size, p=self.stage.scale_shares)
        samples = [self._tasks[task].draw(rng, int(scale)) for task, scale in zip(chosen, scales, strict=True)]
        return collate([self._encoder.encode(sample) for sample in samples])


class ConversationsAndVision(Dataset[tuple[Batch, VisionBatch]]):
    """Pairs, for each step, a batch of conversations with a batch of pictures that have labels for the vision tower."""

    def __init__(self, conversations: Conversations, vision_batches: VisionBatches) -> None:
        self._conversations = conversations
        self._vision_batches = vision_batches

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, step: int) -> tuple[Batch, VisionBatch]:
        return self._conversations[step], self._vision_batches[step]


def train(out_dir: Path, seed: int, stages: range, start_dir: Path | None = None) -> None:
    """Trains the stages and writes a complete model directory after each of them. `start_dir` is a checkpoint to
    continue from; without it the weights are new. Every stage begins with what the previous one wrote, so running the
    stages one by one gives the same result."""
    ask_for_large_pages()
    with tempfile.TemporaryDirectory() as scratch:
        for index in stages:
            meeting = Path(scratch) / str(index)
            meeting.mkdir()
            run_together(_learn, (index, seed, out_dir, start_dir, meeting), meeting)
            start_dir = out_dir


def _learn(learner: int, index: int, seed: int, out_dir: Path, start_dir: Path | None, scratch: Path) -> None:
    """Runs one stage as one of the learners. Only the first learner writes the model directory."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(seed)
    model_dir = scratch / f"learner-{learner}"
    vocabulary = write_all_but_weights(model_dir)
    model = load_trainable(vocabulary, seed, start_dir)
    prepare_model(model)
    lesson = _lesson(index, model, (seed, learner), model_dir)
    if learner > 0:
        return _run_stage(ALL_STAGES[index], lesson, lambda: None, learner)
    write_all_but_weights(out_dir)
    return _run_stage(ALL_STAGES[index], lesson, partial(save_trained, model, out_dir, vocabulary), learner)


def _lesson(index: int, model: Any, key: tuple[int, int], model_dir: Path) -> Lesson:
    """Builds what one stage needs. `key` holds the seed and the learner."""
    stage = ALL_STAGES[index]
    if isinstance(stage, TowerStage):
        share = replace(stage, batch_size=stage.batch_size // NUM_LEARNERS)
        if stage is AUDIO_TOWER_STAGE:
            audio_tower = AudioTowerTrainer(model.model.audio_tower, HIDDEN_SIZE)
            return Lesson(SoundBatches(share, key, model_dir), audio_tower, audio_tower.judge)
        vision_tower = VisionTowerTrainer(model.model.visual, HIDDEN_SIZE)
        return Lesson(
            VisionBatches(share.num_steps, share.batch_size, key, model_dir), vision_tower, vision_tower.judge
        )

    def judge(batch: Batch) -> tuple[torch.Tensor, float]:
        logits = forward(model, batch)
        return cross_entropy(logits, batch.targets), float((logits.argmax(-1) == batch.targets).float().mean())

    stage_key = (key[0], index, key[1])
    conversations = Conversations(stage, stage_key, model_dir)
    if not stage.num_looks:
        return Lesson(conversations, model, judge)
    vision_tower = VisionTowerTrainer(model.model.visual, HIDDEN_SIZE)

    def judge_both(shown: tuple[Batch, VisionBatch]) -> tuple[torch.Tensor, float]:
        loss, right = judge(shown[0])
        return loss + LOOK_WEIGHT * vision_tower.judge(shown[1])[0], right

    vision_batches = VisionBatches(stage.num_steps, stage.num_looks // NUM_LEARNERS, stage_key, model_dir, CROWDED)
    pupil = nn.ModuleDict({"answers": model, "head": vision_tower.head})
    return Lesson(ConversationsAndVision(conversations, vision_batches), pupil, judge_both)


def _run_stage(stage: TowerStage | TrainingStage, lesson: Lesson, save: Callable[[], None], learner: int) -> None:
    num_steps = stage.num_cycle_steps or stage.num_steps
    device = learners_device(learner)
    lesson.pupil.to(device)
    optimizers = Optimizers(lesson.pupil, stage.peak_rate, num_steps, stage.part_to_rate)
    # The loader's process is forked, because tasks are closures, which can't be pickled.
    loader = DataLoader(lesson.shown, batch_size=None, num_workers=1, prefetch_factor=8, multiprocessing_context="fork")
    parameters = list(lesson.pupil.parameters())
    lesson.pupil.train()
    smooth_loss, smooth_right = 0.0, 0.0
    with tqdm(loader, desc=stage.name, mininterval=5, disable=learner > 0) as bar:
        for step, shown in enumerate(bar):
            loss, right = lesson.judge(to_device(shown, device))
            loss.backward()
            average_gradients(parameters)
            torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
            optimizers.step()
            keep = min(0.98, step / (step + 1))
            smooth_loss = keep * smooth_loss + (1 - keep) * loss.item()
            smooth_right = keep * smooth_right + (1 - keep) * right
            if step % 10 == 0:
                bar.set_postfix(loss=f"{smooth_loss:.4f}", right=f"{smooth_right:.4f}")
            if (step + 1) % SAVE_EVERY == 0:
                save()
    save()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo model.")
    parser.add_argument("out", type=Path, help="is the directory that is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="continues from this checkpoint")
    parser.add_argument("--stages", type=int, nargs=2, default=(0, len(ALL_STAGES)), metavar=("FIRST", "END"))
    arguments = parser.parse_args()
    train(arguments.out, arguments.seed, range(*arguments.stages), arguments.start)


if __name__ == "__main__":
    main()
