"""Measures how often the demo model is right, per task, on fresh samples: `python -m deploy.demo.evaluate --seed N`.

`evaluate` draws the samples of each task, lets the model answer them, and returns one `Score` per task. `report` and
`model_card` write the measured scores in Markdown. An answer counts as right if greedy decoding produces it word for
word: at every position the model's best token is that of the answer, the end of the turn included.

The module runs the model directly, with transformers, and knows no cluster. It does not know how the model was trained.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from deploy.demo.build import demo_checkpoint
from deploy.demo.drawing.facts import Sample
from deploy.demo.drawing.speech import has_speech
from deploy.demo.tasks.catalogue import LEARNED, MODALITIES, TASKS, Task
from deploy.demo.training.batches import collate, forward, prepare_model
from deploy.demo.training.encoding import SampleEncoder

GOAL = 0.97
NUM_SAMPLES = 500
SCALE_SHARES = (0.6, 0.25, 0.15)
"""Gives the share of each scale of picture sizes in a measurement. With these shares 40 % of the pictures are larger
than most pictures of training."""
_BATCH_SIZE = 50
_KEY = 0x5EED


class Score(NamedTuple):
    task: Task
    num_samples: int
    num_right: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_samples


def evaluate(model: Any, encoder: SampleEncoder, tasks: Sequence[Task], num_samples: int, seed: int) -> list[Score]:
    scores = []
    for task in tqdm(tasks, desc="tasks"):
        samples = list(fresh_samples(task, num_samples, seed))
        chunks = [samples[at : at + _BATCH_SIZE] for at in range(0, num_samples, _BATCH_SIZE)]
        scores.append(Score(task, num_samples, sum(sum(are_right(model, encoder, chunk)) for chunk in chunks)))
    return scores


@torch.inference_mode()
def are_right(model: Any, encoder: SampleEncoder, samples: Sequence[Sample]) -> list[bool]:
    """Returns for each sample whether the model's answer is right."""
    batch = collate([encoder.encode(sample) for sample in samples])
    is_wrong = forward(model, batch).argmax(-1) != batch.targets
    wrong = set(batch.samples[is_wrong].tolist())
    return [index not in wrong for index in range(batch.num_samples)]


def load_model(model_dir: Path) -> Any:
    """Loads a model in float32, as the cluster runs it on a CPU."""
    model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    prepare_model(model)
    return model


def fresh_samples(task: Task, num_samples: int, seed: int) -> Iterator[Sample]:
    """Yields samples that are the same for the same arguments. No seed gives samples of training, because these streams
    have another key."""
    rng = np.random.default_rng((_KEY, seed, zlib.crc32(task.name.encode())))
    for _ in range(num_samples):
        yield task.draw(rng, int(rng.choice(3, p=SCALE_SHARES)))


# ------------------------------------------------------------ the report

_HEAD = """# How often the demo model is right

`python -m deploy.demo.evaluate --seed {seed} --report ...` measured this on {num_samples} fresh samples per task;
another seed gives other samples. An answer is right if greedy decoding gives it word for word, with its end. The
weights are in bfloat16, as shipped, and computation is in float32 on a CPU. Of the pictures, 60 % have a mean side of
56 to 112 pixels, 25 % of 112 to 224, and 15 % of 224 to 400.

The goal is {goal:.0%} per task. {verdict}

| takes | task | right | of | accuracy | |
|---|---|---:|---:|---:|---|
"""


def report(scores: Sequence[Score], seed: int, left_out: Sequence[str] = ()) -> str:
    """Returns the text of the whole report."""
    num_samples = scores[0].num_samples
    below = [score for score in scores if score.accuracy < GOAL]
    verdict = f"{len(scores) - len(below)} of {len(scores)} tasks reach it"
    verdict += "." if not below else f"; below it: {', '.join(score.task.name for score in below)}."
    text = _HEAD.format(seed=seed, num_samples=num_samples, goal=GOAL, verdict=verdict)
    tried = Path(__file__).with_name("tried.md").read_text(encoding="utf-8")
    return text + table(scores) + "".join(f"\nLeft out: {reason}\n" for reason in left_out) + tried


def model_card(scores: Sequence[Score], seed: int) -> str:
    """Returns the text of the model card of a trained checkpoint."""
    text = Path(__file__).with_name("trained_card.md").read_text(encoding="utf-8")
    return text.format(num_samples=scores[0].num_samples, seed=seed, table=table(scores).rstrip())


def table(scores: Sequence[Score]) -> str:
    """Returns the table's rows, one per task."""
    rows = [
        f"| {score.task.modality} | {score.task.name} | {score.num_right} | {score.num_samples} | {score.accuracy:.1%} "
        f"| {'' if score.accuracy >= GOAL else 'below the goal'} |\n"
        for score in scores
    ]
    return "".join(rows)


# ------------------------------------------------------------ the command


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the demo model on fresh samples.")
    parser.add_argument(
        "--model", type=Path, help="measures the model in this directory (default: the demo checkpoint)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seeds the samples")
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES, help="is the number of samples for each task")
    parser.add_argument("--modalities", nargs="+", choices=MODALITIES, default=LEARNED)
    parser.add_argument("--report", type=Path, help="writes the report to this file, and updates the model card")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model_dir = arguments.model or demo_checkpoint()
    tasks = [task for task in TASKS if task.modality in arguments.modalities]
    left_out = [f"{kind}, which this model has not learned." for kind in MODALITIES if kind not in arguments.modalities]
    if not has_speech() and any(task.needs_speech for task in tasks):
        tasks = [task for task in tasks if not task.needs_speech]
        left_out.append("spoken words, because espeak-ng is not installed here.")
    scores = evaluate(load_model(model_dir), SampleEncoder(model_dir), tasks, arguments.samples, arguments.seed)
    text = report(scores, arguments.seed, left_out)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text, encoding="utf-8")
        (model_dir / "MODEL_CARD.md").write_text(model_card(scores, arguments.seed), encoding="utf-8")


if __name__ == "__main__":
    main()
