"""The check of docstrings knows sentences from fragments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "house"))

from sentences import is_sentence


@pytest.mark.parametrize(
    "text",
    [
        "Returns the priority of the earliest request that still needs `unit`.",
        "A lease is a promise with a time limit.",
        "The scheduler calls `commit` once for each step.",
        "Names the file that broke.",
        "Units wait here until their batch starts.",
        "The inbox doesn't evict what a sequence reads.",
        "Records that a unit found no room.",
        "It counts tokens, not bytes.",
    ],
)
def test_sentences_are_known(text: str) -> None:
    assert is_sentence(text)


@pytest.mark.parametrize(
    "text",
    [
        "Of the first that still has to be read: its priority.",
        "Names of parameters in malloc.h.",
        "The queue of sounds.",
        "Bytes, not tokens. They are counted once.",
        "`(num_tokens, hidden)`, float32.",
        "Items in the order of their age.",
        "Missing keys of the tower, sizes always among them.",
        "",
    ],
)
def test_fragments_are_known(text: str) -> None:
    assert not is_sentence(text)
