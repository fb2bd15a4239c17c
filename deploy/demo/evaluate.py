"""Measures how often the demo model is right, per task, on fresh samples: `python -m deploy.demo.evaluate --seed N`.

An answer counts as right if greedy decoding produces it word for word: at every position the model's best token is that
of the answer, the end of the turn included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from deploy.demo.batches import collate, forward, prepare_model
from deploy.demo.build import demo_checkpoint
from deploy.demo.catalogue import LEARNED, MODALITIES, TASKS, Task
from deploy.demo.encoding import SampleEncoder
from deploy.demo.media import Sample
from deploy.demo.report import model_card, report
from deploy.demo.scores import Score, fresh_samples
from deploy.demo.speech import has_speech

NUM_SAMPLES = 500
_BATCH_SIZE = 50


def load_model(model_dir: Path) -> Any:
    """Loads a model in float32, as the cluster runs it on a CPU."""
    model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    prepare_model(model)
    return model


@torch.inference_mode()
def are_right(model: Any, encoder: SampleEncoder, samples: Sequence[Sample]) -> list[bool]:
    """Returns for each sample whether the model's answer is right."""
    batch = collate([encoder.encode(sample) for sample in samples])
    is_wrong = forward(model, batch).argmax(-1) != batch.targets
    wrong = set(batch.samples[is_wrong].tolist())
    return [index not in wrong for index in range(batch.num_samples)]


def evaluate(model: Any, encoder: SampleEncoder, tasks: Sequence[Task], num_samples: int, seed: int) -> list[Score]:
    scores = []
    for task in tqdm(tasks, desc="tasks"):
        samples = list(fresh_samples(task, num_samples, seed))
        chunks = [samples[at : at + _BATCH_SIZE] for at in range(0, num_samples, _BATCH_SIZE)]
        scores.append(Score(task, num_samples, sum(sum(are_right(model, encoder, chunk)) for chunk in chunks)))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the demo model on fresh samples.")
    parser.add_argument("--model", type=Path, help="a model directory (default: the demo checkpoint)")
    parser.add_argument("--seed", type=int, default=1, help="of the samples")
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES, help="per task")
    parser.add_argument("--modalities", nargs="+", choices=MODALITIES, default=LEARNED)
    parser.add_argument("--report", type=Path, help="write the report to this file, and the model's card")
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
