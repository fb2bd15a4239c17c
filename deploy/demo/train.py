"""Trains the demo model from nothing: `python -m deploy.demo.train OUT`. Same seed, same machine, same result.

One process draws and encodes the conversations, another computes; each takes one core. The loss is on the assistant's
words alone. Does not know how well the model does: `deploy.demo.evaluate` says that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from deploy.demo.batches import Batch, collate, forward, prepare_model
from deploy.demo.build import write_all_but_weights
from deploy.demo.catalogue import NUM_SHIPPED_STAGES, STAGES, Stage
from deploy.demo.encoding import SampleEncoder
from deploy.demo.weights import load_trainable, save_trained

WEIGHT_DECAY = 0.05
WARM_UP = 0.1
LAST_RATE = 0.005
GRADIENT_NORM = 1.0


class Conversations(Dataset[Batch]):
    """Batch `step` of a stage, drawn from the random stream of (seed, stage, step)."""

    def __init__(self, stage_index: int, seed: int, model_dir: Path) -> None:
        self.stage = STAGES[stage_index]
        self._key = (seed, stage_index)
        self._tasks = (*self.stage.tasks, *self.stage.known)
        self._model_dir = model_dir
        self._encoder: SampleEncoder | None = None

    def __len__(self) -> int:
        return self.stage.num_steps

    def __getitem__(self, step: int) -> Batch:
        self._encoder = self._encoder or SampleEncoder(self._model_dir)
        rng = np.random.default_rng((*self._key, step))
        size = self.stage.batch_size
        chosen = rng.choice(len(self._tasks), size, p=self.stage.shares(step))
        scales = rng.choice(3, size, p=self.stage.scale_shares)
        samples = [self._tasks[task].draw(rng, int(scale)) for task, scale in zip(chosen, scales, strict=True)]
        return collate([self._encoder.encode(sample) for sample in samples])


def train(
    out_dir: Path, seed: int, stages: range, start_dir: Path | None = None, report: Callable[[str], None] = print
) -> None:
    """Writes a complete model directory, anew after each stage. `start_dir` is a checkpoint to go on from; without it
    the weights are new. Every stage begins with what the one before wrote, so stages run one by one give the same."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary = write_all_but_weights(Path(scratch))
        for index in stages:
            model = load_trainable(vocabulary, seed, start_dir)
            prepare_model(model)
            _run_stage(model, Conversations(index, seed, Path(scratch)), report)
            write_all_but_weights(out_dir)
            save_trained(model, out_dir, vocabulary)
            start_dir = out_dir


def _run_stage(model: Any, conversations: Conversations, report: Callable[[str], None]) -> None:
    stage: Stage = conversations.stage
    optimizers = _optimizers(model, stage.peak_rate)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            stage.peak_rate,
            stage.num_cycle_steps or stage.num_steps,
            pct_start=WARM_UP,
            final_div_factor=1 / (25 * LAST_RATE),
            cycle_momentum=False,
        )
        for optimizer in optimizers
    ]
    loader = DataLoader(conversations, batch_size=None, num_workers=1, prefetch_factor=8)
    model.train()
    smooth_loss, smooth_right = 0.0, 0.0
    with tqdm(loader, desc=stage.name, mininterval=5) as bar:
        for step, batch in enumerate(bar):
            logits = forward(model, batch)
            loss = torch.nn.functional.cross_entropy(logits, batch.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            keep = min(0.98, step / (step + 1))
            smooth_loss = keep * smooth_loss + (1 - keep) * loss.item()
            smooth_right = keep * smooth_right + (1 - keep) * float((logits.argmax(-1) == batch.targets).float().mean())
            if step % 10 == 0:
                bar.set_postfix(loss=f"{smooth_loss:.4f}", tokens_right=f"{smooth_right:.4f}")
    report(f"{stage.name}: loss {smooth_loss:.4f}, {smooth_right:.2%} of the answers' tokens right while learning")


def _optimizers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, head, experts and vectors; one rate serves both."""
    named = list(model.named_parameters())
    is_matrix = {name: p.ndim == 2 and "embed" not in name and "lm_head" not in name for name, p in named}
    matrices = [parameter for name, parameter in named if is_matrix[name]]
    others = [parameter for name, parameter in named if not is_matrix[name]]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--stages", type=int, nargs=2, default=(0, NUM_SHIPPED_STAGES), metavar=("FIRST", "END"))
    arguments = parser.parse_args()
    train(arguments.out, arguments.seed, range(*arguments.stages), arguments.start)


if __name__ == "__main__":
    main()
