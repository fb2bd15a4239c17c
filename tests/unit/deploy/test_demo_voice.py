"""Tests what the demo's voice learns and how it is judged, without a model."""

from __future__ import annotations

from ctypes.util import find_library

import numpy as np
import pytest

from deploy.demo.speech.script import WORDS, answers, script
from deploy.demo.speech.word_times import filled_starts, word_starts
from deploy.demo.speech_config import FRAME_SAMPLES

torch = pytest.importorskip("torch")

from deploy.demo.speech.judges import Judge, distances, pieces, sentences_of, variants  # noqa: E402
from deploy.demo.speech.recordings import NAME_TO_VOICE, recording, word_at_frames  # noqa: E402


def test_nothing_that_is_held_out_is_learned_and_nothing_comes_twice() -> None:
    said = script(0)
    learned = (*said.words, *said.sentences)
    assert len(set(learned)) == len(learned)
    assert not set(learned) & set(said.held_out)
    assert set(answers()) <= {*said.sentences, *said.held_out}
    assert script(0) == said != script(1)


def test_a_word_without_a_start_begins_between_its_neighbours() -> None:
    assert filled_starts([0.0, None, 1.0, None]) == [0.0, 0.5, 1.0, 1.0]
    assert filled_starts([None, 0.4]) == [0.2, 0.4]


@pytest.mark.skipif(find_library("espeak-ng") is None, reason="espeak-ng is not installed")
def test_espeak_says_when_each_word_of_a_recording_begins() -> None:
    text = "There is a small red circle in the middle."
    starts = word_starts(text, NAME_TO_VOICE["ethan"], 150)
    assert len(starts) == 9
    assert starts == sorted(starts)
    found = word_at_frames(text, "ethan")
    assert len(found) * FRAME_SAMPLES == len(recording(text, "ethan"))
    assert found.tolist() == sorted(found.tolist())
    assert {0, 4, 5, 8} <= set(found.tolist())  # Short words may lie between the middles of two frames.


def test_variants_differ_in_one_place() -> None:
    found = list(variants("The circle is green."))
    assert (1, "The square is green.") in found
    assert (3, "The circle is blue.") in found
    assert (0, "circle is green.") in found
    for place, text in found:
        words = text.split()
        expected = ["The", "circle", "is", "green."]
        same = len(words) == 4
        assert words[:place] == expected[:place]
        assert words[place + same :] == expected[place + 1 :]


def test_sentences_of_an_answer() -> None:
    assert sentences_of("Hello! Show me.") == ["Hello!", "Show me."]
    assert sentences_of("top left") == ["top left"]


def sounds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {word: np.repeat(rng.normal(size=(5, 8)), 4, 0).astype(np.float32) for word in WORDS}


def test_a_stretched_sound_is_nearest_to_its_own_template() -> None:
    templates = sounds()
    judge = Judge(templates.__getitem__)
    for word in WORDS[:9]:
        stretched = np.repeat(templates[word], np.random.default_rng(1).integers(1, 4, 20), 0)
        assert judge.word(stretched) == word
        assert distances(stretched, [templates[word]])[0] == pytest.approx(0, abs=1e-2)


def test_a_long_answer_is_cut_at_its_parts_and_a_wrong_part_is_noticed() -> None:
    templates = sounds()
    judge = Judge(templates.__getitem__)
    names = ["red", "green", "blue", "cat"]
    said = np.concatenate([templates[name] for name in names])
    assert [len(piece) for piece in pieces(said, [templates[name] for name in names])] == [20] * 4
    assert judge.words_of_parts(said, names) == [True] * 4
    assert judge.words_of_parts(said, ["red", "green", "dog", "cat"]) == [True, True, False, True]
