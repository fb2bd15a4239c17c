"""Gives the judge that compares speech with stored recordings, so that tests need no espeak-ng.

`tests/media/spoken_templates.npz` holds the features of recordings that espeak-ng made in the voice ethan: of all
words, of `SENTENCES`, and of these sentences with other words in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deploy.demo.speech.judges import Judge

TEMPLATES = Path(__file__).parents[1] / "media" / "spoken_templates.npz"
SENTENCES = ("The circle is green.", "You hear the number six.")
"""Holds sentences that the demo's voice has not learned."""


def stored_judge() -> Judge:
    with np.load(TEMPLATES) as stored:
        steps = np.split(stored["steps"].astype(np.float32) / 16, stored["ends"][:-1])
        templates = dict(zip(stored["texts"].tolist(), steps, strict=True))
    return Judge(templates.__getitem__)
