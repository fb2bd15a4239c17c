"""Writes the report on the demo model in Markdown from measured numbers. It measures nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.demo.scores import GOAL, Score

_HEAD = """# How often the demo model is right

Measured by `python -m deploy.demo.evaluate --seed {seed} --report ...` on {num_samples} fresh samples per task; another
seed gives other samples. An answer is right if greedy decoding gives it word for word, with its end. Weights in
bfloat16 as shipped, computed in float32 on a CPU. Of the pictures, 60 % have a mean side of 56 to 112 pixels, 25 % of
112 to 224, 15 % of 224 to 400.

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
